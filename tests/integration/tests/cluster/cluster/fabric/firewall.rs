//! Tests that `doctor` names the nodes that a firewall keeps the tunnel from, and no other.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    cluster::{Member, wire::OVERLAY_PORT},
    require,
};
use serde_json::Value;

use super::bed::Bed;

/// The check of a node's report: its title and its findings.
fn tunnel(member: &Member) -> Result<(String, Vec<Value>)> {
    let program = member.node.install(&kni_integration::agent::knictl_binary()?)?;
    let program = program.to_str().context("not UTF-8")?;
    // The exit code is of all checks.
    let report = member
        .node
        .run("sh", &["-c", &format!("{program} doctor -o json || true")])?;
    let report: Value = serde_json::from_str(&report).with_context(|| report.clone())?;
    let checks = report["checks"].as_array().context("checks")?;
    let check = checks
        .iter()
        .find(|check| check["name"] == "tunnel")
        .context("the check")?;
    let title = check["title"].as_str().context("a title")?.to_owned();
    Ok((title, check["findings"].as_array().cloned().unwrap_or_default()))
}

/// The nodes that the findings of a node name.
fn named(member: &Member) -> Result<BTreeSet<String>> {
    let (title, findings) = tunnel(member)?;
    ensure!(title.contains("(2 were asked)"), "{title}");
    for finding in &findings {
        let problem = finding["problem"].as_str().context("a problem")?;
        ensure!(
            problem.contains(&format!("drops UDP port {OVERLAY_PORT}")) && finding["severity"] == "warning",
            "{finding}"
        );
    }
    let objects = findings.iter().filter_map(|finding| finding["object"].as_str());
    Ok(objects.map(str::to_owned).collect())
}

async fn a_firewall_is_named(name: &str, args: &[&str]) -> Result<()> {
    let bed = Bed::start(name, args, None).await?;
    bed.connected().await?;
    let [one, two, three] = bed.cluster.nodes.as_slice() else {
        anyhow::bail!("three nodes");
    };
    let all = |text: &[&str]| text.iter().map(|name| format!("node {name}")).collect::<BTreeSet<_>>();
    for member in [one, two, three] {
        ensure!(named(member)?.is_empty(), "{}: {:?}", member.name, tunnel(member)?);
    }
    for chain in ["input", "output"] {
        let rules = format!(
            "add table inet wall; add chain inet wall {chain} {{ type filter hook {chain} priority 0; }}; \
             add rule inet wall {chain} udp dport {OVERLAY_PORT} drop"
        );
        two.node.run("nft", &[&rules])?;
        ensure!(named(one)? == all(&["node2"]), "{chain}: {:?}", tunnel(one)?);
        ensure!(named(three)? == all(&["node2"]), "{chain}: {:?}", tunnel(three)?);
        ensure!(named(two)? == all(&["node1", "node3"]), "{chain}: {:?}", tunnel(two)?);
        two.node.run("nft", &["delete table inet wall"])?;
        for member in [one, two, three] {
            ensure!(named(member)?.is_empty(), "{}: {:?}", member.name, tunnel(member)?);
        }
    }
    // A node that answers nothing at all may be down.
    two.node.run(
        "nft",
        &["add table inet wall; add chain inet wall input { type filter hook input priority 0; policy drop; }"],
    )?;
    let (title, findings) = tunnel(one)?;
    ensure!(
        findings.is_empty() && title.contains("1 answer no echo requests"),
        "{title}: {findings:?}"
    );
    two.node.run("nft", &["delete table inet wall"])?;
    // The requests have left nothing behind.
    bed.matrix().assert_expected();
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn doctor_names_the_nodes_that_a_firewall_keeps_the_tunnel_from() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    a_firewall_is_named("fabric-firewall4", &[]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn doctor_does_so_where_the_tunnel_is_of_ipv6() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    a_firewall_is_named("fabric-firewall6", &["--underlay-family", "ipv6"]).await
}
