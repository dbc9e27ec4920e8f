use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Kubelet, Pod, agent::SOCKET, dice::Dice, eventually, kubelet::Sandbox, patience, require, wait};
use kni_proto::kni::DeleteNetworkRequest;
use tokio::task::JoinSet;
use tonic::Status;

use crate::watched::{Watched, warm};

const CROWD: usize = 200;
const HANG_UPS: u64 = 50;

/// One of this number of pods has three interfaces.
const MULTI: usize = 20;

/// The annotations of the pod with this index.
fn wish(index: usize) -> &'static [(&'static str, &'static str)] {
    match (index % MULTI, index % 3) {
        (0, _) => &[("kni.io/multi-network", "blue,red")],
        (_, 0) => &[],
        (_, 1) => &[("kni.dev/network", "blue")],
        _ => &[("kni.dev/network", "red")],
    }
}

async fn run_crowd(kubelet: &Kubelet) -> Result<Vec<Pod>> {
    let mut running = JoinSet::new();
    for index in 0..CROWD {
        let kubelet = kubelet.clone();
        running.spawn(async move { kubelet.run_pod("crowd", &format!("web-{index}"), wish(index)).await });
    }
    let mut pods = Vec::new();
    while let Some(pod) = running.join_next().await {
        pods.push(pod?.context("a pod of the crowd")?);
    }
    Ok(pods)
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_pods_at_once_have_unique_addresses_and_leave_nothing() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut stage = Watched::with("crowd", warm(8)).await?;
    let before = stage.picture().await?;
    let pods = run_crowd(&stage.kubelet).await?;
    let interfaces = stage.interfaces().await?;
    assert_eq!(interfaces.len(), CROWD + CROWD / MULTI * 2);
    let mut addresses = BTreeSet::new();
    let mut unique = BTreeMap::new();
    for interface in &interfaces {
        assert!(interface.healthy, "{interface:?}");
        assert_eq!(interface.addresses.len(), 2);
        for address in &interface.addresses {
            let new = addresses.insert((&interface.network, &address.ip));
            assert!(new, "{} twice in {}", address.ip, interface.network);
        }
        for value in [&interface.host_ifname, &interface.mac, &interface.host_mac] {
            if let Some(other) = unique.insert(value, &interface.sandbox_id) {
                panic!("{value} of {} is also {other}'s", interface.sandbox_id);
            }
        }
    }
    // The agent's list matches the answers and the pods' interfaces.
    for pod in &pods {
        for (ifname, config) in &pod.interfaces {
            let listed = interfaces
                .iter()
                .find(|i| i.sandbox_id == pod.id && i.ifname == *ifname);
            let listed = listed.context("not listed")?;
            assert!(
                listed.addresses.iter().map(|a| &a.ip).eq(&config.ip),
                "{listed:?} {config:?}"
            );
        }
    }
    let some = pods[7].inside.run("ip", &["-o", "address"])?;
    assert!(
        pods[7]
            .interfaces
            .values()
            .flat_map(|c| &c.ip)
            .all(|ip| some.contains(ip.as_str())),
        "{some}"
    );

    let mut ending = JoinSet::new();
    for pod in pods {
        let kubelet = stage.kubelet.clone();
        ending.spawn(async move { kubelet.kill_pod(pod).await });
    }
    while let Some(ended) = ending.join_next().await {
        ended??;
    }
    stage.assert_as(&before).await?;
    // Cleanup removes prewarmed sandboxes too.
    stage.agent.terminate()?;
    assert!(stage.agent.cleanup()?.status.success());
    stage.pristine.assert_unchanged(&stage.node, patience());
    Ok(())
}

/// Removals wait for a quiet moment, but not for ever.
#[tokio::test(flavor = "multi_thread")]
async fn interfaces_are_removed_while_a_client_calls_without_a_pause() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::with("calls", warm(0)).await?;
    let before = stage.picture().await?;
    let kubelet = stage.kubelet.clone();
    let calls = tokio::spawn(async move {
        loop {
            if let Err(refused) = kubelet.delete_network(&"0".repeat(64)).await {
                return refused;
            }
        }
    });
    for _ in 0..3 {
        let pod = stage.kubelet.run_pod("calls", "web", &[]).await?;
        stage.kubelet.kill_pod(pod).await?;
        wait::until("it is removed", patience(), async || {
            Ok(stage.status().await?.pending_removals == 0)
        })
        .await?;
    }
    assert!(!calls.is_finished(), "{:?}", calls.await);
    calls.abort();
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_calls_at_once_are_one_call() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("equal").await?;
    let before = stage.picture().await?;
    for round in 0..5 {
        let netns = stage.kubelet.create_network("team", "web-0").await?;
        let sandbox = Arc::new(Sandbox::new("team", "web-0", &netns));
        let mut calls = JoinSet::new();
        for _ in 0..8 {
            let (mut kni, sandbox) = (stage.kubelet.kni(), Arc::clone(&sandbox));
            calls.spawn(async move { kni.attach_interface(sandbox.attach_request()).await });
        }
        let mut answers = Vec::new();
        while let Some(answer) = calls.join_next().await {
            answers.push(answer??.into_inner().ipconfigs);
        }
        assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{answers:?}");
        assert_eq!(stage.interfaces().await?.len(), 1);
        let mut calls = JoinSet::new();
        for index in 0..8 {
            let (kubelet, id) = (stage.kubelet.clone(), sandbox.id.clone());
            calls.spawn(async move {
                if (index + round) % 2 == 0 {
                    kubelet.detach(&id).await
                } else {
                    kubelet.delete_network(&id).await
                }
            });
        }
        while let Some(answer) = calls.join_next().await {
            answer??;
        }
        assert!(!stage.node.enter(|| std::path::Path::new(&netns).exists())?);
    }
    stage.assert_as(&before).await
}

/// How long an attach takes that is waited for.
async fn attached_within(kubelet: &Kubelet) -> Result<Duration> {
    let netns = kubelet.create_network("team", "patient").await?;
    let sandbox = Sandbox::new("team", "patient", &netns);
    let begun = Instant::now();
    kubelet.attach(&sandbox).await?;
    let took = begun.elapsed();
    kubelet.detach(&sandbox.id).await?;
    kubelet.delete_network(&sandbox.id).await?;
    Ok(took)
}

/// Begins a call on a connection of its own, which ends with the call after so many microseconds.
async fn hang_up<F: Future<Output = Result<(), Status>> + Send + 'static>(
    stage: &Watched,
    micros: u64,
    call: impl FnOnce(Kubelet) -> F,
) -> Result<()> {
    let call = tokio::spawn(call(Kubelet::connect(&stage.node, SOCKET).await?));
    tokio::time::sleep(Duration::from_micros(micros)).await;
    call.abort();
    drop(call.await);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_hang_up_leave_no_leak_and_no_half_pod() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::with("hang-ups", warm(4)).await?;
    let (kubelet, before) = (&stage.kubelet, stage.picture().await?);
    let mut dice = Dice(2_026);
    // Some calls must end before their clients hang up, and some not: the moments follow the speed of the machine.
    let mut took = attached_within(kubelet).await?;
    let (mut whole, mut rounds, enough) = (0, 0, Instant::now() + patience());
    for round in 0.. {
        let both = (1..round).contains(&whole);
        if round >= HANG_UPS && (both || Instant::now() > enough) {
            break;
        }
        rounds += 1;
        let netns = kubelet.create_network("team", "web-0").await?;
        let sandbox = Sandbox::new("team", "web-0", &netns);
        let longest = u64::try_from(took.as_micros())? * 2 + 1;
        let request = sandbox.clone();
        hang_up(&stage, dice.below(longest), async move |doomed| match round % 5 {
            0 => doomed.create_network("team", "web-0").await.map(drop),
            _ => doomed.attach(&request).await,
        })
        .await?;
        // Either nothing or everything is attached.
        let seen = kubelet.query(&sandbox.id).await?.ipconfigs;
        assert!(seen.is_empty() || seen["eth0"].ip.len() == 2, "{seen:?}");
        whole += u64::from(!seen.is_empty());
        if dice.below(3) == 0 {
            kubelet.attach(&sandbox).await?;
            let all = kubelet.query(&sandbox.id).await?.ipconfigs;
            assert!(seen.is_empty() || seen == all, "the answer changed: {seen:?}, {all:?}");
            assert!(stage.interfaces().await?.iter().all(|interface| interface.healthy));
        }
        // The cleanup of the kubelet, including cancelled calls.
        let id = sandbox.id.clone();
        hang_up(&stage, dice.below(3_000), async move |doomed| match round % 2 {
            0 => doomed.detach(&id).await,
            _ => doomed.delete_network(&id).await,
        })
        .await?;
        kubelet.detach(&sandbox.id).await?;
        kubelet.delete_network(&sandbox.id).await?;
        assert!(kubelet.query(&sandbox.id).await?.ipconfigs.is_empty());
        if round % 10 == 9 {
            took = attached_within(kubelet).await?;
        }
    }
    assert!(
        (1..rounds).contains(&whole),
        "all {rounds} calls died at the same point: {whole}"
    );
    // A namespace whose creation was not answered is removed by the name of the pod, once all earlier calls are over.
    eventually(patience(), async || {
        let unheard = DeleteNetworkRequest {
            name: "web-0".into(),
            namespace: "team".into(),
            ..Default::default()
        };
        kubelet.kni().delete_network(unheard).await?;
        let differences = stage.differences(&before).await?;
        ensure!(differences.is_empty(), "left behind:\n{}", differences.join("\n"));
        Ok(())
    })
    .await?;
    stage.assert_as(&before).await
}
