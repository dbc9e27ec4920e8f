//! Tests that a pod is isolated before its first packet.

use std::{
    net::{IpAddr, UdpSocket},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    eventually_sync,
    frames::PacketSocket,
    oracle::Labels,
    patience, require,
    traffic::Servers,
    world::{Net, NinePods, PolicyText, Setting, index_of, run_labelled},
};
use serde_json::Value;

use super::{PORT, at};

const PODS: usize = 6;

#[tokio::test(flavor = "multi_thread")]
async fn first_packet_of_a_pod_attached_under_default_deny_is_dropped() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut world = NinePods::start("first").await?;
    let deny = PolicyText::new("fresh", "deny", "{podSelector: {}, policyTypes: [Ingress, Egress]}");
    world.apply(Net::Default, &[deny], &Setting::default()).await?;
    let receiver = &world.member(index_of("x/a")).inside;
    let server = Servers::start(receiver, "x/a", PORT)?;
    for number in 0..PODS {
        let (name, v4) = (format!("pod{number}"), number % 2 == 0);
        let run = run_labelled(&world.stage.kubelet, ("fresh", &name), &Labels::new(), &[]).await;
        let (sandbox, netns) = run.with_context(|| name.clone())?;
        // Egress first, before any other call to the agent.
        let inside = world.stage.node.net_at(&name, Path::new(&netns))?;
        let to = at(&world, "x/a", v4, PORT);
        inside.enter(|| {
            let any = if v4 { "0.0.0.0:0" } else { "[::]:0" };
            UdpSocket::bind(any)?.send_to(name.as_bytes(), to)
        })??;
        ensure!(
            !server.saw_within(&name, Duration::from_millis(100)),
            "{name}'s first packet arrives"
        );
        let arriving = PacketSocket::open(&inside, "eth0")?;
        let config = world.stage.kubelet.query(&sandbox.id).await?.ipconfigs;
        let ips = &config.get("eth0").context("no eth0")?.ip;
        let own: IpAddr = ips
            .iter()
            .find(|ip| ip.contains(':') != v4)
            .context("no address")?
            .parse()?;
        world.member(index_of("y/a")).inside.enter(|| {
            let any = if v4 { "0.0.0.0:0" } else { "[::]:0" };
            UdpSocket::bind(any)?.send_to(b"into-the-fresh-pod", (own, PORT))
        })??;
        let leaked = arriving.receive(Duration::from_millis(100), |frame| {
            frame.windows(18).any(|bytes| bytes == b"into-the-fresh-pod")
        })?;
        ensure!(leaked.is_none(), "the first packet to {name} arrives");
        assert_reported(&world, &name, "egress", "policy_egress")?;
        assert_reported(&world, &name, "ingress", "policy_ingress")?;
        world.stage.kubelet.detach(&sandbox.id).await?;
        world.stage.kubelet.delete_network(&sandbox.id).await?;
    }
    Ok(())
}

/// Checks that `knictl flows` reports network, policy and direction.
fn assert_reported(world: &NinePods, pod: &str, direction: &str, verdict: &str) -> Result<()> {
    let pod = format!("fresh/{pod}");
    eventually_sync(patience(), || {
        let shown = world.stage.knictl(&["flows", "--drops", "--pod", &pod, "-o", "json"])?;
        let document: Value = serde_json::from_str(&shown).with_context(|| shown.clone())?;
        let flows = document["flows"].as_array().cloned().unwrap_or_default();
        let names_it = |flow: &Value| {
            let isolating = flow[direction]["isolating"].as_array().cloned().unwrap_or_default();
            let policy = |policy: &Value| {
                policy["kind"] == "NetworkPolicy" && policy["namespace"] == "fresh" && policy["name"] == "deny"
            };
            flow["verdict"] == verdict
                && flow["network"] == "default"
                && flow[direction]["allowed"] == false
                && isolating.iter().any(policy)
                && flow["explanation"]
                    .as_str()
                    .is_some_and(|text| text.contains("fresh/deny"))
        };
        let named = flows.iter().any(names_it);
        ensure!(
            named,
            "no flow has the verdict {verdict} by fresh/deny at {pod}:\n{shown}"
        );
        Ok(())
    })
}
