//! Tests policies across restarts: denied traffic stays denied, connections continue, and changes made in the meantime
//! are applied.

mod doors;
mod newcomers;
mod siege;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use kni_integration::{
    Agent, AgentOptions, Manifest, Node, Pod, Stage,
    agent::{METRICS, metrics},
    eventually_sync,
    manifest::network_policy,
    patience, require,
    stage::address,
    traffic::{Servers, Stream},
};
use serde_json::Value;

use self::{
    doors::{Door, Open, has},
    siege::Intruder,
};

const PORT: u16 = 8080;
/// Time between two kills, with traffic.
const PAUSE: Duration = Duration::from_millis(300);
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

    fn door(&self, shop: usize, v4: bool) -> Door<'_> {
        let (pod, server) = &self.shops[shop];
        Door {
            to: self.at(shop, v4),
            inside: &pod.inside,
            server,
        }
    }

    /// Checks that of the friend and the stranger one gets answers from a shop, and nothing of the other one
    /// arrives there.
    fn assert_doors(&self, shop: usize, friend: bool) -> Result<()> {
        let (open, closed) = if friend {
            (&self.friend, &self.stranger)
        } else {
            (&self.stranger, &self.friend)
        };
        for v4 in FAMILIES {
            let door = self.door(shop, v4);
            door.assert_open_to(open)?;
            door.assert_closed_to(closed, open)?;
        }
        Ok(())
    }

    /// Ends the attempts, and checks that none succeeded, and that all would have without the policy.
    fn relieved(&self, siege: Vec<Intruder>) -> Result<()> {
        let words: Vec<&'static str> = siege.iter().map(|intruder| intruder.word).collect();
        for intruder in siege {
            intruder.wait("it tries", |tries| tries.made >= 100)?;
            let (word, report) = (intruder.word, intruder.stop()?);
            println!("{word}: {report:?}");
            ensure!(report.connected == 0, "{word} entered: {report:?}");
            ensure!(!self.shops[0].1.saw(word), "a datagram of {word}'s arrived");
        }
        self.write(shop(&["friends", "strangers", "jail"]))?;
        self.write(policies("50-jail", &[only_from("jail", &[])]))?;
        let siege = self.siege()?;
        eventually_sync(patience(), || {
            let entered = words.iter().all(|word| self.shops[0].1.saw(word));
            ensure!(entered, "nobody would have entered in any case");
            Ok(())
        })?;
        for intruder in siege {
            intruder.wait("it would have connected", |tries| tries.connected > 0)?;
            intruder.stop()?;
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_denied_passes_and_nothing_allowed_breaks_across_restarts() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut town = Town::build("besieged").await?;
    town.assert_doors(0, true)?;
    let streams = town.streams(0)?;
    let siege = town.siege()?;
    let options = AgentOptions::default();
    for delay in [0, 30, 80, 160] {
        thread::sleep(PAUSE);
        town.stage.agent.kill9()?;
        thread::sleep(PAUSE);
        if delay > 0 {
            // An agent that is killed during its takeover.
            town.stage.agent = Agent::start_unready(&town.stage.node, options.clone())?;
            thread::sleep(Duration::from_millis(delay));
            town.stage.agent.kill9()?;
        }
        town.stage.agent = Agent::start(&town.stage.node, options.clone())?;
        town.assert_doors(0, true).context("after a restart")?;
    }
    let status = town.stage.agent.terminate()?;
    ensure!(status.success(), "{status}");
    town.assert_doors(0, true).context("while no agent runs")?;
    town.stage.agent.restart()?;
    thread::sleep(PAUSE);
    for stream in streams {
        stream.wait_for_answers(501_u64.saturating_sub(stream.answered()))?;
        let report = stream.stop();
        ensure!(report.sent > 500, "{report:?}");
        report.assert_whole("shop");
    }
    town.relieved(siege)
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_that_changed_meanwhile_are_in_force_once_the_agent_serves() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut town = Town::build("changed").await?;
    town.assert_doors(1, true)?;
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
        thread::sleep(PAUSE);
        // No agent applies the change; the previous policies remain enforced.
        town.assert_doors(1, before == "friends")
            .context("while no agent runs")?;
        for open in &mut open {
            open.ask("meanwhile")
                .with_context(|| format!("a connection of {}'s while no agent runs", is[0]))?;
        }
        town.stage.agent.restart()?;
        // The change applies from the next packets on.
        let marker = format!("late-of-{before}");
        for (open, v4) in open.iter_mut().zip(FAMILIES) {
            town.door(1, v4)
                .assert_nothing_arrives(was[1], || open.send(&marker), |(), frame| has(frame, &marker))
                .with_context(|| format!("a connection of {}'s goes on", is[0]))?;
        }
        ensure!(!town.shops[1].1.saw(&marker), "a packet of {}'s arrived", is[0]);
        town.assert_doors(1, after == "friends").context("after the restart")?;
    }
    for stream in streams {
        stream.stop().assert_whole("shop");
    }
    town.relieved(siege)
}

/// Runs `knictl explain` repeatedly until `stop`, and keeps each answer.
fn oracle_of_the_hour(town: &Town, stop: &AtomicBool, said: &Mutex<Vec<Result<bool, String>>>, [from, to]: [&str; 2]) {
    while !stop.load(Ordering::Relaxed) {
        let answer = town.stage.knictl(&["explain", from, to, "tcp/8080", "-o", "json"]);
        let answer = match answer {
            Ok(text) => serde_json::from_str::<Value>(&text)
                .ok()
                .and_then(|document| document["allowed"].as_bool())
                .ok_or(text),
            Err(error) => Err(format!("{error:#}")),
        };
        said.lock().expect("no panic").push(answer);
    }
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
        scope.spawn(move || oracle_of_the_hour(town, stop, said, [asked, "market/pod"]));
        let heard = |what: &str, wanted: fn(&Result<bool, String>) -> bool| {
            eventually_sync(patience(), || {
                let said = said.lock().expect("no panic");
                ensure!(said.iter().any(wanted), "{what}: {said:?}");
                Ok(())
            })
        };
        let agent = heard("nobody is asked", Result::is_err).and_then(|()| {
            let agent = Agent::start(&town.stage.node, AgentOptions::default())?;
            heard("the new agent is not asked", Result::is_ok)?;
            Ok(agent)
        });
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
