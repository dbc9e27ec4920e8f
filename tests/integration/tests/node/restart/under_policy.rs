//! Tests policies across restarts: denied traffic stays denied, connections continue, and changes made in the meantime
//! are applied.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpStream, UdpSocket},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use kni_integration::{
    Agent, AgentOptions, Kubelet, Manifest, Namespaces, Node, Pod, Stage,
    agent::{KUBELET_SOCKET, METRICS, metrics},
    eventually, eventually_sync,
    frames::PacketSocket,
    manifest::network_policy,
    require,
    stage::address,
    traffic::{NoAnswer, Servers, Stream, tcp_get, udp_ask},
};
use serde_json::Value;

const PORT: u16 = 8080;
const PATIENCE: Duration = Duration::from_millis(300);
/// Timeout of an expected answer.
const ANSWER: Duration = Duration::from_secs(3);
const FAMILIES: [bool; 2] = [true, false];

/// A file with policies, written in YAML.
fn policies(name: &str, documents: &[String]) -> Manifest {
    Manifest::file(&format!("{name}.yaml"), documents.concat())
}

/// A policy that selects pods of a namespace, with the namespaces that they may receive from.
fn only_from(namespace: &str, peers: &[&str]) -> String {
    let peers: Vec<String> = peers
        .iter()
        .map(|peer| format!("{{namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: {peer}}}}}}}"))
        .collect();
    let rules = if peers.is_empty() {
        "[]".to_owned()
    } else {
        format!("[{{from: [{}]}}]", peers.join(", "))
    };
    network_policy(
        namespace,
        "only",
        &format!("{{podSelector: {{}}, policyTypes: [Ingress], ingress: {rules}}}"),
    )
}

fn jail() -> Manifest {
    let nothing = "{podSelector: {}, policyTypes: [Ingress, Egress]}";
    policies("50-jail", &[network_policy("jail", "nothing", nothing)])
}

fn shop(peers: &[&str]) -> Manifest {
    policies("50-shop", &[only_from("shop", peers)])
}

fn market(peers: &[&str]) -> Manifest {
    policies("50-market", &[only_from("market", peers)])
}

/// A node with policies that existed before the start of its agent, and pods that they select.
struct Town {
    friend: Pod,
    stranger: Pod,
    prisoner: Pod,
    /// In `shop` and `market`.
    shops: [(Pod, Servers); 2],
    stage: Stage,
}

impl Town {
    async fn build(name: &str) -> Result<Self> {
        Self::build_with(name, AgentOptions::default()).await
    }

    async fn build_with(name: &str, options: AgentOptions) -> Result<Self> {
        let node = Node::new(name)?;
        Manifest::apply(&[jail(), shop(&["friends"]), market(&["friends"])], &node)?;
        let stage = Stage::with(node, options).await?;
        let run = async |namespace: &str| {
            let pod = stage.kubelet.run_pod(namespace, "pod", &[]).await;
            pod.with_context(|| format!("run {namespace}/pod"))
        };
        let mut shops = Vec::new();
        for namespace in ["shop", "market"] {
            let pod = run(namespace).await?;
            let servers = Servers::start(&pod.inside, namespace, PORT)?;
            shops.push((pod, servers));
        }
        let shops = shops.try_into().map_err(|_payload| anyhow!("two shops"))?;
        Ok(Self {
            friend: run("friends").await?,
            stranger: run("strangers").await?,
            prisoner: run("jail").await?,
            shops,
            stage,
        })
    }

    fn at(&self, shop: usize, v4: bool) -> SocketAddr {
        SocketAddr::new(address(&self.shops[shop].0, v4), PORT)
    }

    fn write(&self, manifest: Manifest) -> Result<()> {
        Manifest::apply(&[manifest], &self.stage.node)
    }

    /// Streams of both transports and families from the friend to a shop.
    fn streams(&self, shop: usize) -> Result<Vec<Stream>> {
        let mut streams = Vec::new();
        for v4 in FAMILIES {
            streams.push(Stream::udp(&self.friend.inside, self.at(shop, v4))?);
            streams.push(Stream::tcp(&self.friend.inside, self.at(shop, v4))?);
        }
        Ok(streams)
    }

    /// All pods that may not reach the first shop try continuously.
    fn siege(&self) -> Result<Vec<Intruder>> {
        let to: Vec<SocketAddr> = FAMILIES.iter().map(|v4| self.at(0, *v4)).collect();
        [(&self.stranger, "stranger"), (&self.prisoner, "prisoner")]
            .into_iter()
            .map(|(pod, word)| Intruder::start(&pod.inside, word, to.clone()))
            .collect()
    }

    /// Whether the friend and the stranger get answers from a shop, consistently over both transports and families.
    fn doors(&self, shop: usize) -> Result<(bool, bool)> {
        let mut doors = Vec::new();
        for pod in [&self.friend, &self.stranger] {
            let mut answers = Vec::new();
            for v4 in FAMILIES {
                let to = self.at(shop, v4);
                for answer in [
                    udp_ask(&pod.inside, to.ip(), PORT, PATIENCE),
                    tcp_get(&pod.inside, to.ip(), PORT, PATIENCE),
                ] {
                    answers.push(match answer {
                        Ok(_) => true,
                        Err(NoAnswer::Timeout) => false,
                        Err(other) => return Err(other).with_context(|| format!("{} to {to}", pod.namespace)),
                    });
                }
            }
            ensure!(
                answers.iter().all(|answer| *answer == answers[0]),
                "{}: {answers:?}",
                pod.namespace
            );
            doors.push(answers[0]);
        }
        Ok((doors[0], doors[1]))
    }

    /// Ends the attempts, and checks that none succeeded, and that all would have without the policy.
    fn relieved(&self, siege: Vec<Intruder>) -> Result<()> {
        let words: Vec<&'static str> = siege.iter().map(|intruder| intruder.word).collect();
        for intruder in siege {
            let (word, report) = (intruder.word, intruder.stop()?);
            println!("{word}: {report:?}");
            ensure!(report.tries > 100, "{word} hardly tried: {report:?}");
            ensure!(report.connected == 0, "{word} entered: {report:?}");
            ensure!(!self.shops[0].1.saw(word), "a datagram of {word}'s arrived");
        }
        self.write(shop(&["friends", "strangers", "jail"]))?;
        self.write(policies("50-jail", &[only_from("jail", &[])]))?;
        let siege = self.siege()?;
        eventually_sync(ANSWER, || {
            let entered = words.iter().all(|word| self.shops[0].1.saw(word));
            ensure!(entered, "nobody would have entered in any case");
            Ok(())
        })?;
        thread::sleep(PATIENCE);
        for intruder in siege {
            ensure!(
                intruder.stop()?.connected > 0,
                "nobody would have connected in any case"
            );
        }
        Ok(())
    }
}

/// A client that tries to reach a shop with datagrams and connections until stopped.
struct Intruder {
    word: &'static str,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Tries>>,
}

#[derive(Debug, Default)]
struct Tries {
    tries: u64,
    connected: u64,
}

impl Intruder {
    fn start(from: &Namespaces, word: &'static str, to: Vec<SocketAddr>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (told, inside) = (Arc::clone(&stop), from.clone());
        let thread = thread::Builder::new().spawn(move || {
            inside.enter(|| {
                let mut report = Tries::default();
                let sockets = [UdpSocket::bind("0.0.0.0:0")?, UdpSocket::bind("[::]:0")?];
                while !told.load(Ordering::Relaxed) {
                    for to in &to {
                        sockets[usize::from(to.is_ipv6())].send_to(word.as_bytes(), to)?;
                        let connected = TcpStream::connect_timeout(to, Duration::from_millis(3));
                        report.connected += u64::from(connected.is_ok());
                        report.tries += 1;
                    }
                }
                Ok(report)
            })?
        })?;
        Ok(Self { word, stop, thread })
    }

    fn stop(self) -> Result<Tries> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_payload| anyhow!("it panicked"))?
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_denied_passes_and_nothing_allowed_breaks_across_restarts() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut town = Town::build("besieged").await?;
    ensure!(town.doors(0)? == (true, false));
    let streams = town.streams(0)?;
    let siege = town.siege()?;
    let options = AgentOptions::default();
    for delay in [0, 30, 80, 160] {
        thread::sleep(PATIENCE);
        town.stage.agent.kill9()?;
        thread::sleep(PATIENCE);
        if delay > 0 {
            // An agent that is killed during its takeover.
            town.stage.agent = Agent::start_unready(&town.stage.node, options.clone())?;
            thread::sleep(Duration::from_millis(delay));
            town.stage.agent.kill9()?;
        }
        town.stage.agent = Agent::start(&town.stage.node, options.clone())?;
        ensure!(town.doors(0)? == (true, false), "after a restart");
    }
    let status = town.stage.agent.terminate()?;
    ensure!(status.success(), "{status}");
    ensure!(town.doors(0)? == (true, false), "while no agent runs");
    town.stage.agent.restart()?;
    thread::sleep(PATIENCE);
    for stream in streams {
        stream.wait_for_answers(501_u64.saturating_sub(stream.answered()))?;
        let report = stream.stop();
        ensure!(report.sent > 500, "{report:?}");
        report.assert_whole("shop");
    }
    town.relieved(siege)
}

/// A connection and a socket that have received one answer.
struct Open {
    tcp: BufReader<TcpStream>,
    udp: UdpSocket,
}

impl Open {
    fn to(pod: &Pod, to: SocketAddr) -> Result<Self> {
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let (tcp, udp) = pod.enter(|| {
            let udp = UdpSocket::bind(any)?;
            udp.connect(to)?;
            anyhow::Ok((TcpStream::connect_timeout(&to, ANSWER)?, udp))
        })??;
        tcp.set_read_timeout(Some(PATIENCE))?;
        udp.set_read_timeout(Some(PATIENCE))?;
        let mut open = Self {
            tcp: BufReader::new(tcp),
            udp,
        };
        ensure!(open.ask("before")? == [true; 2], "no answer at first");
        Ok(open)
    }

    /// Whether the connection and the socket get answers.
    fn ask(&mut self, word: &str) -> Result<[bool; 2]> {
        self.tcp.get_mut().write_all(format!("{word}\n").as_bytes())?;
        self.udp.send(word.as_bytes())?;
        let (mut line, mut datagram) = (String::new(), [0; 512]);
        Ok([
            self.tcp.read_line(&mut line).is_ok(),
            self.udp.recv(&mut datagram).is_ok(),
        ])
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_that_changed_meanwhile_are_in_force_once_the_agent_serves() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut town = Town::build("changed").await?;
    ensure!(town.doors(1)? == (true, false));
    let streams = town.streams(0)?;
    let siege = town.siege()?;
    for (before, after) in [("friends", "strangers"), ("strangers", "friends")] {
        let (was, is) = if before == "friends" {
            ([&town.friend, &town.stranger], ["friends", "strangers"])
        } else {
            ([&town.stranger, &town.friend], ["strangers", "friends"])
        };
        let mut open = Vec::new();
        for v4 in FAMILIES {
            open.push(Open::to(was[0], town.at(1, v4))?);
        }
        town.stage.agent.kill9()?;
        town.write(market(&[after]))?;
        thread::sleep(PATIENCE);
        // No agent applies the change; the previous policies remain enforced.
        ensure!(
            town.doors(1)? == (before == "friends", before == "strangers"),
            "while no agent runs"
        );
        for open in &mut open {
            ensure!(
                open.ask("meanwhile")? == [true; 2],
                "a connection of {}'s while no agent runs",
                is[0]
            );
        }
        town.stage.agent.restart()?;
        // The change applies from the next packets on.
        let marker = format!("late-of-{before}");
        for open in &mut open {
            ensure!(open.ask(&marker)? == [false; 2], "a connection of {}'s goes on", is[0]);
        }
        ensure!(!town.shops[1].1.saw(&marker), "a packet of {}'s arrived", is[0]);
        ensure!(
            town.doors(1)? == (after == "friends", after == "strangers"),
            "after the restart"
        );
    }
    for stream in streams {
        stream.stop().assert_whole("shop");
    }
    town.relieved(siege)
}

/// Runs `knictl explain` repeatedly until `stop`; returns each output.
fn oracle_of_the_hour(town: &Town, stop: &AtomicBool, from: &str, to: &str) -> Vec<Result<bool, String>> {
    let mut said = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let answer = town.stage.knictl(&["explain", from, to, "tcp/8080", "-o", "json"]);
        said.push(match answer {
            Ok(text) => serde_json::from_str::<Value>(&text)
                .ok()
                .and_then(|document| document["allowed"].as_bool())
                .ok_or(text),
            Err(error) => Err(format!("{error:#}")),
        });
    }
    said
}

#[tokio::test(flavor = "multi_thread")]
async fn knictl_says_that_no_agent_is_there_and_never_what_is_no_longer_true() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut town = Town::build("asked").await?;
    let asked = "strangers/pod";
    let before = town
        .stage
        .knictl(&["explain", asked, "market/pod", "tcp/8080", "-o", "json"])?;
    let before: Value = serde_json::from_str(&before)?;
    ensure!(before["allowed"] == false, "{before:#}");
    town.stage.agent.kill9()?;
    town.write(market(&["strangers"]))?;
    for command in [
        &["explain", asked, "market/pod", "tcp/8080"][..],
        &["policy", "market/pod"],
        &["flows"],
        &["services"],
        &["status"],
    ] {
        let error = town.stage.knictl(command).err();
        let error = error.with_context(|| format!("{command:?} is answered by nobody"))?;
        let told = format!("{error:#}");
        ensure!(told.contains("no agent is serving on"), "{command:?}: {told}");
    }
    let stop = AtomicBool::new(false);
    let said = Mutex::new(Vec::new());
    // The new agent is queried until the end of the last question.
    let _agent = thread::scope(|scope| {
        let (stop, town, said) = (&stop, &town, &said);
        scope.spawn(move || {
            let heard = oracle_of_the_hour(town, stop, asked, "market/pod");
            said.lock().expect("no panic").extend(heard);
        });
        thread::sleep(PATIENCE);
        let agent = Agent::start(&town.stage.node, AgentOptions::default());
        thread::sleep(PATIENCE);
        stop.store(true, Ordering::Relaxed);
        agent
    })?;
    let said = said.into_inner().map_err(|_payload| anyhow!("a panic"))?;
    let (mut nobody, mut served) = (0, 0);
    for answer in &said {
        match answer {
            Ok(allowed) => {
                ensure!(*allowed, "the policy of before: {said:?}");
                served += 1;
            }
            Err(told) => {
                let clear = ["no agent is serving on", "the agent is stopping"];
                ensure!(clear.iter().any(|words| told.contains(words)), "{told}");
                nobody += 1;
            }
        }
    }
    println!("{nobody} times nobody, {served} times an answer");
    ensure!(nobody > 0 && served > 0, "{said:?}");
    Ok(())
}

/// Connects as soon as the agent listens.
async fn first_connection(node: &Node) -> Result<Kubelet> {
    eventually(Duration::from_secs(10), async || {
        Kubelet::connect(node, KUBELET_SOCKET).await
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_attached_right_after_a_restart_is_isolated_before_its_first_packet() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut town = Town::build("newcomers").await?;
    town.write(shop(&["friends", "free", "newcomers"]))?;
    for round in 0..4 {
        town.stage.agent.kill9()?;
        let isolated = network_policy(
            "newcomers",
            "nothing",
            "{podSelector: {}, policyTypes: [Ingress, Egress]}",
        );
        town.write(policies("60-newcomers", &[isolated]))?;
        town.stage.agent = Agent::start_unready(&town.stage.node, AgentOptions::default())?;
        // The first call to the agent.
        let kubelet = first_connection(&town.stage.node).await?;
        let name = format!("newcomer-{round}");
        let pod = kubelet.run_pod("newcomers", &name, &[]).await?;
        let v4 = round % 2 == 0;
        let any = if v4 { "0.0.0.0:0" } else { "[::]:0" };
        let to = town.at(0, v4);
        pod.enter(|| UdpSocket::bind(any)?.send_to(name.as_bytes(), to))??;
        ensure!(
            !town.shops[0].1.saw_within(&name, PATIENCE),
            "{name}'s first packet arrives"
        );
        let arriving = PacketSocket::open(&pod.inside, "eth0")?;
        let own = SocketAddr::new(address(&pod, v4), PORT);
        let word = format!("to-{name}");
        town.friend
            .enter(|| UdpSocket::bind(any)?.send_to(word.as_bytes(), own))??;
        let has = |frame: &[u8]| frame.windows(word.len()).any(|bytes| bytes == word.as_bytes());
        ensure!(
            arriving.receive(PATIENCE, has)?.is_none(),
            "the first packet to {name} arrives"
        );
        // A pod without policies does both.
        let free = kubelet.run_pod("free", &name, &[]).await?;
        let word = format!("free-{round}");
        free.enter(|| UdpSocket::bind(any)?.send_to(word.as_bytes(), to))??;
        ensure!(
            town.shops[0].1.saw_within(&word, ANSWER),
            "the first packet of a free pod is lost"
        );
        // Without its policy the isolated one does so, too.
        town.write(policies("60-newcomers", &[]))?;
        let answer = (0..20).find_map(|_| udp_ask(&pod.inside, to.ip(), PORT, PATIENCE).ok());
        ensure!(
            answer.is_some_and(|answer| answer.identity == "shop"),
            "{name} stays isolated"
        );
        kubelet.kill_pod(pod).await?;
        kubelet.kill_pod(free).await?;
    }
    Ok(())
}

/// The metrics of the rows and the capacity of each map.
fn pressure(node: &Node) -> Result<BTreeMap<String, u64>> {
    let page = metrics(node, METRICS)?;
    let lines = page.lines().filter(|line| line.starts_with("kni_map_"));
    let read = |line: &str| {
        let (name, value) = line.rsplit_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    lines.map(|line| read(line).with_context(|| line.to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_map_has_its_pressure_after_a_restart_too() -> Result<()> {
    require!(root, netns, bpf, ip);
    let options = AgentOptions::new(Manifest::overlapping(), &["--metrics-address", METRICS]);
    let mut town = Town::build_with("pressure", options).await?;
    let before = pressure(&town.stage.node)?;
    town.stage.agent.kill9()?;
    town.stage.agent.restart()?;
    let after = pressure(&town.stage.node)?;
    ensure!(before.keys().eq(after.keys()), "before {before:#?}, after {after:#?}");
    for map in ["POLICY", "ENDPOINTS", "ADDRESSES", "FLOWS4", "FLOWS6"] {
        for metric in ["kni_map_entries", "kni_map_max_entries"] {
            let name = format!("{metric}{{map=\"{map}\"}}");
            let values = (before.get(&name), after.get(&name));
            ensure!(values.0.is_some(), "no {name}: {before:#?}");
            // Flows change independently.
            ensure!(map.starts_with("FLOWS") || values.0 == values.1, "{name}: {values:?}");
        }
    }
    Ok(())
}
