//! Tests that only the peer of the own network answers.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result};
use kni_integration::{
    Namespaces,
    node::{FABRIC_V4, FABRIC_V6, NODE_V4, NODE_V6},
    patience, require,
    stage::address,
    traffic::{Matrix, Probe},
};

use super::{PORT, Scene};

/// Long enough for an answer on a busy machine; each silent probe takes this time.
const PATIENCE: Duration = Duration::from_millis(800);

struct Questions<'a>(Vec<Probe<'a>>);

impl<'a> Questions<'a> {
    fn ask(&mut self, from: &'a Namespaces, to: &[&str], expected: Option<&'a str>) -> Result<()> {
        for address in to {
            let to: IpAddr = address.parse().with_context(|| (*address).to_owned())?;
            self.0.push(Probe { from, to, expected });
        }
        Ok(())
    }

    fn answers(&self, scene: &Scene) -> Matrix {
        let servers: Vec<_> = scene.servers.iter().collect();
        Matrix::run(&self.0, &servers, PORT, PATIENCE)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_addresses_reach_their_own_peer_only() -> Result<()> {
    require!(root, netns, bpf, ip);
    let scene = Scene::set("equal").await?;
    let pod = |name: &str| &scene.pod(name).inside;
    let mut questions = Questions(Vec::new());
    for (from, to, answers) in [
        ("blue-1", ["10.10.0.12", "fd10::12"], "blue-2"),
        ("blue-2", ["10.10.0.11", "fd10::11"], "blue-1"),
        ("red-1", ["10.10.0.12", "fd10::12"], "red-2"),
        ("red-2", ["10.10.0.11", "fd10::11"], "red-1"),
        ("red-1", ["10.10.0.77", "fd10::77"], "red-3"),
        ("red-3", ["10.10.0.12", "fd10::12"], "red-2"),
    ] {
        questions.ask(pod(from), &to, Some(answers))?;
    }
    let matrix = questions.answers(&scene);
    assert_eq!(matrix.rows.len(), 36);
    matrix.assert_expected();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_outside_the_network_is_silent() -> Result<()> {
    require!(root, netns, bpf, ip);
    let scene = Scene::set("outside").await?;
    let plain = [true, false].map(|v4| address(scene.pod("plain"), v4).to_string());
    let plain: Vec<_> = plain.iter().map(String::as_str).collect();
    let node = [NODE_V4, NODE_V6, FABRIC_V4, FABRIC_V6, "169.254.1.1"];
    let mut questions = Questions(Vec::new());
    for name in ["blue-1", "red-1"] {
        let from = &scene.pod(name).inside;
        questions.ask(from, &plain, None)?;
        questions.ask(from, &node, None)?;
    }
    // An address that only red has, requested from all other networks; addresses that both have, requested from a third
    // network.
    let exclusive = ["10.10.0.77", "fd10::77"];
    let shared = ["10.10.0.11", "fd10::11"];
    questions.ask(&scene.pod("blue-1").inside, &exclusive, None)?;
    for from in [
        &scene.pod("plain").inside,
        &*scene.stage.node,
        scene.stage.node.fabric(),
    ] {
        questions.ask(from, &exclusive, None)?;
        questions.ask(from, &shared, None)?;
    }
    questions.answers(&scene).assert_expected();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_extra_interface_is_in_its_own_network() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut scene = Scene::set("extra").await?;
    let with =
        |network: &str| format!(r#"[{{"name":"{network}","interface":"net1","ips":["10.10.0.20","fd10::20"]}}]"#);
    for network in ["blue", "red"] {
        let name = format!("{network}-extra");
        scene
            .add(&name, &[("k8s.v1.cni.cncf.io/networks", &with(network))])
            .await?;
    }
    scene
        .add("multi", &[("kni.io/multi-network", "blue,red@other")])
        .await?;
    let multi = scene.pod("multi");
    assert_eq!(
        multi.interfaces.keys().collect::<Vec<_>>(),
        ["eth0", "net1", "other"],
        "the interfaces that were asked for"
    );

    let plain = [true, false].map(|v4| address(scene.pod("plain"), v4).to_string());
    let plain: Vec<_> = plain.iter().map(String::as_str).collect();
    let mut questions = Questions(Vec::new());
    for (from, to, answers) in [
        ("blue-extra", ["10.10.0.12", "fd10::12"], "blue-2"),
        ("red-extra", ["10.10.0.12", "fd10::12"], "red-2"),
        ("blue-2", ["10.10.0.20", "fd10::20"], "blue-extra"),
        ("red-2", ["10.10.0.20", "fd10::20"], "red-extra"),
    ] {
        questions.ask(&scene.pod(from).inside, &to, Some(answers))?;
    }
    for from in ["blue-extra", "red-extra", "multi"] {
        let from = &scene.pod(from).inside;
        questions.ask(from, &plain, Some("plain"))?;
        questions.ask(from, &[NODE_V4, NODE_V6], Some("node"))?;
    }
    // A pod in default and blue connects neither these networks nor red.
    let extra = scene.pod("blue-extra");
    let own = [true, false].map(|v4| address(extra, v4).to_string());
    let own: Vec<_> = own.iter().map(String::as_str).collect();
    questions.ask(&scene.pod("plain").inside, &own, Some("blue-extra"))?;
    questions.ask(&scene.pod("blue-2").inside, &own, None)?;
    questions.ask(&scene.pod("plain").inside, &["10.10.0.20", "fd10::20"], None)?;
    questions.ask(&extra.inside, &["10.10.0.77", "fd10::77"], None)?;
    questions.answers(&scene).assert_expected();

    // Both networks of one pod with equal subnets: the interface determines the network.
    for (interface, answers) in [("net1", "blue-2"), ("other", "red-2")] {
        for to in ["10.10.0.12", "fd10::12"] {
            let got = ask_over(&multi.inside, interface, to.parse()?)?;
            assert_eq!(got, answers, "{to} over {interface}");
        }
    }
    Ok(())
}

/// The identity in the answer to a datagram sent over `interface`.
fn ask_over(from: &Namespaces, interface: &str, to: IpAddr) -> Result<String> {
    use socket2::{Domain, SockAddr, Socket, Type};
    let to = std::net::SocketAddr::new(to, PORT);
    from.enter(|| {
        let socket = Socket::new(Domain::for_address(to), Type::DGRAM, None)?;
        socket.bind_device(Some(interface.as_bytes()))?;
        socket.set_read_timeout(Some(patience()))?;
        socket.connect(&SockAddr::from(to))?;
        let socket = std::net::UdpSocket::from(socket);
        socket.send(b"who")?;
        let mut buffer = [0; 256];
        let length = socket.recv(&mut buffer)?;
        let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
        anyhow::Ok(text.split(' ').next().unwrap_or_default().to_owned())
    })?
}
