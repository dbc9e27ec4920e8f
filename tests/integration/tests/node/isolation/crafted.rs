//! Tests frames that no socket would send, sent by a pod: none arrives anywhere, each is counted with its reason.

use std::{
    collections::BTreeMap,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    agent::knictl_binary,
    frames::{Ip, PacketSocket, Payload},
    patience, require,
    stage::address,
    traffic::new_token,
};

use super::{
    PORT, Scene,
    forge::{destinations, errors_and_options, forge, link_control, link_headers, sources},
};

/// Long enough for the frames to arrive if they were not dropped.
const QUIET: Duration = Duration::from_millis(100);

pub(super) fn holds(frame: &[u8], token: &str) -> bool {
    frame.windows(token.len()).any(|window| window == token.as_bytes())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_crafted_frame_leaves_its_network() -> Result<()> {
    require!(root, netns, bpf, ip);
    let scene = Scene::set("crafted").await?;
    let (stage, blue) = (&scene.stage, scene.pod("blue-1"));
    let plain = [true, false].map(|v4| address(scene.pod("plain"), v4));
    let mut others = Vec::new();
    for name in ["plain", "blue-2", "red-1", "red-3"] {
        let pod = scene.pod(name);
        let addresses = [address(pod, true), address(pod, false)];
        others.push((name, stage.macs(pod, "eth0").await?, addresses));
    }
    let mut forge = forge(&scene, "blue-1").await?;
    destinations(&mut forge, plain)?;
    link_headers(&mut forge, &others)?;
    sources(&mut forge, plain)?;
    link_control(&mut forge, plain)?;
    errors_and_options(&mut forge)?;

    // Everywhere except in the pod itself.
    let mut witnesses = vec![("uplink", PacketSocket::open(&stage.node, "uplink0")?)];
    for name in ["blue-2", "red-1", "red-2", "red-3", "plain"] {
        witnesses.push((name, PacketSocket::open(&scene.pod(name).inside, "eth0")?));
    }
    let socket = PacketSocket::open(&blue.inside, "eth0")?;
    let mut counted = BTreeMap::<&str, u64>::new();
    for case in &forge.cases {
        socket.send(&case.frame).with_context(|| case.what.clone())?;
        if let Some(reason) = case.reason {
            let count = counted.entry(reason).or_default();
            *count += 1;
            stage
                .wait_for_drops(blue, "from_pod", reason, *count)
                .await
                .with_context(|| case.what.clone())?;
        }
    }
    // The valid frame is sent last: its arrival shows that all earlier frames would have arrived.
    let honest = new_token();
    let packet = Ip::new(forge.v4, "10.10.0.12".parse()?).packet(&Payload::udp(40_000, PORT, honest.as_bytes()));
    socket.send(&forge.to_gateway().frame(&packet))?;
    for (name, witness) in &witnesses {
        let arrived = arrivals(witness, &honest, *name == "blue-2")?;
        for token in &forge.tokens {
            assert!(
                !arrived.iter().any(|frame| holds(frame, token)),
                "a forged frame reached {name}"
            );
        }
        let honest_arrived = arrived.iter().any(|frame| holds(frame, &honest));
        assert_eq!(honest_arrived, *name == "blue-2", "the honest frame, seen by {name}");
    }
    for server in &scene.servers {
        assert!(
            !forge.tokens.iter().any(|token| server.saw(token)),
            "{} saw one",
            server.identity()
        );
    }
    assert!(forge.cases.len() > 90, "{} cases", forge.cases.len());
    drops_are_shown(&scene, &counted)
}

/// All captured frames so far; up to the valid one if it is expected.
pub(super) fn arrivals(witness: &PacketSocket, honest: &str, expected: bool) -> Result<Vec<Vec<u8>>> {
    let deadline = Instant::now() + patience();
    let mut frames: Vec<Vec<u8>> = Vec::new();
    loop {
        match witness.receive(QUIET, |_| true)? {
            Some(frame) => frames.push(frame),
            None if expected && Instant::now() < deadline && !frames.iter().any(|f| holds(f, honest)) => {}
            None => return Ok(frames),
        }
    }
}

/// Checks the same numbers in the output of `knictl drops -o json`.
fn drops_are_shown(scene: &Scene, counted: &BTreeMap<&str, u64>) -> Result<()> {
    let shown: serde_json::Value = serde_json::from_str(&scene.stage.knictl(&["drops", "-o", "json"])?)?;
    let rows = shown["drops"].as_array().context("no list of drops")?;
    for (reason, count) in counted {
        let row = rows
            .iter()
            .find(|row| row["podName"] == "blue-1" && row["reason"] == *reason && row["direction"] == "from_pod");
        let row = row.with_context(|| format!("{reason} is not in {shown}"))?;
        assert_eq!(row["count"]["packets"], *count, "{row}");
        assert_eq!(row["network"], "blue", "{row}");
        assert!(row["explanation"].as_str().is_some_and(|text| text.len() > 10), "{row}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drop_can_be_watched_as_it_happens() -> Result<()> {
    require!(root, netns, bpf, ip);
    let scene = Scene::set("watched").await?;
    let mut forge = forge(&scene, "red-1").await?;
    forge.udp_from(
        "foreign source",
        &forge.to_gateway(),
        "10.10.0.99".parse()?,
        "10.10.0.12".parse()?,
        "source_address",
    );
    let program = scene.stage.node.install(&knictl_binary()?)?;
    let mut command = scene.stage.node.command(program);
    command.args(["drops", "--follow", "-o", "json"]).stdout(Stdio::piped());
    let mut follower = Running(command.spawn()?);
    let output = std::io::BufReader::new(follower.0.stdout.take().context("no stdout")?);
    let (sender, events) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in std::io::BufRead::lines(output).map_while(std::io::Result::ok) {
            let event: serde_json::Value = serde_json::from_str(&line).expect(&line);
            // What a pod sent while it was attached can be reported after that.
            if event["reason"] != "endpoint_not_ready" {
                drop(sender.send(event));
            }
        }
    });
    // The follower does not report when it is ready: send until it prints an event.
    let socket = PacketSocket::open(&scene.pod("red-1").inside, "eth0")?;
    let event = (0..100).find_map(|_| {
        drop(socket.send(&forge.cases[0].frame));
        events.recv_timeout(QUIET).ok()
    });
    drop(follower);
    ensure!(reader.join().is_ok(), "a line is not JSON");
    let event = event.context("no event was shown")?;
    for (field, value) in [
        ("network", "red"),
        ("podNamespace", "team"),
        ("podName", "red-1"),
        ("ifname", "eth0"),
        ("direction", "from_pod"),
        ("reason", "source_address"),
        ("source", "10.10.0.99"),
        ("destination", "10.10.0.12"),
        ("protocol", "UDP"),
    ] {
        assert_eq!(event[field], value, "{field} of {event}");
    }
    assert_eq!(event["sourcePort"], 40_000);
    assert_eq!(event["destinationPort"], PORT);
    assert_eq!(event["length"], forge.cases[0].frame.len());
    Ok(())
}

/// A process that is killed on drop.
struct Running(std::process::Child);

impl Drop for Running {
    fn drop(&mut self) {
        // The signal fails for a process that has already exited.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
