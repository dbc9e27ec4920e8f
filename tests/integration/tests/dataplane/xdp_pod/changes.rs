//! Tests changes that affect a flow on the fast path.

use std::time::Duration;

use anyhow::{Result, ensure};
use kni_integration::{Manifest, Pod, Stage, eventually, frames::PacketSocket, patience, require};

use super::{Ends, networks, passed};

const DENY: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: shut, namespace: team}\n\
                    spec: {podSelector: {}, policyTypes: [Ingress]}\n";
const NOTHING: &str = "# nothing\n";

/// Writes the policy, or removes it, and waits until the change is applied at the pods, which it selects one by one.
async fn put(stage: &Stage, pods: [&Pod; 2], text: &str) -> Result<()> {
    let manifest = Manifest::file("policy.yaml", text);
    Manifest::apply(&[manifest], &stage.node)?;
    eventually(patience(), async || {
        for pod in pods {
            let name = format!("team/{}", pod.name);
            let applied = stage.knictl(&["policy", &name])?.contains("shut") == (text == DENY);
            ensure!(applied, "the policy is not applied at {name}");
        }
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_denying_policy_stops_the_next_datagram() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("xdp-deny", networks()).await?;
    let (client, server) = (stage.pod("client").await?, stage.pod("server").await?);
    for v4 in [true, false] {
        let ends = Ends::between(&client, &server, v4)?;
        for _ in 0..10 {
            ends.exchange(b"before")?;
        }
        put(&stage, [&client, &server], DENY).await?;
        let arriving = PacketSocket::open(&server.inside, "eth0")?;
        let drops = stage.drops(&client, "from_pod", "policy_ingress").await?;
        ends.client.send(b"forbidden")?;
        stage
            .wait_for_drops(&client, "from_pod", "policy_ingress", drops + 1)
            .await?;
        let is_it = |frame: &[u8]| frame.windows(9).any(|bytes| bytes == b"forbidden");
        let leaked = arriving.receive(Duration::from_millis(300), is_it)?;
        ensure!(leaked.is_none(), "IPv4 {v4}: a packet arrives: {leaked:?}");
        put(&stage, [&client, &server], NOTHING).await?;
        // Evaluated again once after each change of an end, and fast from then on. The agent may report the policy
        // before it has written the last row.
        eventually(patience(), async || {
            ends.exchange(b"after")?;
            let watcher = passed(&stage, &client).await?;
            ends.exchange(b"fast")?;
            ensure!(
                watcher.seen()? == 0,
                "IPv4 {v4}: the flow does not come back to the fast path"
            );
            Ok(())
        })
        .await?;
    }
    Ok(())
}

/// After the removal of a pod, its flow reaches neither it nor the next owner of its address.
#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_goes_takes_its_flows_along() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("xdp-gone", networks()).await?;
    let client = stage.pod("client").await?;
    let server = stage.pod_in("default", "server", "10.244.0.77,fd00:244::77").await?;
    let ends = Ends::between(&client, &server, true)?;
    for _ in 0..10 {
        ends.exchange(b"before")?;
    }
    stage.kubelet.detach(&server.id).await?;
    ends.client.send(b"lost")?;
    stage.wait_for_drops(&client, "from_pod", "no_destination", 1).await?;
    let other = stage.pod_in("blue", "other", "10.10.0.77,fd10::77").await?;
    let arriving = PacketSocket::open(&other.inside, "eth0")?;
    ends.client.send(b"lost again")?;
    let is_it = |frame: &[u8]| frame.windows(4).any(|bytes| bytes == b"lost");
    ensure!(arriving.receive(Duration::from_millis(300), is_it)?.is_none());
    Ok(())
}

/// `spec.xdp` is read when a pod is attached, and applies until it is detached.
#[tokio::test(flavor = "multi_thread")]
async fn the_field_holds_for_pods_attached_from_then_on() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("xdp-field", networks()).await?;
    let has = async |pod: &Pod| -> Result<bool> {
        let interface = stage.interface(pod, "eth0").await?;
        ensure!(interface.healthy, "{:?}", interface.problems);
        let told = stage.kubelet.query(&pod.id).await?.ipconfigs["eth0"]
            .extradata
            .get("xdp")
            .is_some_and(|said| said == "true");
        let runs = interface.programs.iter().any(|program| program.name == "xdp_pod");
        ensure!(told == runs, "told {told}, and it runs: {runs}");
        Ok(runs)
    };
    let first = stage.pod("first").await?;
    assert!(has(&first).await?);
    let slow = Manifest::default_network("default", &["10.244.0.0/16", "fd00:244::/64"]).spec("xdp: false");
    Manifest::apply(&[slow], &stage.node)?;
    let mut second = stage.pod("second-0").await?;
    for number in 1..100 {
        if !has(&second).await? {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        second = stage.pod(&format!("second-{number}")).await?;
    }
    assert!(has(&first).await? && !has(&second).await?);
    // Both kinds reach each other, each by its own path.
    for v4 in [true, false] {
        for (from, to) in [(&first, &second), (&second, &first)] {
            let ends = Ends::between(from, to, v4)?;
            let watcher = passed(&stage, from).await?;
            for _ in 0..10 {
                ends.exchange(b"between")?;
            }
            ensure!(watcher.seen()? >= 10, "a frame went to an end that takes none");
        }
    }
    Ok(())
}
