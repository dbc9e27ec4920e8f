//! Tests the settings of the node that the agent must not change: the main table, other rules, sysctls, other
//! interfaces.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use anyhow::{Result, ensure};
use kni_integration::{
    Manifest, Node, NodeSnapshot, Pod, Stage, eventually_sync,
    node::{NODE_V4, NODE_V6},
    patience, require,
    stage::{address, forwarding},
    traffic::{Matrix, Probe, Servers},
};

use super::{FAMILIES, PORT};

const FOREIGN_NFT: &str =
    "table inet foreign {\n chain watch {\n  type filter hook forward priority 0; policy accept;\n  counter\n }\n}\n";

/// A node with other users: additional rules, routes, tables and settings.
fn used_node(name: &str) -> Result<Node> {
    let node = Node::new(name)?;
    forwarding(&node)?;
    node.ip(&[
        "link add foreign0 type veth peer name foreign1",
        "link set foreign1 up",
        "link set foreign0 up",
        "route add 203.0.113.0/24 dev foreign0",
        "route add 203.0.113.0/24 dev foreign0 table 77",
        "rule add to 203.0.113.0/24 lookup 77 priority 1000",
        "rule add from 192.0.2.0/24 lookup 77 priority 2000",
    ])?;
    node.nft(FOREIGN_NFT)?;
    settled(&node)?;
    Ok(node)
}

/// Waits until duplicate address detection of all links has finished: the kernel adds their link-local routes then.
fn settled(node: &Node) -> Result<()> {
    eventually_sync(patience(), || {
        let routes = node.run("ip", &["-6", "route", "show", "table", "local"])?;
        for link in ["uplink0", "foreign0", "foreign1"] {
            let there = routes.contains(&format!("anycast fe80:: dev {link} "));
            ensure!(there, "no link-local address on {link}");
        }
        Ok(())
    })
}

/// The settings of interfaces that do not belong to the agent.
fn settings(node: &Node) -> Result<BTreeMap<String, String>> {
    node.enter(|| {
        let mut found = BTreeMap::new();
        for family in ["ipv4", "ipv6"] {
            for link in ["all", "default", "lo", "uplink0", "foreign0"] {
                let folder = Path::new("/proc/sys/net").join(family).join("conf").join(link);
                for entry in fs::read_dir(&folder)? {
                    let path = entry?.path();
                    // Some are unreadable while unset.
                    if let Ok(value) = fs::read_to_string(&path) {
                        found.insert(path.display().to_string(), value);
                    }
                }
            }
        }
        anyhow::Ok(found)
    })?
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rest_of_the_node_stays_as_it_was() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let node = used_node("footprint")?;
    let before = NodeSnapshot::take(&node)?;
    let settings_before = settings(&node)?;
    let main_before = main_tables(&node)?;

    let stage = Stage::on(node, Manifest::overlapping()).await?;
    let pods = [stage.pod("print-1").await?, stage.pod("print-2").await?];
    let blue = stage.pod_in("blue", "blue-1", "10.10.0.11,fd10::11").await?;
    let servers = traffic(&stage, &pods)?;

    assert_eq!(main_tables(&stage.node)?, main_before, "the main tables");
    assert_eq!(
        settings(&stage.node)?,
        settings_before,
        "settings of interfaces that are not ours"
    );
    let after = NodeSnapshot::take(&stage.node)?;
    let differences = NodeSnapshot::diff(&before, &after);
    let foreign: Vec<_> = differences.iter().filter(|line| !is_ours(line)).collect();
    assert!(foreign.is_empty(), "changes beside our own objects: {foreign:#?}");
    // Without the programs: an older bpftool does not list those at TCX hooks.
    for kind in ["link", "route", "rule", "bpffs"] {
        let prefix = format!("+ {kind} ");
        assert!(
            differences.iter().any(|line| line.starts_with(&prefix)),
            "no {kind} was made"
        );
    }
    let blue_addresses = ["10.10.0.11", "fd10::11"];
    let known = |line: &&String| line.starts_with("+ route") && blue_addresses.iter().any(|a| line.contains(a));
    assert_eq!(
        differences.iter().find(known),
        None,
        "the node has a route into an isolated network"
    );

    for pod in pods.into_iter().chain([blue]) {
        stage.kubelet.kill_pod(pod).await?;
    }
    drop(servers);
    Ok(())
}

/// Checks all kinds of traffic, and leaves it running.
fn traffic(stage: &Stage, pods: &[Pod; 2]) -> Result<[Servers; 2]> {
    let servers = [
        Servers::start(&stage.node, "node", PORT)?,
        Servers::start(&pods[1].inside, "print-2", PORT)?,
    ];
    let mut probes = Vec::new();
    for v4 in FAMILIES {
        let (from, to) = (&pods[0].inside, address(&pods[1], v4));
        probes.push(Probe {
            from,
            to,
            expected: Some("print-2"),
        });
        let from = &*stage.node;
        probes.push(Probe {
            from,
            to,
            expected: Some("print-2"),
        });
        let (from, to) = (&pods[0].inside, if v4 { NODE_V4 } else { NODE_V6 }.parse()?);
        probes.push(Probe {
            from,
            to,
            expected: Some("node"),
        });
    }
    Matrix::run(
        &probes,
        &servers.iter().collect::<Vec<_>>(),
        PORT,
        Duration::from_secs(2),
    )
    .assert_expected();
    Ok(servers)
}

fn main_tables(node: &Node) -> Result<[String; 2]> {
    let of = |family| node.run("ip", &[family, "route", "show", "table", "main"]);
    Ok([of("-4")?, of("-6")?])
}

/// Whether a difference is an addition with a mark of the agent.
fn is_ours(line: &str) -> bool {
    let Some(line) = line.strip_prefix("+ ") else {
        return false;
    };
    let (kind, what) = line.split_once(' ').unwrap_or((line, ""));
    match kind {
        "link" | "address" | "neighbour" | "qdisc" | "program" => what.contains("kni"),
        // The agent's table, and the kernel's own routes of each interface.
        "route" => what.contains("dev kni") && (what.contains("table 19278") || what.contains("table local")),
        "rule" => what.contains("lookup 19278"),
        "file" => what.contains("/run/kni") || what.contains("/tmp/kni.sock") || what.contains("/run/netns"),
        "bpffs" => what.contains("/sys/fs/bpf/kni"),
        "mount" => what.contains("/run/netns"),
        _ => false,
    }
}
