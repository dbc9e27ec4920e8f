//! Tests agents whose requests fail on the way: replies that are dropped, delays, refusals, and requests that hang.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use http::Method;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kni_integration::{
    Cluster, Pod,
    cluster::{Fault, Faults, MemberOptions, Rule, definitions, objects, patience},
    require, wait,
};
use kube::{Api, api::DeleteParams};
use serde_json::{Value, json};

use super::scene::{ask, friends, identity, prompt, serve, tenants, wait_for_silence, wait_for_truth};

/// Time until a change is applied while other requests fail, on a machine that does nothing else: a second for the
/// change, and the time that the end of answers needs to be noticed.
const SOON: Duration = Duration::from_secs(3);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_policy_is_lost_and_nothing_hangs_whatever_fails() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut scene = Scene::start().await?;

    // Replies of writes are dropped after the API server has executed them.
    let dropped = |method| Rule::of(method, "/apis/kni.dev/", Fault::DropReply);
    scene.faults().set(
        [Method::PATCH, Method::POST, Method::PUT, Method::DELETE]
            .map(dropped)
            .into(),
    );
    scene.replace_pod().await?;
    scene.recovered("replies of writes dropped").await?;

    // Writes of one kind hang; everything else continues.
    scene
        .faults()
        .set(vec![Rule::of(Method::PATCH, "/podinterfaces/", Fault::Hang)]);
    scene.replace_pod().await?;
    scene.toggle_policy(SOON).await?;
    scene.toggle_policy(SOON).await?;
    scene.recovered("writes of PodInterfaces hang").await?;

    let long = kni_integration::long();
    let codes: &[u16] = if long { &[403, 404, 409, 429, 500] } else { &[403, 409] };
    for code in codes.iter().copied() {
        let refused = |part: &str| Rule::of(Method::PATCH, part, Fault::Answer(code));
        scene
            .faults()
            .set(vec![refused("/podinterfaces/"), refused("/nodenetworks/")]);
        scene.replace_pod().await?;
        scene.toggle_policy(SOON).await?;
        scene.recovered(&format!("writes answered {code}")).await?;
    }

    // Watches end in the middle.
    scene.faults().cut();
    scene.toggle_policy(SOON).await?;
    scene.recovered("watches truncated").await?;
    // Watches that begin again are never answered.
    scene.faults().set(vec![Rule::any("watch=true", Fault::Hang)]);
    scene.faults().cut();
    wait_for_injected(scene.faults(), "hung", 5).await?;
    scene.faults().clear();
    scene.toggle_policy(Duration::from_secs(8)).await?;
    scene.recovered("watches hang").await?;

    // Definitions of other tools cannot be read: only pods that name one wait.
    scene
        .faults()
        .set(vec![Rule::any("network-attachment-definitions", Fault::Answer(403))]);
    scene.restart_agent()?;
    scene.replace_pod().await?;
    let named = json!({ "annotations": { "k8s.v1.cni.cncf.io/networks": "blue" } });
    let refused = scene.refusal("named", &named).await?;
    ensure!(refused.contains("network-attachment-definitions"), "{refused}");
    println!("{refused}");
    scene.recovered("network-attachment-definitions answered 403").await?;
    scene.cluster.running("red-team", "named").await?;
    scene.cluster.remove("red-team", &["named"]).await?;

    scene.multi_policies().await?;

    // Random faults.
    let runs = if long { 200 } else { 3 };
    let mut slowest = Duration::ZERO;
    for seed in 0..runs {
        slowest = slowest.max(scene.random_run(seed).await.with_context(|| format!("seed {seed}"))?);
    }
    println!(
        "{runs} runs with random faults: {:?}; slowest recovery {slowest:?}",
        scene.faults().injected()
    );
    Ok(())
}

/// The agent has the pauses of operation, so that the test takes as long as the API server is overloaded.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_overloaded_api_server_gets_few_requests() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    // Six wait for an answer when the refusals begin. Then three levels ask after 3, 9, 21 and 45 s at the earliest,
    // and two of them at once.
    let (time, most) = if kni_integration::long() { (60, 20) } else { (14, 14) };
    let mut cluster = Cluster::without_nodes("cluster-overload").await?;
    let options = MemberOptions {
        proxied: true,
        ..MemberOptions::default()
    };
    cluster.add_node(options).await?;
    tenants(&cluster).await?;
    // So many reports are due when the refusals begin.
    let pods: Vec<Value> = (0..8)
        .map(|number| objects::pod("red-team", &format!("first-{number}"), "node1"))
        .collect();
    cluster.run(&pods).await?;
    let faults = || &cluster.nodes[0].proxy.as_ref().expect("the options demand one").faults;
    faults().set(vec![Rule::any("", Fault::Answer(429))]);
    faults().cut();
    tokio::time::sleep(Duration::from_secs(time)).await;
    let refused = faults().failed();
    faults().clear();
    ensure!(
        (3..=most).contains(&refused.len()),
        "{} requests in {time} s: {refused:#?}",
        refused.len()
    );
    println!("{} requests in {time} s: {refused:#?}", refused.len());
    // The longest pauses of the client and of the watches.
    tokio::time::sleep(Duration::from_secs(time)).await;
    cluster.run(&[objects::pod("red-team", "second", "node1")]).await?;
    Ok(())
}

/// One node behind the proxy, with a server in the network red that only friends reach while the policy exists.
struct Scene {
    cluster: Cluster,
    pods: Vec<Pod>,
    closed: bool,
    replaced: usize,
    _server: kni_integration::traffic::Servers,
}

impl Scene {
    async fn start() -> Result<Self> {
        let mut cluster = Cluster::without_nodes("cluster-faults").await?;
        cluster.add_node(MemberOptions::with_faults()).await?;
        tenants(&cluster).await?;
        let labels = |key: &str, value: &str| json!({ "labels": { key: value } });
        let pods = cluster
            .run(&[
                objects::pod_with("red-team", "server", "node1", &labels("app", "server")),
                objects::pod_with("red-team", "friend", "node1", &labels("friend", "yes")),
                objects::pod("red-team", "stranger", "node1"),
                objects::pod("red-team", "replaced", "node1"),
            ])
            .await?;
        let server = serve(&pods[0])?;
        wait_for_truth(&cluster).await?;
        Ok(Self {
            cluster,
            pods,
            closed: false,
            replaced: 0,
            _server: server,
        })
    }

    fn faults(&self) -> &Faults {
        let proxy = self.cluster.nodes[0].proxy.as_ref();
        &proxy.expect("the options demand a proxy").faults
    }

    /// Creates or deletes the policy and waits until it is applied.
    async fn toggle_policy(&mut self, patience: Duration) -> Result<()> {
        if self.closed {
            self.cluster.delete(&friends()).await?;
        } else {
            self.cluster.apply(&[friends()]).await?;
        }
        self.closed = !self.closed;
        self.applied(patience).await.map(drop)
    }

    /// Waits until the policy is applied, or not, as desired.
    async fn applied(&self, patience: Duration) -> Result<Duration> {
        let answers = |from: &Pod| {
            ask(from, &self.pods[0])
                .into_iter()
                .all(|answer| answer == Ok(identity(&self.pods[0])))
        };
        let start = Instant::now();
        if self.closed {
            wait_for_silence(&self.pods[2], &self.pods[0]).await?;
        } else {
            wait::until("the stranger reaches the server", patience, async || {
                Ok(answers(&self.pods[2]))
            })
            .await?;
        }
        let took = start.elapsed();
        let limit = patience + 2 * prompt(&self.cluster).await?;
        ensure!(took < limit, "it took {took:?}, not {limit:?}");
        ensure!(answers(&self.pods[1]), "the friend does not reach the server");
        Ok(start.elapsed())
    }

    /// Removes a pod and runs another one of the same name.
    async fn replace_pod(&mut self) -> Result<()> {
        self.cluster.remove("red-team", &["replaced"]).await?;
        self.cluster
            .run(&[objects::pod("red-team", "replaced", "node1")])
            .await?;
        self.replaced += 1;
        Ok(())
    }

    /// Ends the faults, and waits until the objects are right.
    async fn recovered(&self, what: &str) -> Result<Duration> {
        self.faults().clear();
        let took = wait_for_truth(&self.cluster).await.with_context(|| what.to_owned())?;
        println!("{what}: right {took:?} after the faults");
        Ok(took)
    }

    fn restart_agent(&mut self) -> Result<()> {
        let agent = &mut self.cluster.nodes[0].agent;
        agent.kill9()?;
        agent.restart()
    }

    /// Creates a pod, and waits until the agent refuses it.
    async fn refusal(&self, name: &str, metadata: &Value) -> Result<String> {
        self.cluster
            .create_pods(&[objects::pod_with("red-team", name, "node1", metadata)])
            .await?;
        let pod = format!("red-team/{name}");
        wait::until_some("the agent refuses the pod", patience(), async || {
            let mut refusals = self.cluster.nodes[0].kubelet.refusals().into_iter();
            Ok(refusals
                .find(|refusal| refusal.pod == pod)
                .map(|refusal| refusal.to_string()))
        })
        .await
    }

    /// The version of an optional kind is not guessed, and its absence removes nothing at once.
    async fn multi_policies(&mut self) -> Result<()> {
        self.cluster.delete(&friends()).await?;
        self.closed = false;
        self.applied(SOON).await?;
        self.remove_multi_policies().await?;
        definitions::apply(&self.cluster.client, vec![definitions::multi_network_policy("v1beta2")]).await?;
        let closed = json!({
            "apiVersion": "k8s.cni.cncf.io/v1beta2", "kind": "MultiNetworkPolicy",
            "metadata": {
                "namespace": "red-team", "name": "friends",
                "annotations": { "k8s.v1.cni.cncf.io/policy-for": "red" },
            },
            "spec": friends()["spec"],
        });
        wait::until("the API server serves v1beta2", patience(), async || {
            Ok(self.cluster.apply(std::slice::from_ref(&closed)).await.is_ok())
        })
        .await?;
        self.closed = true;
        self.applied(patience()).await?;
        println!("MultiNetworkPolicy of v1beta2 is applied");

        // An agent that starts while the API server does not answer.
        self.faults()
            .set(vec![Rule::any("/apis/k8s.cni.cncf.io/", Fault::Answer(500))]);
        self.restart_agent()?;
        wait_for_injected(self.faults(), "refused", 3).await?;
        self.applied(SOON).await?;
        self.faults().clear();
        self.replace_pod().await?;
        self.applied(SOON).await?;
        self.recovered("versions of MultiNetworkPolicy answered 500 at the start")
            .await?;

        // The API server answers that there is no such kind, though there was.
        self.faults()
            .set(vec![Rule::any("/apis/k8s.cni.cncf.io/", Fault::Answer(404))]);
        self.faults().cut();
        wait::until("the node reports the absence", patience(), async || {
            let nodes: Api<kni_api::NodeNetwork> = Api::all(self.cluster.client.clone());
            let status = nodes.get("node1").await?.status.context("no status")?;
            let degraded = status.conditions.iter().find(|condition| condition.type_ == "Degraded");
            Ok(degraded.is_some_and(|degraded| degraded.message.contains("no longer serves")))
        })
        .await?;
        self.applied(SOON).await?;
        self.replace_pod().await?;
        self.recovered("MultiNetworkPolicy answered 404").await?;
        self.applied(SOON).await?;
        self.cluster.delete(&closed).await?;
        self.closed = false;
        self.applied(patience()).await?;
        self.remove_multi_policies().await
    }

    /// Deletes the definition: a version of which objects were stored cannot be taken out of it.
    async fn remove_multi_policies(&self) -> Result<()> {
        let definitions: Api<CustomResourceDefinition> = Api::all(self.cluster.client.clone());
        let name = "multi-networkpolicies.k8s.cni.cncf.io";
        definitions.delete(name, &DeleteParams::default()).await?;
        wait::until("the definition is gone", patience(), async || {
            Ok(definitions.get_opt(name).await?.is_none())
        })
        .await
        .map(drop)
    }

    /// Changes policies and pods while requests fail at random; returns the time of the recovery.
    async fn random_run(&mut self, seed: u64) -> Result<Duration> {
        self.faults().randomize(seed, 0.3);
        if seed.is_multiple_of(3) {
            self.faults().cut();
        }
        let start = Instant::now();
        if self.closed {
            self.cluster.delete(&friends()).await?;
        } else {
            self.cluster.apply(&[friends()]).await?;
        }
        self.closed = !self.closed;
        // Retried by the kubelet until it succeeds; that needs no request of the agent.
        self.replace_pod().await?;
        if seed % 5 == 4 {
            self.restart_agent()?;
        }
        tokio::time::sleep(Duration::from_millis(500).saturating_sub(start.elapsed())).await;
        self.faults().clear();
        let recovering = Instant::now();
        self.applied(patience()).await?;
        wait_for_truth(&self.cluster).await?;
        Ok(recovering.elapsed())
    }
}

/// Waits until this many more requests failed in a way.
async fn wait_for_injected(faults: &Faults, how: &str, more: usize) -> Result<()> {
    let count = || faults.injected().get(how).copied().unwrap_or(0);
    let before = count();
    wait::until("requests fail", patience(), async || Ok(count() >= before + more))
        .await
        .map(drop)
}
