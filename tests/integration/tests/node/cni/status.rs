use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    os::unix::net::UnixListener,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Manifest, agent::MANIFESTS, eventually, require};
use kni_proto::kni::QueryNodeNetworksRequest;
use serde_json::json;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use super::scene::{Call, Outcome, Scene, patience};

/// How long an answer without an agent may take: runtimes wait for it every few seconds.
const QUICK: Duration = Duration::from_secs(1);

/// Checks that an answer was quick, beside one of the same moment that needs no agent.
fn assert_quick(scene: &Scene, outcome: &Outcome) -> Result<()> {
    let control = scene.call("VERSION", &Call::new("", ""))?.took;
    assert!(
        outcome.took < QUICK + control * 10,
        "{outcome:?}, VERSION after {control:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn b10_status_says_quickly_that_no_agent_serves() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut scene = Scene::new("absent").await?;
    let call = Call::new("", "");
    let call = Call {
        netns: String::new(),
        ifname: String::new(),
        ..call
    };
    scene.call("STATUS", &call)?.assert_silent_success();
    scene.stage.agent.kill9()?;
    // The file of the socket exists without a listener.
    let socket = "/run/kni/kni.sock";
    assert!(scene.stage.node.enter(|| fs::exists(socket))??);
    let refuses = scene.call("STATUS", &call)?;
    let error = refuses.error(50);
    assert!(error["msg"].as_str().is_some_and(|msg| msg.contains(socket)), "{error}");
    assert_quick(&scene, &refuses)?;
    scene.stage.node.enter(|| fs::remove_file(socket))??;
    let absent = scene.call("STATUS", &call)?;
    absent.error(50);
    assert_quick(&scene, &absent)?;
    // A listener that never answers.
    let silent = scene.stage.node.enter(|| UnixListener::bind("/run/silent.sock"))??;
    let mute = scene.call("STATUS", &call.clone().with("socket", json!("/run/silent.sock")))?;
    mute.error(50);
    assert_quick(&scene, &mute)?;
    drop(silent);
    scene.stage.restart().await?;
    scene.call("STATUS", &call)?.assert_silent_success();
    Ok(())
}

/// Whether the node is ready, by each way of asking: the answers must be the same.
#[derive(Debug)]
struct Said([(&'static str, bool); 5]);

impl Said {
    async fn of(scene: &Scene) -> Result<Self> {
        let kubelet = &scene.stage.kubelet;
        let networks = kubelet.kni().query_node_networks(QueryNodeNetworksRequest {}).await?;
        let mut health = HealthClient::new(kubelet.channel());
        let checked = health.check(HealthCheckRequest { service: String::new() }).await?;
        let page = scene.stage.node.enter(|| {
            let mut stream = TcpStream::connect("127.0.0.1:9630")?;
            stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
            let mut page = String::new();
            stream.read_to_string(&mut page).map(|_| page)
        })??;
        let call = Call {
            netns: String::new(),
            ifname: String::new(),
            ..Call::new("", "")
        };
        let first = networks.into_inner().networks.into_iter().next();
        Ok(Self([
            ("QueryNodeNetworks", first.is_some_and(|first| first.ready)),
            ("GetStatus", scene.stage.status().await?.ready),
            ("STATUS of CNI", scene.call("STATUS", &call)?.success),
            (
                "gRPC health",
                checked.into_inner().status == i32::from(ServingStatus::Serving),
            ),
            ("/readyz", page.starts_with("HTTP/1.1 200")),
        ]))
    }

    /// Waits until all say the same: health is reported some times a second.
    async fn agrees(scene: &Scene, state: &str, ready: bool) -> Result<()> {
        let said = eventually(patience(), async || {
            let said = Self::of(scene).await?;
            ensure!(said.0.iter().all(|(_, said)| *said == ready), "{said:?}");
            Ok(())
        });
        said.await.with_context(|| format!("{state}, ready is {ready}"))?;
        let reasons = scene.stage.status().await?.reasons;
        println!("{state:40} all say ready={ready} {}", reasons.join("; "));
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b11_only_faults_of_the_whole_node_make_it_not_ready_and_all_say_the_same() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    // Five addresses for pods; free IPv6 addresses alone do not suffice.
    let small = Manifest::default_network("small", &["10.50.0.0/29", "fd50::/64"]);
    let blue = Manifest::network("blue", &["10.51.0.0/29"]);
    let scene = Scene::with("empty", vec![small.clone(), blue]).await?;
    Said::agrees(&scene, "addresses are free", true).await?;
    let mut calls = Vec::new();
    for index in 0..5 {
        let name = format!("pod{index}");
        scene.netns(&name)?;
        let call = Call::new(&name, &name).annotated(&json!({"k8s.v1.cni.cncf.io/networks": "blue"}));
        scene.add(&call)?;
        calls.push(call);
    }
    // The running pods are healthy: a node that is not ready would evict them.
    Said::agrees(&scene, "no network has a free address", true).await?;
    let networks = ["small", "blue"].map(|name| scene.network(name));
    for network in futures::future::try_join_all(networks).await? {
        ensure!(
            network.ready && network.extradata["addresses_exhausted"] == "IPv4",
            "{network:?}"
        );
    }
    scene
        .call("STATUS", &calls[0].clone().with("network", json!("blue")))?
        .assert_silent_success();
    scene.netns("late")?;
    let late = Call::new("late", "late");
    let refused = scene.call("ADD", &late)?.error(102);
    let message = refused["msg"].as_str().unwrap_or_default();
    println!("{message}");
    for part in [
        "pod team/late",
        "network small",
        "IPv4",
        "of 5 on this node, 0 are free",
        "spec.subnets",
    ] {
        assert!(message.contains(part), "{part} is missing in {message}");
    }
    // The runtime repeats the call, which succeeds when another pod has gone.
    scene.del(&calls[0])?;
    scene.add(&late)?;
    for call in &calls[1..] {
        scene.del(call)?;
    }
    scene.del(&late)?;
    // A configuration that names a network that does not exist.
    scene
        .call("STATUS", &calls[0].clone().with("network", json!("red")))?
        .error(50);
    let apply = |manifest: Manifest| Manifest::apply(&[manifest], &scene.stage.node);
    apply(small.clone().spec("enabled: false"))?;
    Said::agrees(&scene, "the default network is disabled", false).await?;
    apply(small)?;
    Said::agrees(&scene, "it is enabled", true).await?;
    let file = format!("{MANIFESTS}/small.yaml");
    scene.stage.node.enter(|| fs::remove_file(file))??;
    Said::agrees(&scene, "there is no default network", false).await
}
