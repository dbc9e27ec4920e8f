//! Tests egress policies: allowed external destinations and source addresses of pods.

use std::{net::IpAddr, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Pod,
    agent::MANIFESTS,
    eventually, require,
    traffic::{NoAnswer, tcp_get, udp_ask},
};

use super::{
    FAMILIES, PORT,
    world::{APPLIED, World, masquerading, patience, pool, server},
};

const SHORT: Duration = Duration::from_millis(400);
const OTHER: u16 = 8081;
/// The egress address of a network.
const NETWORK_V4: &str = "198.51.100.60";

fn policy(name: &str, body: &str) -> Manifest {
    Manifest::file(
        &format!("{name}.yaml"),
        format!(
            "apiVersion: kni.dev/v1alpha1\nkind: EgressPolicy\nmetadata:\n  name: {name}\n  namespace: team\nspec:\n  podSelector: {{}}\n{body}"
        ),
    )
}

impl World {
    /// Waits until the server gives no answer, or an answer, to a request of the pod.
    async fn wait_for(
        &self,
        pod: &kni_integration::Pod,
        to: IpAddr,
        wanted: impl Fn(&Result<String, NoAnswer>) -> bool,
    ) -> Result<()> {
        eventually(APPLIED, async || {
            let got = tcp_get(&pod.inside, to, PORT, SHORT).map(|answer| answer.client.ip().to_string());
            ensure!(wanted(&got), "{} to {to} stays {got:?}", pod.name);
            Ok(())
        })
        .await
        .with_context(|| format!("the agent's log:\n{}", self.stage.agent.log()))
    }
}

/// The number of packets dropped by policy, as soon as it increases: a busy machine may also be silent.
async fn counted(world: &World, pod: &Pod, to: IpAddr) -> Result<u64> {
    eventually(patience(), async || {
        let drops = world.stage.drops(pod, "from_pod", "policy_beyond").await?;
        if drops == 0 {
            let _answered_or_not = udp_ask(&pod.inside, to, PORT, SHORT);
        }
        ensure!(drops > 0, "{} to {to}: no drop is counted", pod.name);
        Ok(drops)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_rule_that_matches_decides() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("rules", masquerading(), &[]).await?;
    let watch = world.watch()?;
    let _servers = world.serve()?;
    let _other = kni_integration::traffic::Servers::start(&world.outside.server, "other", OTHER)?;
    let pods = [
        world.stage.pod("rules").await?,
        world.stage.pod_in("blue", "rules-blue", "10.10.0.11,fd10::11").await?,
    ];
    for v4 in FAMILIES {
        for pod in &pods {
            tcp_get(&pod.inside, server(v4).ip(), PORT, patience()).context("before any policy")?;
        }
    }
    let body = "  rules:\n    - {action: Deny, to: [{cidr: 203.0.113.0/24}, {cidr: \"2001:db8:203::/48\"}], ports: [{port: 8080}, {protocol: UDP, port: 8080}]}\n  defaultAction: Allow\n";
    Manifest::apply(&[policy("rules", body)], &world.stage.node)?;
    for v4 in FAMILIES {
        for pod in &pods {
            let to = server(v4).ip();
            world.wait_for(pod, to, |got| *got == Err(NoAnswer::Timeout)).await?;
            let before = counted(&world, pod, to).await?;
            assert_eq!(udp_ask(&pod.inside, to, PORT, SHORT), Err(NoAnswer::Timeout));
            // From: connections from before the policy may still repeat their last segments.
            world
                .stage
                .wait_for_drops_from(pod, "from_pod", "policy_beyond", before + 1)
                .await?;
            let other = tcp_get(&pod.inside, to, OTHER, patience()).context("another port")?;
            assert_eq!(other.identity, "other");
        }
    }
    // The reverse: everything except one port is denied.
    let body = "  rules:\n    - {action: Allow, to: [{cidr: 203.0.113.0/24}, {cidr: \"2001:db8:203::/48\"}], ports: [{port: 8080}]}\n  defaultAction: Deny\n";
    Manifest::apply(&[policy("rules", body)], &world.stage.node)?;
    for v4 in FAMILIES {
        for pod in &pods {
            let to = server(v4).ip();
            world.wait_for(pod, to, Result::is_ok).await?;
            assert_eq!(tcp_get(&pod.inside, to, OTHER, SHORT).unwrap_err(), NoAnswer::Timeout);
        }
    }
    watch.assert_clean();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_egress_address_is_what_the_server_sees() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut manifests = masquerading();
    manifests[2] = Manifest::network("red", &["10.10.0.0/16", "fd10::/64"])
        .spec("egress: {mode: Masquerade, addresses: [198.51.100.60, \"2001:db8:100::60\"]}");
    let mut world = World::start("address", manifests, &[]).await?;
    let watch = world.watch()?;
    let _servers = world.serve()?;
    let pod = world.stage.pod("address").await?;
    let red = world.stage.pod_in("red", "address-red", "10.10.0.11,fd10::11").await?;
    // The network's own address, from the first packet on.
    for (v4, expected) in [(true, NETWORK_V4), (false, "2001:db8:100::60")] {
        let answer = tcp_get(&red.inside, server(v4).ip(), PORT, patience()).context("with the network's address")?;
        assert_eq!(answer.client.ip().to_string(), expected);
        assert!(answer.client.port() >= 1024);
    }
    let uplink = world.uplink().await?;
    assert_eq!(uplink.dedicated, [NETWORK_V4, "2001:db8:100::60"]);
    // The node itself does not use them.
    for v4 in FAMILIES {
        let answer = tcp_get(&world.stage.node, server(v4).ip(), PORT, patience())?;
        assert!(
            !uplink.dedicated.contains(&answer.client.ip().to_string()),
            "{}",
            answer.client
        );
    }
    let body = "  podNetworkNames: [default]\n  egressAddresses: [198.51.100.70, \"2001:db8:100::70\"]\n";
    let pool = pool("team", &["198.51.100.64/28", "2001:db8:100::40/122"], "team");
    Manifest::apply(&[pool, policy("address", body)], &world.stage.node)?;
    for (v4, expected) in [(true, "198.51.100.70"), (false, "2001:db8:100::70")] {
        let to = server(v4).ip();
        world
            .wait_for(&pod, to, |got| got.as_ref().is_ok_and(|client| client == expected))
            .await?;
    }
    world.stage.agent.kill9()?;
    world.stage.agent.restart()?;
    for (v4, expected) in [(true, "198.51.100.70"), (false, "2001:db8:100::70")] {
        let answer = tcp_get(&pod.inside, server(v4).ip(), PORT, patience()).context("after a restart")?;
        assert_eq!(answer.client.ip().to_string(), expected);
    }
    // The addresses of a policy are removed with it.
    let file = Path::new(MANIFESTS).join("address.yaml");
    world.stage.node.enter(|| std::fs::remove_file(&file))??;
    world
        .wait_for_uplink(|uplink| uplink.dedicated == [NETWORK_V4, "2001:db8:100::60"])
        .await?;
    let shown = world.stage.node.run("ip", &["address", "show", "dev", "uplink0"])?;
    assert!(
        !shown.contains("198.51.100.70") && shown.contains(NETWORK_V4),
        "{shown}"
    );
    world.stage.kubelet.delete_network(&red.id).await?;
    world.wait_for_uplink(|uplink| uplink.dedicated.is_empty()).await?;
    let shown = world.stage.node.run("ip", &["address", "show", "dev", "uplink0"])?;
    assert!(!shown.contains(NETWORK_V4) && !shown.contains("::60"), "{shown}");
    watch.assert_clean();
    Ok(())
}
