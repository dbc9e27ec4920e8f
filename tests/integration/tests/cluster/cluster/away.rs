//! Tests an outage of the API server.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Cluster,
    cluster::{HELD, objects, patience},
    kubelet::Sandbox,
    require,
    traffic::Stream,
    wait,
};
use serde_json::json;
use tonic::Code;

use super::scene::{
    PORT, address, assert_reached, assert_silent, identity, serve, tenants, wait_for_silence, wait_for_truth,
};

const POD_NAMES: [&str; 4] = ["late-0", "late-1", "late-2", "late-3"];

/// Duration of the outage: a minute in long tests.
fn absence() -> Duration {
    let long = kni_integration::long();
    Duration::from_secs(if long { 60 } else { 10 })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[expect(clippy::too_many_lines, reason = "before, during and after an absence, in order")]
async fn known_pods_are_attached_and_policed_without_the_api_server() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::start("cluster-away", 1).await?;
    tenants(&cluster).await?;
    let open_to_friends = json!({
        "podSelector": {},
        "policyTypes": ["Ingress"],
        "ingress": [{ "from": [{ "podSelector": { "matchLabels": { "friend": "yes" } } }] }],
    });
    cluster
        .apply(&[objects::policy("red-team", "friends", &open_to_friends)])
        .await?;
    let friend = json!({ "labels": { "friend": "yes", HELD: "yes" } });
    let stranger = json!({ "labels": { HELD: "yes" } });
    let pods = cluster
        .run(&[
            objects::pod_with("red-team", "friend", "node1", &friend),
            objects::pod("red-team", "stranger", "node1"),
            objects::pod("red-team", "server", "node1"),
        ])
        .await?;
    let server = &pods[2];
    let _server = serve(server)?;
    wait_for_silence(&pods[1], server).await?;
    assert_reached(&pods[0], server);

    // Known to the agent, but not attached yet. The agent processes pods in order, so the last pod runs only after the
    // agent knows the earlier ones.
    cluster.nodes[0].kubelet.hold();
    for (number, name) in POD_NAMES.iter().enumerate() {
        let labels = if number % 2 == 0 { &friend } else { &stranger };
        cluster
            .create_pods(&[objects::pod_with("red-team", name, "node1", labels)])
            .await?;
    }
    cluster.run(&[objects::pod("red-team", "last", "node1")]).await?;
    wait_for_truth(&cluster).await?;
    let stream = Stream::udp(&pods[0].inside, (address(server, true), PORT).into())?;
    cluster.kill_api_server()?;
    let gone = Instant::now();

    cluster.nodes[0].kubelet.release();
    let mut late = Vec::new();
    for name in POD_NAMES {
        let what = format!("pod {name} is attached without the API server");
        let pod = wait::until_some(&what, patience(), async || {
            Ok(cluster.nodes[0].kubelet.pod("red-team", name))
        });
        late.push(pod.await.with_context(|| cluster.refusals())?);
    }
    println!(
        "{} pods were attached {:?} after the API server went",
        late.len(),
        gone.elapsed()
    );
    let servers: Result<Vec<_>> = late.iter().map(serve).collect();
    let _servers = servers?;
    for (number, pod) in late.iter().enumerate() {
        if number % 2 == 0 {
            assert_reached(pod, server);
        } else {
            assert_silent(pod, server);
        }
    }
    // Policies apply to these pods, too.
    assert_reached(&pods[0], &late[0]);
    assert_silent(&pods[1], &late[0]);
    tokio::time::sleep(absence().saturating_sub(gone.elapsed())).await;
    assert_reached(&pods[0], server);
    assert_silent(&pods[1], server);

    cluster.start_api_server()?;
    println!("the API server was away for {:?}", gone.elapsed());
    for name in POD_NAMES {
        cluster.running("red-team", name).await?;
    }
    let took = wait_for_truth(&cluster).await?;
    println!("objects caught up {took:?} after the pods were told to run");
    stream.stop().assert_whole(&identity(server));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_agent_that_starts_without_the_api_server_keeps_what_it_has() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::start("cluster-restart", 1).await?;
    tenants(&cluster).await?;
    let pods = cluster
        .run(&[
            objects::pod("red-team", "a", "node1"),
            objects::pod("red-team", "b", "node1"),
            objects::pod("red-team", "c", "node1"),
        ])
        .await?;
    let _server = serve(&pods[1])?;
    let stream = Stream::udp(&pods[0].inside, (address(&pods[1], true), PORT).into())?;
    cluster.kill_api_server()?;
    cluster.nodes[0].agent.kill9()?;
    cluster.nodes[0].agent.restart()?;

    let kni = cluster.nodes[0].kubelet.kni().clone();
    let told = wait::until_some("the agent answers", patience(), async || {
        Ok(Some(kni.query(&pods[0].id).await?))
    });
    let told = told.await?.ipconfigs.remove("eth0").context("no eth0")?.ip;
    let known: Vec<String> = pods[0].ips().iter().map(ToString::to_string).collect();
    ensure!(told == known, "{told:?} instead of {known:?}");

    // No pod can be attached, and the runtime gets an error and retries.
    let refused = match kni.create_network("red-team", "new").await {
        Ok(netns) => {
            let sandbox = Sandbox::new("red-team", "new", &netns);
            let refused = kni.attach(&sandbox).await;
            kni.detach(&sandbox.id).await?;
            kni.delete_network(&sandbox.id).await?;
            refused
        }
        Err(status) => Err(status),
    };
    let status = refused.err().context("a pod that nobody knows was attached")?;
    ensure!(status.code() == Code::Unavailable, "{status:?}");

    kni.detach(&pods[2].id).await?;
    kni.delete_network(&pods[2].id).await?;
    ensure!(kni.query(&pods[2].id).await?.ipconfigs.is_empty(), "it is detached");
    assert_reached(&pods[0], &pods[1]);

    cluster.start_api_server()?;
    cluster.remove("red-team", &["c"]).await?;
    cluster.run(&[objects::pod("red-team", "new", "node1")]).await?;
    wait_for_truth(&cluster).await?;
    stream.stop().assert_whole(&identity(&pods[1]));
    Ok(())
}
