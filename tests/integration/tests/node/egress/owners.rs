//! Tests that a node answers for no address that belongs to others, whatever a policy requests, and that its pods do
//! not leave with another address instead.

use std::{net::Ipv4Addr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Pod, eventually,
    frames::{PacketSocket, arp_request},
    node::{FABRIC_V4, FABRIC_V6, NODE_V4},
    require,
    traffic::{Stream, tcp_get, udp_ask},
};

use super::{
    PORT,
    world::{APPLIED, World, masquerading, patience, pool, server},
};

/// A MAC address of no host.
const ASKING: [u8; 6] = [2, 0, 0, 0, 0, 0x77];
const SHORT: Duration = Duration::from_millis(100);
/// Addresses of the router, beside that of the gateway.
const ROUTERS: [&str; 2] = ["198.51.100.77", "2001:db8:100::77"];
/// An address that no host has.
const FREE: &str = "198.51.100.70";

fn policy(addresses: &[&str]) -> Manifest {
    let spec = format!("{{podSelector: {{}}, egressAddresses: {addresses:?}}}");
    Manifest::file(
        "owners.yaml",
        format!(
            "apiVersion: kni.dev/v1alpha1\nkind: EgressPolicy\nmetadata: {{name: owners, namespace: team}}\nspec: {spec}\n"
        ),
    )
}

/// The MAC address from which ARP requests for `target` are answered, asked from the router's side of the uplink.
fn answered(world: &World, target: &str) -> Result<Option<[u8; 6]>> {
    let target: Ipv4Addr = target.parse()?;
    let socket = PacketSocket::open(&world.outside.router, "fabric0")?;
    socket.send(&arp_request(ASKING, "198.51.100.250".parse()?, target))?;
    let is_reply = |frame: &[u8]| {
        frame.get(12..14) == Some(&[8, 6])
            && frame.get(20..22) == Some(&[0, 2])
            && frame.get(28..32) == Some(&target.octets())
    };
    let reply = socket.receive(Duration::from_millis(300), is_reply)?;
    let sender = |frame: Vec<u8>| Ok(frame.get(6..12).context("a short frame")?.try_into()?);
    reply.map(sender).transpose()
}

/// Requests an address with a policy, and checks that it is refused with the reason. Returns the drops of the pod,
/// which were `before`.
async fn refused(world: &World, pod: &Pod, (address, reason): (&str, &str), before: u64) -> Result<u64> {
    Manifest::apply(&[policy(&[address])], &world.stage.node)?;
    eventually(APPLIED, async || {
        let log = world.stage.agent.log();
        let told = log.lines().any(|line| line.contains(address) && line.contains(reason));
        ensure!(told, "{address}: the agent does not say `{reason}`:\n{log}");
        Ok(())
    })
    .await?;
    // Nothing leaves with another address either.
    let v4 = !address.contains(':');
    let drops = eventually(APPLIED, async || {
        let got = udp_ask(&pod.inside, server(v4).ip(), PORT, SHORT);
        ensure!(got.is_err(), "{address}: the pod leaves with another address: {got:?}");
        let drops = world.stage.drops(pod, "from_pod", "egress_address").await?;
        ensure!(drops > before, "{address}: no drop is counted");
        Ok(drops)
    })
    .await?;
    if address != NODE_V4 {
        let shown = world.stage.node.run("ip", &["address", "show", "dev", "uplink0"])?;
        assert!(!shown.contains(&format!(" {address}/")), "{address}: {shown}");
        assert!(
            !v4 || answered(world, address)?.is_none(),
            "the node answers for {address}"
        );
    }
    Ok(drops)
}

#[tokio::test(flavor = "multi_thread")]
async fn addresses_of_others_are_refused_with_the_reason() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("owners", masquerading(), &[]).await?;
    let watch = world.watch()?;
    let _servers = world.serve()?;
    let pod = world.stage.pod("owners").await?;
    let pools = [
        pool("team", &["198.51.100.0/24", "2001:db8:100::/112"], "team"),
        pool("other", &["192.0.2.0/28"], "other"),
    ];
    Manifest::apply(&pools, &world.stage.node)?;
    for address in ROUTERS {
        let length = if address.contains(':') { 64 } else { 24 };
        world
            .outside
            .router
            .add_address("fabric0", &format!("{address}/{length}"))?;
    }
    let router = world.outside.router.run("ip", &["link", "show", "dev", "fabric0"])?;
    let mac = router
        .split("link/ether ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    let conflict = format!(
        "in use on the link, by the host with MAC address {}",
        mac.context("no MAC address")?
    );
    let mut before = 0;
    for (address, reason) in [
        (FABRIC_V4, "the gateway of a route of this node"),
        (FABRIC_V6, "the gateway of a route of this node"),
        (NODE_V4, "an address of this node"),
        (ROUTERS[0], conflict.as_str()),
        (ROUTERS[1], conflict.as_str()),
        (
            "192.0.2.5",
            "in EgressAddressPool other, which does not admit namespace team",
        ),
        ("203.0.113.99", "in no EgressAddressPool"),
        ("10.244.0.9", "in no EgressAddressPool"),
    ] {
        before = refused(&world, &pod, (address, reason), before).await?;
        println!("{address}: refused, {reason}");
    }
    Manifest::apply(&[policy(&[FREE])], &world.stage.node)?;
    eventually(APPLIED, async || {
        let answer = tcp_get(&pod.inside, server(true).ip(), PORT, patience());
        let client = answer.as_ref().map(|answer| answer.client.ip().to_string());
        ensure!(client.as_deref() == Ok(FREE), "{answer:?}");
        Ok(())
    })
    .await?;
    assert!(answered(&world, FREE)?.is_some(), "the node answers for its own");
    watch.assert_clean();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_is_lost_stops_flows_that_have_it() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("lost", masquerading(), &[]).await?;
    let _servers = world.serve()?;
    let pod = world.stage.pod("lost").await?;
    let of_team = pool("one", &["198.51.100.64/28"], "team");
    Manifest::apply(&[of_team, policy(&[FREE])], &world.stage.node)?;
    world.wait_for_uplink(|uplink| uplink.dedicated == [FREE]).await?;
    eventually(APPLIED, async || {
        let answer = udp_ask(&pod.inside, server(true).ip(), PORT, SHORT);
        ensure!(answer.is_ok(), "{answer:?}");
        Ok(())
    })
    .await?;
    let stream = Stream::udp(&pod.inside, server(true))?;
    // The pool is another tenant's now.
    Manifest::apply(&[pool("one", &["198.51.100.64/28"], "other")], &world.stage.node)?;
    world.wait_for_uplink(|uplink| uplink.dedicated.is_empty()).await?;
    let capture = PacketSocket::open(&world.outside.router, "fabric0")?;
    let drops = world.stage.drops(&pod, "from_pod", "egress_address").await?;
    eventually(APPLIED, async || {
        let now = world.stage.drops(&pod, "from_pod", "egress_address").await?;
        ensure!(
            now >= drops + 20,
            "{now} packets of the flow are dropped, {drops} before"
        );
        Ok(())
    })
    .await?;
    let from_pod = |frame: &[u8]| {
        let node = NODE_V4
            .parse::<Ipv4Addr>()
            .is_ok_and(|node| frame.get(26..30) == Some(&node.octets()));
        let free = frame.get(26..30) == Some(&[198, 51, 100, 70]);
        frame.get(12..14) == Some(&[8, 0]) && frame.get(23) == Some(&17) && (node || free)
    };
    let frame = capture.receive(SHORT, from_pod)?;
    assert_eq!(frame, None, "a flow continues without the right to its address");
    drop(stream.stop());
    Ok(())
}
