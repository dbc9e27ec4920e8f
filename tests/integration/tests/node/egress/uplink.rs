//! Tests that the uplink is used only on demand, that its changes are followed, and that its state is restored.

use std::{fs, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Namespaces, Node, NodeSnapshot, Outside, eventually,
    node::{FABRIC_V4, FABRIC_V6, NODE_V4, NODE_V6},
    require,
    traffic::tcp_get,
};
use kni_proto::kni::{PortMapping, Protocol};

use super::{
    FAMILIES, PORT,
    world::{World, masquerading, patience, server},
};

/// Names of pinned links that do not belong to an endpoint.
fn uplink_pins(node: &Node) -> Result<Vec<String>> {
    let names = node.enter(|| -> std::io::Result<Vec<String>> {
        let entries = fs::read_dir("/sys/fs/bpf/kni/links")?;
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect()
    })??;
    let mut names: Vec<String> = names.into_iter().filter(|name| name.starts_with("uplink")).collect();
    names.sort_unstable();
    Ok(names)
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_attached_while_nothing_needs_it() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("untouched", Manifest::overlapping(), &[]).await?;
    let pod = world.stage.pod("untouched").await?;
    let uplink = world.uplink().await?;
    assert_eq!((uplink.ifname.as_str(), uplink.programs.len()), ("uplink0", 0));
    assert_eq!(uplink.sources, [NODE_V4, NODE_V6]);
    assert!(uplink_pins(&world.stage.node)?.is_empty());
    // A masquerading network needs the uplink; after its removal the uplink is unused again.
    let folder = std::path::Path::new(kni_integration::agent::MANIFESTS);
    Manifest::write_all(&masquerading()[1..2], &world.stage.node, folder)?;
    let uplink = world.wait_for_uplink(|uplink| uplink.programs.len() == 2).await?;
    let hooks: Vec<&str> = uplink.programs.iter().map(|program| program.hook.as_str()).collect();
    assert_eq!(hooks, ["tcx/ingress", "tcx/egress"]);
    assert_eq!(
        uplink_pins(&world.stage.node)?,
        ["uplink-from_uplink", "uplink-to_uplink"]
    );
    let told = world.stage.knictl(&["status"])?;
    assert!(
        told.contains("from_uplink tcx/ingress") && told.contains(NODE_V6),
        "{told}"
    );
    Manifest::write_all(&Manifest::overlapping()[1..2], &world.stage.node, folder)?;
    world.wait_for_uplink(|uplink| uplink.programs.is_empty()).await?;
    // A program is detached before its pin is removed, and the status shows what is attached at the moment.
    eventually(patience(), async || {
        let pins = uplink_pins(&world.stage.node)?;
        ensure!(pins.is_empty(), "the pins {pins:?} stay");
        Ok(())
    })
    .await?;
    drop(pod);
    Ok(())
}

/// Gives the node an interface to the router in place of the removed one.
fn connect(node: &Namespaces, router: &Namespaces, here: &str, there: &str) -> Result<()> {
    node.veth(here, router, there)?;
    router.add_address(there, &format!("{FABRIC_V4}/24"))?;
    router.add_address(there, &format!("{FABRIC_V6}/64"))?;
    node.add_address(here, &format!("{NODE_V4}/24"))?;
    node.add_address(here, &format!("{NODE_V6}/64"))?;
    node.ip(&[
        &format!("route add default via {FABRIC_V4}"),
        &format!("route add default via {FABRIC_V6}"),
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn an_uplink_that_comes_back_is_taken_again() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut manifests = masquerading();
    manifests[1] = Manifest::network("blue", &["10.10.0.0/16", "fd10::/64"])
        .spec("egress: {mode: Masquerade, addresses: [198.51.100.60, \"2001:db8:100::60\"]}");
    let world = World::start("back", manifests, &["--deny-source", "192.0.2.0/24"]).await?;
    let _servers = world.serve()?;
    let pods = [
        world.stage.pod("back").await?,
        world.stage.pod_in("blue", "back-blue", "10.10.0.11,fd10::11").await?,
    ];
    let all_reach = || -> Result<()> {
        for v4 in FAMILIES {
            for pod in &pods {
                let answer = tcp_get(&pod.inside, server(v4).ip(), PORT, patience());
                answer.with_context(|| format!("{} over IPv{}", pod.name, if v4 { 4 } else { 6 }))?;
            }
        }
        Ok(())
    };
    all_reach()?;
    let before = world.uplink().await?;
    // With the same name, and then with another one.
    for (here, there) in [("uplink0", "fabric0"), ("other0", "fabric1")] {
        world
            .stage
            .node
            .ip(&[&format!("link del {}", world.uplink().await?.ifname)])?;
        world.wait_for_uplink(|uplink| uplink.ifname.is_empty()).await?;
        let told = world.stage.knictl(&["status"]);
        assert!(told.is_ok(), "the agent stays ready: {told:?}");
        connect(&world.stage.node, &world.outside.router, here, there)?;
        let uplink = world
            .wait_for_uplink(|uplink| {
                // The new link is searched for other hosts with the addresses first.
                let complete = uplink.sources.len() == 2 && uplink.dedicated == before.dedicated;
                uplink.ifname == here && uplink.programs.len() == 3 && complete
            })
            .await?;
        assert_ne!(uplink.ifindex, before.ifindex);
        // Duplicate address detection of link-local addresses comes first.
        tokio::time::sleep(Duration::from_secs(2)).await;
        all_reach().with_context(|| format!("by {here}"))?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_operator_may_name_the_uplink() -> Result<()> {
    require!(root, netns, bpf, ip);
    let node = Node::new("named")?;
    let outside = Outside::new(&node)?;
    // The default route uses another interface.
    let side = Namespaces::fresh_net("named-side")?;
    node.veth("side0", &side, "side1")?;
    node.add_address("side0", "192.0.2.5/24")?;
    node.ip(&[
        "route replace default via 192.0.2.1 metric 5",
        "address add 198.51.100.9/24 dev uplink0",
        "route add 203.0.113.0/24 via 198.51.100.1 src 198.51.100.9",
    ])?;
    let world = World::on(node, outside, masquerading(), &["--uplink", "uplink0"]).await?;
    let _servers = world.serve()?;
    let uplink = world.uplink().await?;
    assert_eq!(uplink.ifname, "uplink0");
    let pod = world.stage.pod("named").await?;
    let answer = tcp_get(&pod.inside, server(true).ip(), PORT, patience())?;
    assert!(
        uplink.sources.contains(&answer.client.ip().to_string()),
        "{}",
        answer.client
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_source_that_the_kernel_prefers_is_taken() -> Result<()> {
    require!(root, netns, bpf, ip);
    let node = Node::new("preferred")?;
    let outside = Outside::new(&node)?;
    node.ip(&[
        "address add 198.51.100.9/24 dev uplink0",
        &format!("route replace default via {FABRIC_V4} src 198.51.100.9"),
    ])?;
    // A deprecated address is never used, even if it is the first.
    node.run(
        "ip",
        &[
            "-6",
            "address",
            "change",
            &format!("{NODE_V6}/64"),
            "dev",
            "uplink0",
            "preferred_lft",
            "0",
            "valid_lft",
            "forever",
        ],
    )?;
    node.add_address("uplink0", "2001:db8:100::9/64")?;
    let world = World::on(node, outside, masquerading(), &[]).await?;
    let _servers = world.serve()?;
    let pod = world.stage.pod("preferred").await?;
    for (v4, expected) in [(true, "198.51.100.9"), (false, "2001:db8:100::9")] {
        let expected: IpAddr = expected.parse()?;
        let answer = tcp_get(&pod.inside, server(v4).ip(), PORT, patience())?;
        assert_eq!(answer.client.ip(), expected);
    }
    // A change is followed.
    world
        .stage
        .node
        .ip(&[&format!("route replace default via {FABRIC_V4} src {NODE_V4}")])?;
    world
        .wait_for_uplink(|uplink| uplink.sources.contains(&NODE_V4.to_owned()))
        .await?;
    let answer = tcp_get(&pod.inside, server(true).ip(), PORT, patience())?;
    assert_eq!(answer.client.ip().to_string(), NODE_V4);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn cleaning_up_leaves_the_uplink_as_it_was() -> Result<()> {
    require!(root, netns, bpf, ip);
    for hook in ["tcx", "clsact"] {
        let node = Node::new(&format!("tidy-{hook}"))?;
        let outside = Outside::new(&node)?;
        if hook == "clsact" {
            // The agent does not record whether the qdisc existed before, and others may use it by then, so it remains.
            node.run("tc", &["qdisc", "add", "dev", "uplink0", "clsact"])?;
        }
        let before = NodeSnapshot::take(&node)?;
        let mut manifests = masquerading();
        manifests[1] = Manifest::network("blue", &["10.10.0.0/16", "fd10::/64"])
            .spec("egress: {mode: Masquerade, addresses: [198.51.100.60, \"2001:db8:100::60\"]}");
        let args = ["--hook", hook, "--deny-source", "192.0.2.0/24", "--drop-bogons"];
        let mut world = World::on(node, outside, manifests, &args).await?;
        let _servers = world.serve()?;
        let mapping = PortMapping {
            protocol: Protocol::Tcp.into(),
            container_port: PORT.into(),
            host_port: 30_080,
            host_ip: String::new(),
        };
        let mapped = world
            .stage
            .kubelet
            .run_pod_with("team", "tidy", &[], |request| request.port_mappings = vec![mapping])
            .await?;
        let blue = world.stage.pod_in("blue", "tidy-blue", "10.10.0.11,fd10::11").await?;
        for v4 in FAMILIES {
            for pod in [&mapped, &blue] {
                tcp_get(&pod.inside, server(v4).ip(), PORT, patience())
                    .with_context(|| format!("{} {hook}", pod.name))?;
            }
        }
        assert_eq!(world.uplink().await?.programs.len(), 3);
        let hooks = world.stage.knictl(&["status"])?;
        assert!(hooks.contains(&format!("from_uplink {hook}/ingress")), "{hooks}");
        world.stage.agent.terminate()?;
        let cleaned = world.stage.agent.cleanup()?;
        assert!(cleaned.status.success(), "{}", String::from_utf8_lossy(&cleaned.stderr));
        drop((mapped, blue));
        let left = before.differences_within(&world.stage.node, patience())?;
        let left: Vec<&String> = left
            .iter()
            .filter(|line| !line.contains("/run/kni-manifests"))
            .collect();
        assert!(left.is_empty(), "{hook}: {left:#?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interface_without_ethernet_headers_is_refused_by_name() -> Result<()> {
    require!(root, netns, bpf, ip);
    let node = Node::new("tunnel")?;
    let outside = Outside::new(&node)?;
    node.ip(&["tuntap add dev tun0 mode tun", "link set tun0 up"])?;
    node.add_address("tun0", "198.51.100.9/24")?;
    let world = World::on(node, outside, masquerading(), &["--uplink", "tun0"]).await?;
    let told = eventually(patience(), async || {
        let reasons = world.stage.status().await?.reasons.join("; ");
        ensure!(reasons.contains("tun0"), "{reasons:?}");
        Ok(reasons)
    })
    .await?;
    assert!(
        told.contains("tun0 cannot be the uplink") && told.contains("Ethernet"),
        "{told}"
    );
    assert_eq!(world.uplink().await?.ifname, "");
    assert!(uplink_pins(&world.stage.node)?.is_empty());
    Ok(())
}
