//! Tests `knictl explain` by running the program: its answers match the oracle and real connections.

mod existing;

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    net::IpAddr,
};

use anyhow::{Context as _, Result, ensure};
use fastrand::Rng;
use kni_integration::{
    default_seed,
    node::{FABRIC_V4, FABRIC_V6, NODE_V4, NODE_V6},
    oracle::{self, Direction, Peer},
    patience, require,
    world::{Net, NinePods, PolicyText, Question, Via, cases, index_of, names_of},
};
use serde_json::Value;

use super::{at, enforce};

/// One of this number of cases is used.
const STRIDE: usize = 6;
/// Questions per state and network for each answer: this number of allowed and of denied ones, if available.
const OF_EACH: usize = 8;
const DENY_ALL: &str = "{podSelector: {}, policyTypes: [Ingress, Egress]}";

/// Virtual addresses by network, service and family.
type Virtual = BTreeMap<(String, String, bool), IpAddr>;

#[tokio::test(flavor = "multi_thread")]
async fn knictl_explain_says_what_the_oracle_says_and_connections_meet() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let seed = env::var("KNI_SEED").map_or_else(|_| Ok(default_seed(7)), |seed| seed.parse())?;
    println!("KNI_SEED={seed}");
    let mut rng = Rng::with_seed(seed);
    let mut world = NinePods::start("explain").await?;
    let services = virtual_addresses(&world)?;
    let cases = cases::all();
    let mut asked = BTreeMap::<(bool, Via), usize>::new();
    for (number, case) in cases.iter().skip(rng.usize(..STRIDE)).step_by(STRIDE).enumerate() {
        let net = Net::BOTH[number % 2];
        let step = case.steps.last().context("a case without a state")?;
        world.apply(net, &step.policies, &step.setting).await?;
        let expected = sample(&mut rng, &world, net, &step.policies);
        let differing = world.wait_for(&expected, patience())?;
        ensure!(differing.is_empty(), "{}: real connections: {differing:?}", case.name);
        let truth = step.setting.world(net, &step.policies, &world.addresses());
        for (question, allowed) in &expected {
            let document = explain(&mut rng, &world, &services, question)?;
            check(&document, &world, &truth, question, *allowed)
                .with_context(|| format!("{}: {question}: {document:#}", case.name))?;
            *asked.entry((*allowed, question.via)).or_default() += 1;
        }
    }
    println!("{asked:?}");
    ensure!(asked.values().sum::<usize>() >= 200, "too few questions: {asked:?}");
    ensure!(
        asked.len() == 4 && asked.values().all(|count| *count >= 20),
        "too few of a kind: {asked:?}"
    );
    Ok(())
}

/// Questions with the oracle's answers, of both kinds if available.
fn sample(rng: &mut Rng, world: &NinePods, net: Net, policies: &[PolicyText]) -> BTreeMap<Question, bool> {
    let mut all: Vec<Question> = Via::BOTH.into_iter().flat_map(|via| Question::all(net, via)).collect();
    rng.shuffle(&mut all);
    let mut answers: Vec<_> = world.expect(net, policies, &all).into_iter().collect();
    rng.shuffle(&mut answers);
    let mut chosen = BTreeMap::new();
    for wanted in [true, false] {
        let of_kind = answers.iter().filter(|(_, allowed)| *allowed == wanted);
        chosen.extend(of_kind.take(OF_EACH).copied());
    }
    chosen
}

/// Runs the program for a question, with a random form of the arguments.
fn explain(rng: &mut Rng, world: &NinePods, services: &Virtual, question: &Question) -> Result<Value> {
    let Question { net, v4, .. } = *question;
    let (namespace, pod) = names_of(question.to);
    let address = match question.via {
        Via::Address => world.addresses().of(question.to, net, v4),
        Via::ClusterIp => *services
            .get(&(net.name().to_owned(), format!("{namespace}/{pod}-{}", net.name()), v4))
            .with_context(|| format!("no service of {namespace}/{pod}: {services:?}"))?,
    };
    // A name means IPv4 if the pod has both families.
    let by_name = question.via == Via::Address && v4 && rng.bool();
    let destination = if by_name {
        format!("{namespace}/{pod}")
    } else {
        written(address, rng.bool())
    };
    let (namespace, pod) = names_of(question.from);
    let what = format!("{}/{}", question.protocol.name().to_lowercase(), question.port);
    let text = match rng.u8(..3) {
        // The interface selects the network.
        0 => {
            let ifname = if net == Net::Default { "eth0" } else { "net1" };
            let source = format!("{namespace}/{pod}@{ifname}");
            world
                .stage
                .knictl(&["explain", &source, &destination, &what, "-o", "json"])?
        }
        1 => {
            let source = world.addresses().of(question.from, net, v4).to_string();
            let network = ["--network", net.name()];
            world.stage.knictl(&[
                "explain",
                &source,
                &destination,
                &what,
                network[0],
                network[1],
                "-o",
                "json",
            ])?
        }
        _ => {
            let source = format!("{namespace}/{pod}");
            let network = format!("--network={}", net.name());
            world
                .stage
                .knictl(&["explain", &network, &source, &destination, &what, "-o", "json"])?
        }
    };
    serde_json::from_str(&text).with_context(|| text.clone())
}

/// An address in one of its notations.
fn written(address: IpAddr, in_full: bool) -> String {
    match address {
        IpAddr::V6(address) if in_full => {
            let groups = address.segments().map(|group| format!("{group:04X}"));
            groups.join(":")
        }
        IpAddr::V4(_) | IpAddr::V6(_) => address.to_string(),
    }
}

/// Checks that the document has the oracle's decision and the rule.
fn check(document: &Value, world: &NinePods, truth: &oracle::World, question: &Question, allowed: bool) -> Result<()> {
    let flow = &document["flow"];
    let end = |index: usize| {
        let (namespace, name) = names_of(index);
        let mut pods = truth.pods.iter();
        let pod = pods.find(|pod| pod.namespace == namespace && pod.name == name);
        let pod = pod.with_context(|| format!("no {namespace}/{name}"))?;
        let interface = pod.on(question.net.name()).context("on both networks")?;
        let address = world.addresses().of(index, question.net, question.v4);
        anyhow::Ok((pod, interface, Peer::Pod(pod, interface, address)))
    };
    let (from, to) = (end(question.from)?, end(question.to)?);
    let may = |direction, own, other| truth.may(direction, own, other, question.protocol, question.port);
    let (sends, receives) = (
        may(Direction::Egress, from.2, to.2),
        may(Direction::Ingress, to.2, from.2),
    );
    ensure!(document["allowed"] == allowed, "the oracle says {allowed}");
    ensure!(flow["allowed"] == allowed && flow["network"] == question.net.name());
    let itself = question.from == question.to;
    let verdict = match (allowed, sends) {
        (true, _) => "redirected",
        (false, false) => "policy_egress",
        (false, true) => "policy_ingress",
    };
    ensure!(flow["verdict"] == verdict, "not {verdict}");
    ensure!(
        named(&flow["source"]) == Some(names_of(question.from)),
        "another source"
    );
    let port = u64::from(question.port);
    if question.via == Via::ClusterIp {
        let target = world.addresses().of(question.to, question.net, question.v4).to_string();
        let there = &flow["translatedDestination"];
        ensure!(there["ip"] == target && there["port"] == port, "translated to {there}");
        let (namespace, pod) = names_of(question.to);
        let service = format!("{namespace}/{pod}-{}:", question.net.name());
        let told = flow["service"].as_str().unwrap_or_default();
        ensure!(told.starts_with(&service), "the service {told:?}");
    } else {
        ensure!(flow["translatedDestination"].is_null(), "translated");
        ensure!(
            named(&flow["destination"]) == Some(names_of(question.to)),
            "another destination"
        );
    }
    if itself {
        return Ok(());
    }
    decided(&flow["egress"], sends, &isolating(truth, Direction::Egress, &from)).context("egress")?;
    if sends {
        decided(&flow["ingress"], receives, &isolating(truth, Direction::Ingress, &to)).context("ingress")?;
    }
    Ok(())
}

fn named(peer: &Value) -> Option<(&str, &str)> {
    Some((peer["podNamespace"].as_str()?, peer["podName"].as_str()?))
}

/// The policies that isolate an endpoint.
fn isolating(
    truth: &oracle::World,
    direction: Direction,
    (pod, interface, _): &(&oracle::Pod, &oracle::Interface, Peer<'_>),
) -> BTreeSet<(String, String)> {
    let policies = truth.isolating(direction, pod, interface).into_iter();
    policies
        .map(|policy| {
            let metadata = &policy.object.metadata;
            (
                metadata.namespace.clone().unwrap_or_default(),
                metadata.name.clone().unwrap_or_default(),
            )
        })
        .collect()
}

/// The rule that decided at one endpoint, of the policies that isolate it; `None` for the default deny.
fn decided(said: &Value, allowed: bool, isolating: &BTreeSet<(String, String)>) -> Result<()> {
    if isolating.is_empty() {
        ensure!(
            said.is_null() || said["allowed"] == true,
            "nobody isolates it, and it says {said}"
        );
        return Ok(());
    }
    ensure!(said["allowed"] == allowed, "the oracle says {allowed}: {said}");
    let names = |policy: &Value| {
        let text = |field: &str| policy[field].as_str().unwrap_or_default().to_owned();
        (text("namespace"), text("name"))
    };
    let told = said["isolating"].as_array().context("who isolates it is not told")?;
    let told: BTreeSet<_> = told.iter().map(names).collect();
    ensure!(told == *isolating, "isolated by {isolating:?}, told are {told:?}");
    let rule = &said["rule"];
    ensure!(rule.is_null() != allowed, "the rule {rule}");
    if allowed {
        ensure!(
            isolating.contains(&names(&rule["policy"])),
            "a rule of a policy that is not about it: {rule}"
        );
    }
    Ok(())
}

/// The virtual addresses in the output of `knictl services`.
fn virtual_addresses(world: &NinePods) -> Result<Virtual> {
    let document: Value = serde_json::from_str(&world.stage.knictl(&["services", "-o", "json"])?)?;
    let listed = document["services"].as_array().context("no services")?;
    let mut addresses = Virtual::new();
    for service in listed {
        let text = |field: &str| service[field].as_str().unwrap_or_default().to_owned();
        let address: IpAddr = text("address").parse()?;
        let name = text("service");
        let name = name.split(':').next().unwrap_or_default().to_owned();
        addresses.insert((text("network"), name, address.is_ipv4()), address);
    }
    Ok(addresses)
}

#[tokio::test(flavor = "multi_thread")]
async fn knictl_explain_tells_the_node_from_what_it_forwards() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut world = NinePods::start("explain-node").await?;
    let ask = |world: &NinePods, from: &str, to: IpAddr| {
        let text = world
            .stage
            .knictl(&["explain", from, &to.to_string(), "tcp/80", "-o", "json"])?;
        serde_json::from_str::<Value>(&text).with_context(|| text.clone())
    };
    for denied in [true, false] {
        let policies = [("x", DENY_ALL)];
        enforce(&mut world, if denied { &policies } else { &[] }).await?;
        for (v4, node, outside) in [(true, NODE_V4, FABRIC_V4), (false, NODE_V6, FABRIC_V6)] {
            let to = at(&world, "x/a", v4, 80).ip();
            let by_node = ask(&world, node, to)?;
            ensure!(by_node["allowed"] == true, "the node itself: {by_node:#}");
            ensure!(by_node["flow"]["verdict"] == "delivered", "{by_node:#}");
            let forwarded = ask(&world, outside, to)?;
            ensure!(forwarded["allowed"] == !denied, "from outside: {forwarded:#}");
            if denied {
                ensure!(forwarded["flow"]["verdict"] == "policy_ingress", "{forwarded:#}");
                let isolating = &forwarded["flow"]["ingress"]["isolating"];
                ensure!(isolating[0]["namespace"] == "x", "{forwarded:#}");
            }
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn knictl_explain_leaves_no_trace_and_says_what_it_cannot_answer() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut world = NinePods::start("explain-none").await?;
    enforce(&mut world, &[("x", DENY_ALL)]).await?;
    let counted = |world: &NinePods| world.stage.knictl(&["drops", "-o", "json"]);
    let rules = |world: &NinePods| world.stage.knictl(&["policy", "x/a", "-o", "json"]);
    let (drops, hits) = (counted(&world)?, rules(&world)?);
    for _ in 0..20 {
        world.stage.knictl(&["explain", "y/a", "x/a", "tcp/80"])?;
    }
    ensure!(counted(&world)? == drops, "a question is counted as a drop");
    ensure!(rules(&world)? == hits, "a question is counted at a rule");
    let denied = Question {
        net: Net::Default,
        via: Via::Address,
        v4: true,
        protocol: oracle::Protocol::Tcp,
        port: 80,
        from: index_of("y/a"),
        to: index_of("x/a"),
    };
    // The counters can change: a real packet changes them.
    world.probe(&[denied])?;
    ensure!(counted(&world)? != drops, "a real drop is not counted");
    for (args, words) in [
        (["nobody/here", "x/a", "tcp/80"], "nobody/here"),
        (["x/a", "y/nobody", "tcp/80"], "y/nobody"),
        (["203.0.113.1", "203.0.113.2", "tcp/80"], "pod of this node"),
        (["x/a", "no-address", "tcp/80"], "no-address"),
        (["x/a", "y/a", "tcp"], "tcp"),
        (["x/a", "y/a", "quic/443"], "quic"),
    ] {
        let line = ["explain", args[0], args[1], args[2]];
        let refused = world
            .stage
            .knictl(&line)
            .err()
            .with_context(|| format!("{line:?} is answered"))?;
        let told = format!("{refused:#}");
        // The command line precedes the output.
        let told = told.rsplit("exit status").next().unwrap_or_default();
        ensure!(told.contains(words), "{line:?}: {told}");
    }
    Ok(())
}
