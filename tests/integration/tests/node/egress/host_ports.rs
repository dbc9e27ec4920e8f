//! Tests ports of the node that lead to pods.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Namespaces, Pod, Stage, eventually,
    manifest::network_policy,
    node::{NODE_V4, NODE_V6},
    require,
    traffic::{NoAnswer, Servers, UdpClient, tcp_get, udp_ask},
};
use kni_proto::kni::{PortMapping, Protocol};

use super::{
    FAMILIES, PORT,
    world::{APPLIED, World, masquerading, patience},
};

const SHORT: Duration = Duration::from_millis(400);
const NODE_PORT: u16 = 30_080;
/// Pods that are attached while the agent is busy.
const SHOWN: u16 = 20;
/// Ports of another pod, in both families.
const MANY: u16 = 1800;
const MANY_FROM: u16 = 20_000;
/// A second address of the node.
const SECOND_V4: &str = "198.51.100.3";

fn mapping(protocol: Protocol, host_port: u16, host_ip: &str) -> PortMapping {
    PortMapping {
        protocol: protocol.into(),
        container_port: PORT.into(),
        host_port: host_port.into(),
        host_ip: host_ip.into(),
    }
}

async fn run(
    stage: &Stage,
    name: &str,
    annotations: &[(&str, &str)],
    mappings: Vec<PortMapping>,
) -> Result<Pod, tonic::Status> {
    stage
        .kubelet
        .run_pod_with("team", name, annotations, |request| request.port_mappings = mappings)
        .await
}

fn node(v4: bool) -> Result<IpAddr> {
    Ok(if v4 { NODE_V4 } else { NODE_V6 }.parse()?)
}

fn both(port: u16, host_ip: &str) -> Vec<PortMapping> {
    [Protocol::Tcp, Protocol::Udp]
        .map(|protocol| mapping(protocol, port, host_ip))
        .to_vec()
}

fn refused(client: &Namespaces, to: IpAddr, port: u16) {
    // The node itself answers that the port is closed.
    assert_eq!(
        tcp_get(client, to, port, patience()),
        Err(NoAnswer::Refused),
        "TCP {to} {port}"
    );
    assert_eq!(
        udp_ask(client, to, port, patience()),
        Err(NoAnswer::Refused),
        "UDP {to} {port}"
    );
}

fn answers(client: &Namespaces, to: IpAddr, port: u16, who: &str) -> Result<()> {
    for answer in [
        tcp_get(client, to, port, patience()).with_context(|| format!("TCP {to} {port}"))?,
        udp_ask(client, to, port, patience()).with_context(|| format!("UDP {to} {port}"))?,
    ] {
        assert_eq!(answer.identity, who);
        assert!(
            [kni_integration::outside::SERVER_V4, kni_integration::outside::SERVER_V6]
                .contains(&answer.client.ip().to_string().as_str()),
            "the pod sees the client's own address, not {}",
            answer.client
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_of_the_node_leads_to_the_pod() -> Result<()> {
    require!(root, netns, bpf, ip);
    // Networks without egress support host ports, too.
    let mut world = World::start("mapped", Manifest::overlapping(), &[]).await?;
    assert!(world.uplink().await?.programs.is_empty(), "nothing needs them yet");
    let client = world.outside.server.clone();
    let pod = run(&world.stage, "mapped", &[], both(NODE_PORT, "")).await?;
    let ips = [("kni.dev/network", "blue"), ("kni.dev/ips", "10.10.0.11,fd10::11")];
    let blue = run(&world.stage, "mapped-blue", &ips, both(NODE_PORT + 1, "")).await?;
    let _servers = [
        Servers::start(&pod.inside, "pod", PORT)?,
        Servers::start(&blue.inside, "blue", PORT)?,
    ];
    let uplink = world.uplink().await?;
    assert_eq!(
        (uplink.programs.len(), uplink.host_ports),
        (2, 8),
        "two protocols, two families, two pods"
    );
    let watch = world.watch()?;
    for v4 in FAMILIES {
        answers(&client, node(v4)?, NODE_PORT, "pod")?;
        answers(&client, node(v4)?, NODE_PORT + 1, "blue")?;
        refused(&client, node(v4)?, NODE_PORT + 2);
    }
    world.stage.agent.kill9()?;
    for v4 in FAMILIES {
        answers(&client, node(v4)?, NODE_PORT, "pod").context("without an agent")?;
    }
    world.stage.agent.restart()?;
    for v4 in FAMILIES {
        answers(&client, node(v4)?, NODE_PORT, "pod").context("after a restart")?;
        answers(&client, node(v4)?, NODE_PORT + 1, "blue").context("after a restart")?;
    }
    // The ports are removed with the pods, and the programs with the last port.
    world.stage.kubelet.delete_network(&pod.id).await?;
    for v4 in FAMILIES {
        refused(&client, node(v4)?, NODE_PORT);
        answers(&client, node(v4)?, NODE_PORT + 1, "blue")?;
    }
    world.stage.kubelet.delete_network(&blue.id).await?;
    world.wait_for_uplink(|uplink| uplink.programs.is_empty()).await?;
    watch.assert_clean();
    Ok(())
}

/// A pod sends to a port of its node from one socket, while a process of the node has the port and while pods have it.
#[tokio::test(flavor = "multi_thread")]
async fn a_sender_follows_the_port_to_the_pod_that_has_it() -> Result<()> {
    require!(root, netns, bpf, ip);
    for (name, networks) in [("follows", Manifest::overlapping()), ("follows-nat", masquerading())] {
        let world = World::start(name, networks, &[]).await?;
        let client = world.stage.pod("client").await?;
        let _process = Servers::start(&world.stage.node, "process", NODE_PORT)?;
        let asking = FAMILIES.map(|v4| UdpClient::open(&client.inside, SocketAddr::new(node(v4)?, NODE_PORT)));
        let asking = asking.into_iter().collect::<Result<Vec<_>>>()?;
        asking.iter().try_for_each(|one| one.assert_answered("process"))?;
        for pod in ["first", "second"] {
            let udp = vec![mapping(Protocol::Udp, NODE_PORT, "")];
            let pod = run(&world.stage, pod, &[], udp).await?;
            let _server = Servers::start(&pod.inside, &pod.name, PORT)?;
            let followed = asking.iter().try_for_each(|one| one.assert_answered(&pod.name));
            followed.with_context(|| format!("{name}: pod {}", pod.name))?;
            world.stage.kubelet.delete_network(&pod.id).await?;
            let back = asking.iter().try_for_each(|one| one.assert_answered("process"));
            back.with_context(|| format!("{name}: after pod {}", pod.name))?;
        }
    }
    Ok(())
}

/// Changes a route of the node all the time, which makes the agent read the node's network again.
fn disturb(node: &Namespaces, stop: &AtomicBool) -> Result<()> {
    while !stop.load(Ordering::Relaxed) {
        node.ip(&["route add blackhole 192.0.2.0/24", "route del blackhole 192.0.2.0/24"])?;
    }
    Ok(())
}

/// Also while the agent is busy with a change of the node's network.
#[tokio::test(flavor = "multi_thread")]
async fn the_status_has_the_ports_of_every_pod_that_was_attached() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("shown", Manifest::overlapping(), &[]).await?;
    // Many ports, so that the agent is busy for long.
    let many = (0..MANY).map(|number| mapping(Protocol::Udp, MANY_FROM + number, ""));
    run(&world.stage, "shown", &[], many.collect()).await?;
    let node: Namespaces = (*world.stage.node).clone();
    let stop = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&stop);
    let disturbing = thread::spawn(move || disturb(&node, &told));
    for number in 0..SHOWN {
        let pod = format!("shown-{number}");
        run(&world.stage, &pod, &[], both(NODE_PORT + number, "")).await?;
        let rows = u32::from(MANY) * 2 + u32::from(number + 1) * 4;
        assert_eq!(world.uplink().await?.host_ports, rows, "after {pod} was attached");
    }
    stop.store(true, Ordering::Relaxed);
    disturbing.join().expect("it does not panic")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_address_that_is_asked_for_is_honoured() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("asked", Manifest::overlapping(), &[]).await?;
    world.stage.node.add_address("uplink0", &format!("{SECOND_V4}/24"))?;
    let client = world.outside.server.clone();
    let second: IpAddr = SECOND_V4.parse()?;
    let one = run(&world.stage, "asked-1", &[], both(NODE_PORT, NODE_V4)).await?;
    let two = run(&world.stage, "asked-2", &[], both(NODE_PORT, SECOND_V4)).await?;
    let six = run(&world.stage, "asked-6", &[], both(NODE_PORT, "::")).await?;
    let _servers = [
        Servers::start(&one.inside, "one", PORT)?,
        Servers::start(&two.inside, "two", PORT)?,
        Servers::start(&six.inside, "six", PORT)?,
    ];
    world.wait_for_uplink(|uplink| uplink.host_ports == 6).await?;
    answers(&client, node(true)?, NODE_PORT, "one")?;
    answers(&client, second, NODE_PORT, "two")?;
    answers(&client, node(false)?, NODE_PORT, "six")?;
    // A new address gets its rows, a removed one loses them.
    world
        .stage
        .node
        .ip(&[&format!("address del {SECOND_V4}/24 dev uplink0")])?;
    world.wait_for_uplink(|uplink| uplink.host_ports == 4).await?;
    world.stage.node.add_address("uplink0", &format!("{SECOND_V4}/24"))?;
    world.wait_for_uplink(|uplink| uplink.host_ports == 6).await?;
    answers(&client, second, NODE_PORT, "two")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_that_another_pod_has_is_refused() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("taken", Manifest::overlapping(), &[]).await?;
    let first = run(&world.stage, "first", &[], both(NODE_PORT, "")).await?;
    let refused = run(
        &world.stage,
        "second",
        &[],
        vec![mapping(Protocol::Tcp, NODE_PORT, NODE_V4)],
    )
    .await;
    let refused = refused.expect_err("the port is taken");
    assert_eq!(refused.code(), tonic::Code::AlreadyExists);
    for word in ["team/first", "team/second", "TCP 30080", &first.id] {
        assert!(refused.message().contains(word), "{word}: {}", refused.message());
    }
    // Nothing was created for it: the address is free for the next pod.
    let listed = world.stage.knictl(&["interfaces"])?;
    assert!(!listed.contains("second"), "{listed}");
    // The same number of another protocol is a different port.
    run(&world.stage, "third", &[], vec![mapping(Protocol::Sctp, NODE_PORT, "")]).await?;
    // After the removal of its owner the port is free.
    world.stage.kubelet.delete_network(&first.id).await?;
    let second = run(&world.stage, "second", &[], both(NODE_PORT, "")).await?;
    let _servers = Servers::start(&second.inside, "second", PORT)?;
    answers(&world.outside.server, node(true)?, NODE_PORT, "second")
}

/// A policy that allows ingress only from `from`.
fn guard(from: &[&str]) -> Manifest {
    let peers: Vec<String> = from
        .iter()
        .map(|cidr| format!("{{ipBlock: {{cidr: \"{cidr}\"}}}}"))
        .collect();
    let rule = if peers.is_empty() {
        String::from("[]")
    } else {
        format!("[{{from: [{}]}}]", peers.join(", "))
    };
    let spec = format!("{{podSelector: {{}}, policyTypes: [Ingress], ingress: {rule}}}");
    Manifest::file("guard.yaml", network_policy("team", "guard", &spec))
}

/// Sends requests until the answer is as expected: a policy is applied shortly after its manifest.
async fn wait_for(client: &Namespaces, v4: bool, wanted: impl Fn(&Result<String, NoAnswer>) -> bool) -> Result<()> {
    eventually(APPLIED, async || {
        let got = tcp_get(client, node(v4)?, NODE_PORT, SHORT).map(|answer| answer.identity);
        ensure!(wanted(&got), "it stays {got:?}");
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_hold_for_node_ports() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("guarded", Manifest::overlapping(), &[]).await?;
    let client = world.outside.server.clone();
    let pod = run(&world.stage, "guarded", &[], both(NODE_PORT, "")).await?;
    let _servers = Servers::start(&pod.inside, "guarded", PORT)?;
    for v4 in FAMILIES {
        answers(&client, node(v4)?, NODE_PORT, "guarded").context("without a policy")?;
    }
    let apply = |from: &[&str]| Manifest::apply(&[guard(from)], &world.stage.node);
    apply(&[])?;
    for v4 in FAMILIES {
        wait_for(&client, v4, |got| *got == Err(NoAnswer::Timeout)).await?;
        let before = world.stage.drops(&pod, "from_uplink", "policy_ingress").await?;
        assert!(before > 0, "counted as the pod's");
        assert_eq!(udp_ask(&client, node(v4)?, NODE_PORT, SHORT), Err(NoAnswer::Timeout));
        // From: connections from before the policy may still repeat their last segments.
        world
            .stage
            .wait_for_drops_from(&pod, "from_uplink", "policy_ingress", before + 1)
            .await?;
    }
    // The pod and its policy see the client's own address: IPv4 only.
    apply(&["203.0.113.80/32"])?;
    wait_for(&client, true, Result::is_ok).await?;
    assert_eq!(
        tcp_get(&client, node(false)?, NODE_PORT, SHORT).unwrap_err(),
        NoAnswer::Timeout
    );
    apply(&["203.0.113.80/32", "2001:db8:203::80/128"])?;
    wait_for(&client, false, Result::is_ok).await?;
    answers(&client, node(true)?, NODE_PORT, "guarded")?;
    answers(&client, node(false)?, NODE_PORT, "guarded")
}
