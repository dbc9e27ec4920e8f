//! Takes the state, the pins or the programs away under pods with traffic: no interface is lost, no packet passes
//! unevaluated, and everything is repaired.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::SocketAddr,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use comfy_table::{Table, presets};
use kni_integration::{
    Agent, AgentOptions, Kubelet, Pod,
    agent::SOCKET,
    eventually,
    kubelet::Sandbox,
    long, patience, require,
    traffic::{Servers, Stream},
};
use tonic::Code;

use crate::watched::{Watched, warm};

const PODS: usize = 10;
const PORT: u16 = 8080;
/// A port of the node that no pod of `blue` may reach; a packet that arrives there passed no program.
const CANARY: u16 = 7777;
const STATE: &str = "/run/kni/state.redb";
const LINKS: &str = "/sys/fs/bpf/kni/links";
/// Time under traffic before and after a repair.
const STEADY: Duration = Duration::from_millis(300);

/// The size of the state's file system: too small for the reservation, so that it can be full.
const SMALL: &str = "2m";

/// Ten pods in two networks, each asking its neighbour.
struct Town {
    stage: Watched,
    pods: Vec<Pod>,
    servers: Vec<Servers>,
    canary: Servers,
    table: Table,
}

/// The traffic during one fault.
struct Traffic {
    streams: Vec<(String, Stream)>,
    canary: Stream,
    unevaluated_before: usize,
}

/// What one fault must not exceed.
#[derive(Clone, Copy, Default)]
struct Limits {
    /// Requests without an answer, of all streams.
    lost: u64,
    /// Packets that passed no program.
    unevaluated: usize,
}

impl Town {
    async fn build(name: &str) -> Result<Self> {
        let mut options = warm(1);
        options.args.extend(["--metrics-address".into(), "none".into()]);
        let stage = Watched::with(name, options).await?;
        let mut pods = Vec::new();
        let mut servers = Vec::new();
        for number in 0..PODS {
            let network = if number < PODS / 2 { "default" } else { "blue" };
            let pod = stage
                .kubelet
                .run_pod("town", &format!("{network}-{number}"), &[("kni.dev/network", network)])
                .await?;
            servers.push(Servers::start(&pod.inside, &pod.name, PORT)?);
            pods.push(pod);
        }
        stage.settled().await?;
        let canary = Servers::start(&stage.node, "node", CANARY)?;
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header([
            "FAULT",
            "SENT",
            "LOST",
            "SILENCE",
            "MISROUTED",
            "UNEVALUATED",
            "REPAIRED",
            "REPORTED",
        ]);
        Ok(Self {
            stage,
            pods,
            servers,
            canary,
            table,
        })
    }

    fn traffic(&self) -> Result<Traffic> {
        let mut streams = Vec::new();
        for (number, pod) in self.pods.iter().enumerate() {
            let half = PODS / 2;
            let neighbour = number / half * half + (number + 1) % half;
            let to = &self.pods[neighbour];
            let ip = to.ip(number % 2 == 0).context("no address")?;
            streams.push((to.name.clone(), Stream::udp(&pod.inside, SocketAddr::new(ip, PORT))?));
        }
        let intruder = &self.pods[PODS - 1].inside;
        let node: SocketAddr = format!("{}:{CANARY}", self.stage.node.addresses()[0]).parse()?;
        Ok(Traffic {
            streams,
            canary: Stream::unanswered(intruder, node)?,
            unevaluated_before: self.canary.seen(),
        })
    }

    /// Waits until all interfaces exist with the same answers and are healthy, and pods can be attached.
    async fn whole(&self) -> Result<()> {
        eventually(patience(), async || {
            let status = self.stage.status().await?;
            ensure!(status.ready, "not ready: {:?}", status.reasons);
            let interfaces = self.stage.interfaces().await?;
            ensure!(interfaces.len() == PODS, "{} interfaces", interfaces.len());
            let sick: Vec<_> = interfaces.iter().filter(|found| !found.healthy).collect();
            ensure!(sick.is_empty(), "{sick:#?}");
            Ok(())
        })
        .await?;
        for pod in &self.pods {
            let now = self.stage.kubelet.query(&pod.id).await?.ipconfigs;
            ensure!(
                now == pod.interfaces,
                "{}: {now:?} instead of {:?}",
                pod.name,
                pod.interfaces
            );
        }
        Ok(())
    }

    /// Ends a fault: adds a row to the table, and checks it.
    async fn end(
        &mut self,
        fault: &str,
        traffic: Traffic,
        began: Instant,
        reported: &str,
        limits: Limits,
    ) -> Result<()> {
        self.whole().await.with_context(|| fault.to_owned())?;
        let repaired = began.elapsed();
        let reasons = self.stage.status().await?.reasons;
        let said = reasons.iter().find(|reason| reason.contains(reported));
        let said = said.with_context(|| format!("{fault}: {reported:?} is not reported: {reasons:?}"))?;
        let said = said.clone();
        self.row(fault, traffic, repaired, &said, limits)
    }

    fn row(&mut self, fault: &str, traffic: Traffic, repaired: Duration, said: &str, limits: Limits) -> Result<()> {
        thread::sleep(STEADY);
        let (mut sent, mut lost, mut misrouted, mut silence) = (0, 0, 0, Duration::ZERO);
        let mut broken = Vec::new();
        for (server, stream) in traffic.streams {
            let report = stream.stop();
            sent += report.sent;
            lost += report.lost();
            silence = silence.max(report.longest_silence);
            misrouted += report.identities.iter().filter(|found| **found != server).count();
            if report.answered == 0 {
                broken.push(server);
            }
        }
        drop(traffic.canary);
        let unevaluated = self.canary.seen() - traffic.unevaluated_before;
        let said: String = said.chars().take(110).collect();
        self.table.add_row([
            fault.to_owned(),
            sent.to_string(),
            lost.to_string(),
            format!("{} ms", silence.as_millis()),
            misrouted.to_string(),
            unevaluated.to_string(),
            format!("{} ms", repaired.as_millis()),
            said,
        ]);
        ensure!(broken.is_empty(), "{fault}: no answers from {broken:?}");
        ensure!(misrouted == 0, "{fault}: others answered");
        ensure!(lost <= limits.lost, "{fault}: {lost} of {sent} requests were lost");
        ensure!(
            unevaluated <= limits.unevaluated,
            "{fault}: {unevaluated} packets passed no program"
        );
        Ok(())
    }

    async fn start(&mut self, args: &[&str]) -> Result<()> {
        let mut options: AgentOptions = self.stage.options.clone();
        options.args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self.stage.agent = Agent::start(&self.stage.node, options)?;
        self.stage.kubelet = Kubelet::connect(&self.stage.node, SOCKET).await?;
        Ok(())
    }

    /// Kills the agent, does harm, and starts it again.
    async fn away(
        &mut self,
        fault: &str,
        args: &[&str],
        reported: &str,
        harm: impl FnOnce(&Path) + Send,
    ) -> Result<()> {
        let traffic = self.traffic()?;
        thread::sleep(STEADY);
        // A file that was closed in order is read as it is, without the database's own repair.
        self.stage.agent.terminate()?;
        self.stage.node.enter(|| harm(Path::new(STATE)))?;
        let began = Instant::now();
        self.start(args).await?;
        self.end(fault, traffic, began, reported, Limits::default()).await
    }

    /// Fills the state's file system and attaches until that is refused; returns what the agent reports.
    async fn fill_until_refused(&self) -> Result<String> {
        let fill = "dd if=/dev/zero of=/run/small/filler bs=4096 2>/dev/null; test -s /run/small/filler";
        self.stage.node.run("sh", &["-c", fill])?;
        let mut attached = Vec::new();
        let refused = loop {
            let name = format!("more-{}", attached.len());
            match self.stage.kubelet.run_pod("town", &name, &[]).await {
                Ok(pod) => attached.push(pod),
                Err(status) => break status,
            }
            ensure!(attached.len() < 400, "the file system never fills");
        };
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        assert!(refused.message().contains("state cannot be written"), "{refused}");
        let status = self.stage.status().await?;
        let said = status.reasons.join("; ");
        assert!(!status.ready && said.contains("state cannot be written"), "{status:?}");
        println!("full: {} pods attached, then: {}", attached.len(), refused.message());
        for pod in attached {
            self.stage.kubelet.kill_pod(pod).await?;
        }
        Ok(said)
    }

    async fn until_ready(&self) -> Result<()> {
        eventually(patience(), async || {
            let status = self.stage.status().await?;
            ensure!(status.ready, "{:?}", status.reasons);
            Ok(())
        })
        .await
    }

    async fn leave(self) -> Result<()> {
        drop((self.servers, self.canary));
        for pod in self.pods {
            self.stage.kubelet.kill_pod(pod).await?;
        }
        self.stage.settled().await?;
        let status = self.stage.status().await?;
        assert_eq!((status.sandboxes, status.attachments), (0, 0));
        let links = self.stage.node.run("ip", &["-o", "link", "show", "type", "veth"])?;
        let left = links.lines().filter(|line| line.contains("kni:town")).count();
        assert_eq!(left, 0, "{links}");
        Ok(())
    }
}

/// Overwrites the beginning of a sandbox's record in the file, also where pages that are free now have it; its key
/// stays.
fn garble_row(file: &Path, id: &str) {
    let mut bytes = fs::read(file).expect("the file is there");
    let needle = format!(r#"{{"version":1,"record":{{"id":"{id}""#);
    let found = |(_, window): &(usize, &[u8])| *window == needle.as_bytes();
    let places: Vec<usize> = bytes
        .windows(needle.len())
        .enumerate()
        .filter(found)
        .map(|(at, _)| at)
        .collect();
    assert!(!places.is_empty(), "sandbox {id} is not in the file");
    for at in places {
        bytes[at] = b'#';
    }
    fs::write(file, bytes).expect("the file can be written");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_is_taken_away_costs_a_pod_its_interface() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut town = Town::build("lost-state").await?;
    state_is_lost(&mut town).await?;
    records_are_rebuilt(&mut town).await?;
    pins_and_programs_come_back(&mut town).await?;
    file_system_is_full(&mut town).await?;
    println!("{}", town.table);
    town.leave().await
}

async fn state_is_lost(town: &mut Town) -> Result<()> {
    let yesterday = town.stage.node.enter(|| fs::read(STATE))??;
    let extra = town.stage.kubelet.run_pod("town", "extra", &[]).await?;
    town.stage.kubelet.kill_pod(extra).await?;
    town.away("state removed", &[], "StateLost: the file is missing", |file| {
        fs::remove_file(file).expect("removed");
    })
    .await?;
    town.away("state truncated", &[], "StateLost: the file cannot be read", |file| {
        let state = fs::File::options().write(true).open(file).expect("opened");
        state.set_len(5000).expect("truncated");
    })
    .await?;
    let kept = town.stage.node.enter(|| {
        let names = fs::read_dir("/run/kni")?.flatten().map(|entry| entry.file_name());
        Ok::<_, std::io::Error>(
            names
                .filter(|name| name.to_string_lossy().contains("unreadable"))
                .count(),
        )
    })??;
    ensure!(kept == 1, "the unreadable file is not kept");
    town.away("older copy", &[], "StateLost: the file is older", move |file| {
        fs::write(file, &yesterday).expect("written");
    })
    .await?;
    if long() {
        let elsewhere = ["--state-dir", "/run/elsewhere"];
        town.away(
            "--state-dir changed",
            &elsewhere,
            "StateLost: the file is missing",
            |_| {},
        )
        .await?;
        // Its own folder again: the file there is older by now.
        town.away("--state-dir changed back", &[], "StateLost: the file is older", |_| {})
            .await?;
    }
    Ok(())
}

async fn records_are_rebuilt(town: &mut Town) -> Result<()> {
    let unused = town.stage.kubelet.create_network("town", "late").await?;
    let fault = "state and its copy removed";
    town.away(fault, &[], "the records of 10 sandboxes were rebuilt", |file| {
        fs::remove_file(file).expect("removed");
        fs::remove_file("/sys/fs/bpf/kni/records").expect("unpinned");
    })
    .await?;
    // A namespace that was given to a client before is attached now.
    let late = Sandbox::new("town", "late", &unused);
    town.stage.kubelet.attach(&late).await?;
    town.stage.kubelet.detach(&late.id).await?;
    town.stage.kubelet.delete_network(&late.id).await?;
    // A damaged row: with a copy nothing is missing, without one it is quarantined and rebuilt.
    let traffic = town.traffic()?;
    thread::sleep(STEADY);
    town.stage.agent.terminate()?;
    let id = town.pods[0].id.clone();
    town.stage.node.enter(|| garble_row(Path::new(STATE), &id))?;
    let began = Instant::now();
    town.start(&[]).await?;
    town.whole().await?;
    let log = town.stage.agent.log();
    let said = "a state row is damaged; its copy in the kernel is used";
    ensure!(log.contains(said), "{log}");
    town.row("one row garbled", traffic, began.elapsed(), said, Limits::default())?;
    let fault = "one row garbled, no copy";
    town.away(fault, &[], "a row of the state is quarantined", move |file| {
        garble_row(file, &id);
        fs::remove_file("/sys/fs/bpf/kni/records").expect("unpinned");
    })
    .await
}

async fn pins_and_programs_come_back(town: &mut Town) -> Result<()> {
    let removed = "rm -r /sys/fs/bpf/kni/links /sys/fs/bpf/kni/v* /sys/fs/bpf/kni/records";
    for (fault, harm) in [("pins removed", removed), ("bpffs unmounted", "umount -l /sys/fs/bpf")] {
        town.stage.settled().await?;
        let traffic = town.traffic()?;
        thread::sleep(STEADY);
        let pins = || town.stage.node.enter(|| count_files(Path::new("/sys/fs/bpf/kni")));
        let before = pins()?;
        town.stage.node.run("sh", &["-c", harm])?;
        let began = Instant::now();
        eventually(patience(), async || {
            let now = pins()?;
            ensure!(now == before, "{now} pins instead of {before}");
            Ok(())
        })
        .await?;
        town.whole().await?;
        let log = town.stage.agent.log();
        let said = "pins of maps and programs were removed; they are made again";
        ensure!(log.contains(said), "{log}");
        town.row(fault, traffic, began.elapsed(), said, Limits::default())?;
    }
    let traffic = town.traffic()?;
    thread::sleep(STEADY);
    let before = links(town).await?;
    ensure!(before.len() >= PODS, "{before:?}");
    let began = Instant::now();
    for name in before.keys() {
        let pin = format!("{LINKS}/{name}");
        town.stage.node.run("bpftool", &["link", "detach", "pinned", &pin])?;
    }
    eventually(patience(), async || {
        let now = links(town).await?;
        ensure!(now.keys().eq(before.keys()), "{now:?} instead of {before:?}");
        let same = now.iter().find(|(name, id)| before.get(*name) == Some(id));
        ensure!(same.is_none(), "{same:?} is the detached link");
        Ok(())
    })
    .await?;
    town.whole().await?;
    let log = town.stage.agent.log();
    let said = "its programs were detached by another process; they are attached again";
    ensure!(log.contains(said), "{said:?} is not reported: {log}");
    // From the detachment to the next look, packets meet no program. That is bounded, and counted here.
    // A stream without answers asks each 10 ms: two seconds of all ten, and a window each.
    let limits = Limits {
        lost: 2100,
        unevaluated: 1500,
    };
    town.row("TCX links detached", traffic, began.elapsed(), said, limits)
}

async fn file_system_is_full(town: &mut Town) -> Result<()> {
    let traffic = town.traffic()?;
    // The file moves to a small file system, which something else fills.
    town.stage.agent.terminate()?;
    let mount = format!("mkdir /run/small && mount -t tmpfs -o size={SMALL} tmpfs /run/small");
    town.stage.node.run("sh", &["-c", &mount])?;
    town.stage.node.run("cp", &[STATE, "/run/small/"])?;
    town.start(&["--state-dir", "/run/small"]).await?;
    town.whole().await?;
    // Pods that will go while the file system is full.
    let mut going = Vec::new();
    for number in 0..4 {
        going.push(
            town.stage
                .kubelet
                .run_pod("town", &format!("going-{number}"), &[])
                .await?,
        );
    }
    let began = Instant::now();
    let said = town.fill_until_refused().await?;
    // Pods go nevertheless, and their traffic ends.
    for pod in going.split_off(2) {
        town.stage.kubelet.kill_pod(pod).await?;
    }
    assert_eq!(town.stage.status().await?.sandboxes, u32::try_from(PODS + 2)?);
    town.stage.node.run("rm", &["/run/small/filler"])?;
    let freed = Instant::now();
    town.until_ready().await?;
    println!("full: ready {:?} after there was room", freed.elapsed());
    let pod = town.stage.kubelet.run_pod("town", "after", &[]).await?;
    town.stage.kubelet.kill_pod(pod).await?;
    // Full again, and killed: what happened since is in the copy.
    town.fill_until_refused().await?;
    for pod in going {
        town.stage.kubelet.kill_pod(pod).await?;
    }
    town.stage.agent.kill9()?;
    town.start(&["--state-dir", "/run/small"]).await?;
    let left = town.stage.status().await?;
    assert_eq!(
        left.sandboxes,
        u32::try_from(PODS)?,
        "detached pods came back: {left:?}"
    );
    town.stage.node.run("rm", &["/run/small/filler"])?;
    town.until_ready().await?;
    town.whole().await?;
    town.row(
        "file system full, then free",
        traffic,
        began.elapsed(),
        &said,
        Limits::default(),
    )?;
    // The file is complete again.
    town.stage.agent.terminate()?;
    town.stage.node.run("rm", &["/sys/fs/bpf/kni/records"])?;
    town.start(&["--state-dir", "/run/small"]).await?;
    town.whole().await
}

fn count_files(folder: &Path) -> usize {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let entries = entries.flatten().map(|entry| entry.path());
    entries
        .map(|path| if path.is_dir() { count_files(&path) } else { 1 })
        .sum()
}

/// The ids of the attached links of pods.
/// The ids of the links of pods, by the names of their pins. Pairs that no pod uses yet have links as well.
async fn links(town: &Town) -> Result<BTreeMap<String, u64>> {
    let interfaces = town.stage.interfaces().await?;
    let endpoints: BTreeSet<String> = interfaces.iter().map(|found| found.endpoint_id.to_string()).collect();
    let mut ids = BTreeMap::new();
    for name in town.stage.node.run("ls", &[LINKS])?.lines() {
        let endpoint = name.split_once('-').map_or(name, |(endpoint, _)| endpoint);
        if !endpoints.contains(endpoint) {
            continue;
        }
        let show = ["-j", "link", "show", "pinned", &format!("{LINKS}/{name}")];
        let shown: serde_json::Value = serde_json::from_str(&town.stage.node.run("bpftool", &show)?)?;
        ids.insert(name.to_owned(), shown["id"].as_u64().context("no id")?);
    }
    Ok(ids)
}
