//! Tests two namespaces that ask for far more rows of the service tables than there are: Services of a third one work
//! and change as without them.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Pod, eventually, patience, require, traffic::Stream};
use serde_json::{Value, json};

use super::{
    objects::{State, networks, served, service},
    scene::{FAMILIES, Scene, assert_answering, front},
};

const WEB: u8 = 90;
const ATTACKERS: [&str; 2] = ["first", "zebra"];
/// Rows of `SERVICES`; `BACKENDS` has four times as many.
const SIZE: &str = "256";

/// Ten Services of 100 ports, two of them with 40 hosts outside as endpoints: 1000 rows of `SERVICES`, 800 of
/// `BACKENDS`. `round` decides which hosts these are.
fn attack(namespace: &str, number: usize, round: u8) -> Vec<Value> {
    let ports: Vec<Value> = (1..=100)
        .map(|port| json!({"name": format!("p{port}"), "port": port}))
        .collect();
    let hosts = (1..=40).map(|last| {
        json!({
            "addresses": [format!("192.0.2.{}", last + 40 * (round % 2))],
            "conditions": {"ready": true, "serving": true, "terminating": false},
        })
    });
    let hosts: Vec<Value> = hosts.collect();
    let services = (1..=10).flat_map(|last| {
        let name = format!("s{last}");
        let ip = format!("10.96.{}.{last}", number + 1);
        [
            json!({
                "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": namespace, "name": name},
                "spec": {"clusterIP": ip, "clusterIPs": [ip], "ports": ports},
            }),
            json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
                "metadata": {
                    "namespace": namespace, "name": format!("{name}-v4"),
                    "labels": {"kubernetes.io/service-name": name},
                },
                "endpoints": hosts, "ports": ports[..2],
            }),
        ]
    });
    services.collect()
}

/// The victim's Service, and the attack of those namespaces.
fn objects(pods: &[&Pod], attackers: &[&str], round: u8) -> Vec<Value> {
    let pods: Vec<_> = pods.iter().map(|&pod| (pod, State::Ready)).collect();
    let mut objects = served(service("web", WEB), &pods);
    let attacks = attackers.iter().enumerate();
    objects.extend(attacks.flat_map(|(number, namespace)| attack(namespace, number, round)));
    objects
}

/// Replaces the victim's backend several times; returns the longest time until clients reach the new one.
async fn changes(scene: &mut Scene, client: &Pod, pods: [(&Pod, &str); 2], attackers: &[&str]) -> Result<Duration> {
    let mut longest = Duration::ZERO;
    for round in 0..6 {
        let (pod, name) = pods[usize::from(round % 2)];
        let begin = Instant::now();
        scene.write(&objects(&[pod], attackers, round))?;
        eventually(patience(), async || {
            FAMILIES
                .into_iter()
                .try_for_each(|v4| assert_answering(&client.inside, front(v4, WEB), &[name]))
        })
        .await
        .with_context(|| format!("round {round} beside {attackers:?}"))?;
        longest = longest.max(begin.elapsed());
    }
    Ok(longest)
}

#[tokio::test(flavor = "multi_thread")]
async fn namespaces_over_their_share_stop_no_service_of_others() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::with("shares", networks(), &["--max-services", SIZE]).await?;
    let (a, b) = (scene.backend("a").await?, scene.backend("b").await?);
    let client = scene.stage.pod("client").await?;
    let pods = [(&a.pod, "a"), (&b.pod, "b")];
    let alone = changes(&mut scene, &client, pods, &[]).await?;
    scene.apply(&objects(&[&a.pod], &[], 0)).await?;
    let streams = FAMILIES.map(|v4| Stream::tcp(&client.inside, front(v4, WEB)));
    let streams = streams.into_iter().collect::<Result<Vec<_>>>()?;

    scene.apply(&objects(&[&a.pod], &ATTACKERS, 0)).await?;
    let listed = scene.list().await?;
    for namespace in ATTACKERS {
        let problem = format!("the Services of namespace {namespace} need 1000 rows of table SERVICES");
        let refused = listed.iter().filter(|row| row.problem.contains(&problem)).count();
        ensure!(refused > 0, "the Services of {namespace} are not refused: {listed:?}");
    }
    let status = scene.stage.status().await?;
    let named = |namespace| status.reasons.iter().any(|reason| reason.contains(namespace));
    ensure!(status.ready && ATTACKERS.into_iter().all(named), "{status:?}");
    // Without shares no change would be applied, at any time.
    let beside = changes(&mut scene, &client, pods, &ATTACKERS).await?;
    println!("slowest of 6 changes: {alone:?} alone, {beside:?} beside two attackers");

    // The same after a restart.
    scene.stage.agent.kill9()?;
    scene.stage.agent.restart()?;
    changes(&mut scene, &client, pods, &ATTACKERS).await?;
    for stream in streams {
        stream.stop().assert_whole("a");
    }
    scene.apply(&objects(&[&a.pod], &[], 0)).await?;
    eventually(patience(), async || {
        let status = scene.stage.status().await?;
        ensure!(status.ready && status.reasons.is_empty(), "{status:?}");
        Ok(())
    })
    .await
}
