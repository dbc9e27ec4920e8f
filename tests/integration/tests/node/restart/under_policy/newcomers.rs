//! Tests pods that are attached before the agent has read anything again.

use std::{
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Agent, AgentOptions, Kubelet, Node, Pod, agent::KUBELET_SOCKET, eventually, eventually_sync, frames::PacketSocket,
    manifest::network_policy, on_one_cpu, patience, require, stage::address, traffic::udp_ask, wait,
};
use kni_proto::runtime::ListDropsRequest;

use super::{PAUSE, PORT, Town, doors::has, policies, shop};

/// Connects as soon as the agent listens.
async fn first_connection(node: &Node) -> Result<Kubelet> {
    eventually(patience(), async || Kubelet::connect(node, KUBELET_SOCKET).await).await
}

/// How many packets of a pod the policies of others have refused.
async fn refusals(kubelet: &Kubelet, pod: &Pod) -> Result<u64> {
    let listed = kubelet.runtime().list_drops(ListDropsRequest {}).await?.into_inner();
    let of_pod = listed.drops.iter().filter(|drop| {
        drop.pod_name == pod.name && drop.pod_namespace == pod.namespace && drop.reason == "policy_ingress"
    });
    Ok(of_pod
        .filter_map(|drop| drop.count.as_ref())
        .map(|count| count.packets)
        .sum())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_attached_right_after_a_restart_is_isolated_before_its_first_packet() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut town = Town::build("newcomers").await?;
    town.write(shop(&["friends", "free", "newcomers"]))?;
    for round in 0..4 {
        town.stage.agent.kill9()?;
        let isolated = network_policy(
            "newcomers",
            "nothing",
            "{podSelector: {}, policyTypes: [Ingress, Egress]}",
        );
        town.write(policies("60-newcomers", &[isolated]))?;
        town.stage.agent = Agent::start_unready(&town.stage.node, AgentOptions::default())?;
        // The first call to the agent.
        let kubelet = first_connection(&town.stage.node).await?;
        let name = format!("newcomer-{round}");
        let pod = kubelet.run_pod("newcomers", &name, &[]).await?;
        let v4 = round % 2 == 0;
        let any = if v4 { "0.0.0.0:0" } else { "[::]:0" };
        let to = town.at(0, v4);
        on_one_cpu(|| {
            pod.enter(|| UdpSocket::bind(any)?.send_to(name.as_bytes(), to))??;
            udp_ask(&town.friend.inside, to.ip(), PORT, patience()).context("a friend")
        })?;
        ensure!(!town.shops[0].1.saw(&name), "{name}'s first packet arrives");
        let arriving = PacketSocket::open(&pod.inside, "eth0")?;
        let own = SocketAddr::new(address(&pod, v4), PORT);
        let word = format!("to-{name}");
        let refused = refusals(&kubelet, &town.friend).await?;
        town.friend
            .enter(|| UdpSocket::bind(any)?.send_to(word.as_bytes(), own))??;
        wait::until(
            "the first packet to the isolated pod is refused",
            patience(),
            async || {
                ensure!(
                    arriving
                        .receive(Duration::from_millis(1), |frame| has(frame, &word))?
                        .is_none(),
                    "the first packet to {name} arrives"
                );
                Ok(refusals(&kubelet, &town.friend).await? > refused)
            },
        )
        .await?;
        // A pod without policies does both.
        let free = kubelet.run_pod("free", &name, &[]).await?;
        let word = format!("free-{round}");
        free.enter(|| UdpSocket::bind(any)?.send_to(word.as_bytes(), to))??;
        ensure!(
            town.shops[0].1.saw_within(&word, patience()),
            "the first packet of a free pod is lost"
        );
        // Without its policy the isolated one does so, too.
        town.write(policies("60-newcomers", &[]))?;
        let answer = eventually_sync(patience(), || {
            let answer = udp_ask(&pod.inside, to.ip(), PORT, PAUSE);
            answer.with_context(|| format!("{name} stays isolated"))
        })?;
        ensure!(answer.identity == "shop", "{answer:?}");
        kubelet.kill_pod(pod).await?;
        kubelet.kill_pod(free).await?;
    }
    Ok(())
}
