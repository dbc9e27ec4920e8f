//! Tests that an address or a block has no new owner before the time of rest has passed since the API server has
//! confirmed that no report lists the old one: also when the agent or the node restarts, and when writes or their
//! replies are lost. The agent of the test has a shorter time of rest than the usual 10 s, except in long tests.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use http::Method;
use kni_api::{AddressBlock, NetworkMembers};
use kni_integration::{
    Cluster, Pod,
    cluster::{Fault, Faults, MemberOptions, Rule, objects, patience},
    long, require, wait,
};
use kube::{Api, api::ListParams};
use serde_json::{Value, json};

use super::scene::{tenants, wait_for_condition, wait_for_truth};

/// How long an address rests, in seconds.
fn rest_seconds() -> u64 {
    if long() { 10 } else { 4 }
}

/// The agent looks for empty blocks once a second.
const ROUNDS: Duration = Duration::from_secs(3);

fn rest() -> Duration {
    Duration::from_secs(rest_seconds())
}

/// The addresses of the network, but for its own, the gateway and the broadcast address.
const ADDRESSES: usize = 5;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_address_has_no_new_owner_while_others_may_know_the_old_one() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut scene = Scene::start().await?;
    scene.an_address_rests().await?;
    scene.a_lost_reply_confirms_nothing().await?;
    scene.a_block_rests_too().await?;
    // Each rest takes its time.
    if long() {
        scene.a_restart_does_not_shorten_it().await?;
        scene.a_restart_before_the_write_confirms_nothing().await?;
        scene.a_write_that_fails_confirms_nothing().await?;
    }
    scene.a_reboot_does_not_shorten_it().await?;
    wait_for_truth(&scene.cluster).await.map(drop)
}

/// One node behind a proxy, with a network that its pods fill.
struct Scene {
    cluster: Cluster,
    /// Running pods, the oldest first.
    pods: Vec<Pod>,
    made: usize,
}

impl Scene {
    async fn start() -> Result<Self> {
        let mut cluster = Cluster::without_nodes("cluster-rests").await?;
        let mut options = MemberOptions::with_faults();
        options
            .args
            .extend(["--test-address-rest".to_owned(), rest_seconds().to_string()]);
        cluster.add_node(options).await?;
        tenants(&cluster).await?;
        let more = |name: &str| {
            json!({
                "namespaceSelector": { "matchLabels": { "tenant": name } },
                "perNodePrefix": { "ipv4": 29 },
            })
        };
        for name in ["narrow", "brief"] {
            let network = objects::network(name, &["10.61.0.0/29"], &more(name));
            let namespace = objects::namespace(name, &json!({ "tenant": name }));
            cluster.apply(&[network, namespace]).await?;
            wait_for_condition(&cluster, name, "Programmed", true).await?;
        }
        let mut scene = Self {
            cluster,
            pods: Vec::new(),
            made: 0,
        };
        for _ in 0..ADDRESSES {
            let pod = scene.next_pod();
            scene.pods.extend(scene.cluster.run(&[pod]).await?);
        }
        Ok(scene)
    }

    fn faults(&self) -> &Faults {
        let proxy = self.cluster.nodes[0].proxy.as_ref();
        &proxy.expect("the options demand a proxy").faults
    }

    fn next_pod(&mut self) -> Value {
        self.made += 1;
        objects::pod("narrow", &format!("p{}", self.made), "node1")
    }

    /// Replaces the oldest pod by another one: returns both, and when the new one was attached.
    async fn replace(&mut self) -> Result<(Pod, String)> {
        let old = self.pods.remove(0);
        self.cluster.remove("narrow", &[&old.name]).await?;
        let new = self.next_pod();
        let name = new["metadata"]["name"].as_str().context("name")?.to_owned();
        self.cluster.create_pods(&[new]).await?;
        Ok((old, name))
    }

    /// Waits until the API server lists no address of a pod. Returns a time before it began to do so: that of the
    /// request of the last list that still had one, or of the first request.
    async fn withdrawn(&self, pod: &Pod) -> Result<Instant> {
        let last = Cell::new(Instant::now());
        wait::until("no report lists the pod", patience(), async || {
            let asked = Instant::now();
            let is_listed = self.is_listed(pod).await?;
            if is_listed {
                last.set(asked);
            }
            Ok(!is_listed)
        })
        .await?;
        Ok(last.get())
    }

    async fn is_listed(&self, pod: &Pod) -> Result<bool> {
        let api: Api<NetworkMembers> = Api::all(self.cluster.client.clone());
        let listed = api.list(&ListParams::default()).await?;
        let members = listed.items.into_iter().flat_map(|object| object.spec.members);
        let addresses: Vec<String> = pod.ips().iter().map(ToString::to_string).collect();
        let mut found = members.filter(|member| member.namespace == pod.namespace);
        Ok(found.any(|member| member.addresses.iter().any(|address| addresses.contains(address))))
    }

    /// Waits until the new pod has the old one's address, but not before a rest after `withdrawn`.
    async fn has_it_after(&mut self, old: &Pod, new: &str, withdrawn: Instant) -> Result<()> {
        let pod = self.cluster.running("narrow", new).await?;
        let after = withdrawn.elapsed();
        println!("{new} has the address of {} after {after:?}", old.name);
        ensure!(pod.ips() == old.ips(), "{:?}, not {:?}", pod.ips(), old.ips());
        ensure!(after >= rest(), "{new} has it after {after:?}");
        self.pods.push(pod);
        Ok(())
    }

    /// The refusals of a pod until now.
    fn refusals(&self, pod: &str) -> Vec<String> {
        let refusals = self.cluster.nodes[0].kubelet.refusals().into_iter();
        let of_pod = refusals.filter(|refusal| refusal.pod == format!("narrow/{pod}"));
        of_pod.map(|refusal| refusal.to_string()).collect()
    }

    /// Waits for as long as an address rests, and then until the new pod is refused once more: nothing was confirmed.
    /// Returns that refusal.
    async fn waits_on(&self, new: &str) -> Result<String> {
        tokio::time::sleep(rest()).await;
        let before = self.refusals(new).len();
        let told = wait::until_some("the pod is refused after the rest", patience(), async || {
            let running = self.cluster.nodes[0].kubelet.reported("narrow", new).is_some();
            let mut refusals = self.refusals(new).into_iter();
            // The next one may have begun before the end of the rest.
            Ok(running.then(String::new).or_else(|| refusals.nth(before + 1)))
        });
        let told = told.await?;
        ensure!(
            self.cluster.nodes[0].kubelet.reported("narrow", new).is_none(),
            "{new} runs although nothing was confirmed"
        );
        println!("{told}");
        Ok(told)
    }

    async fn an_address_rests(&mut self) -> Result<()> {
        let (old, new) = self.replace().await?;
        let withdrawn = self.withdrawn(&old).await?;
        let told = wait::until_some("the attach names the time", patience(), async || {
            let told = self.refusals(&new).into_iter();
            Ok(told.rev().find(|told| told.contains("the next one is free in ")))
        })
        .await?;
        println!("{told}");
        ensure!(told.contains("network narrow") && told.contains("narrow/"), "{told}");
        self.has_it_after(&old, &new, withdrawn).await
    }

    async fn a_restart_does_not_shorten_it(&mut self) -> Result<()> {
        let (old, new) = self.replace().await?;
        let withdrawn = self.withdrawn(&old).await?;
        tokio::time::sleep(rest() / 2).await;
        self.cluster.nodes[0].agent.kill9()?;
        self.cluster.nodes[0].agent.restart()?;
        self.has_it_after(&old, &new, withdrawn).await
    }

    /// Without the API server's answer the next process waits as this one does.
    async fn a_restart_before_the_write_confirms_nothing(&mut self) -> Result<()> {
        self.faults()
            .set(vec![Rule::of(Method::PATCH, "/networkmembers/", Fault::Answer(500))]);
        let (old, new) = self.replace().await?;
        self.cluster.nodes[0].agent.kill9()?;
        self.cluster.nodes[0].agent.restart()?;
        self.waits_on(&new).await?;
        self.faults().clear();
        let withdrawn = self.withdrawn(&old).await?;
        self.has_it_after(&old, &new, withdrawn).await
    }

    /// The write had its effect, but the agent does not know.
    async fn a_lost_reply_confirms_nothing(&mut self) -> Result<()> {
        self.faults().set(vec![
            Rule::of(Method::PATCH, "/networkmembers/", Fault::DropReply),
            Rule::of(Method::GET, "/networkmembers/", Fault::Answer(500)),
        ]);
        let (old, new) = self.replace().await?;
        self.withdrawn(&old).await?;
        let told = self.waits_on(&new).await?;
        ensure!(told.contains("after the API server has confirmed"), "{told}");
        let cleared = Instant::now();
        self.faults().clear();
        self.has_it_after(&old, &new, cleared).await
    }

    async fn a_write_that_fails_confirms_nothing(&mut self) -> Result<()> {
        self.faults()
            .set(vec![Rule::of(Method::PATCH, "/networkmembers/", Fault::Hang)]);
        let (old, new) = self.replace().await?;
        self.waits_on(&new).await?;
        ensure!(self.is_listed(&old).await?, "the write hangs");
        self.faults().clear();
        let withdrawn = self.withdrawn(&old).await?;
        self.has_it_after(&old, &new, withdrawn).await
    }

    /// Of the node nothing is left, neither interfaces nor records; the API server still has its reports.
    async fn a_reboot_does_not_shorten_it(&mut self) -> Result<()> {
        self.cluster.nodes[0].agent.kill9()?;
        let cleaned = self.cluster.nodes[0].agent.cleanup()?;
        ensure!(cleaned.status.success(), "{cleaned:?}");
        self.faults().set(vec![
            Rule::of(Method::PATCH, "/networkmembers/", Fault::Answer(500)),
            Rule::of(Method::DELETE, "/networkmembers/", Fault::Answer(500)),
        ]);
        self.cluster.nodes[0].agent.restart()?;
        let pod = self.next_pod();
        let name = pod["metadata"]["name"].as_str().context("name")?.to_owned();
        self.cluster.create_pods(&[pod]).await?;
        let told = self.waits_on(&name).await?;
        ensure!(told.contains("after the API server has confirmed"), "{told}");
        let begin = Instant::now();
        self.faults().clear();
        let pod = self.cluster.running("narrow", &name).await?;
        let after = begin.elapsed();
        println!("{name} has an address of before the reboot after {after:?}");
        ensure!(after >= rest(), "{after:?}");
        // Those of before have ended with the boot.
        let before: Vec<&str> = self.pods.iter().map(|pod| pod.name.as_str()).collect();
        self.cluster.remove("narrow", &before).await?;
        self.pods = vec![pod];
        Ok(())
    }

    /// A block is released only after its last address has rested.
    async fn a_block_rests_too(&mut self) -> Result<()> {
        let pod = self.cluster.run(&[objects::pod("brief", "only", "node1")]).await?;
        let pod = pod.into_iter().next().context("no pod")?;
        wait::until("it is reported", patience(), async || self.is_listed(&pod).await).await?;
        self.faults().set(vec![
            Rule::of(Method::PATCH, "/networkmembers/", Fault::Answer(500)),
            Rule::of(Method::DELETE, "/networkmembers/", Fault::Answer(500)),
        ]);
        self.cluster.remove("brief", &["only"]).await?;
        // Longer than an empty block stays otherwise, with the rest and some rounds.
        tokio::time::sleep(2 * rest() + ROUNDS).await;
        ensure!(self.has_block("brief").await?, "the pod is still listed");
        self.faults().clear();
        let withdrawn = self.withdrawn(&pod).await?;
        wait::until("the block is released", patience(), async || {
            Ok(!self.has_block("brief").await?)
        })
        .await?;
        let after = withdrawn.elapsed();
        println!("the block is released after {after:?}");
        ensure!(after >= rest(), "{after:?}");
        Ok(())
    }

    async fn has_block(&self, network: &str) -> Result<bool> {
        let api: Api<AddressBlock> = Api::all(self.cluster.client.clone());
        let own = ListParams::default().fields(&format!("spec.network={network}"));
        let listed = api.list(&own).await?;
        Ok(listed
            .items
            .iter()
            .any(|block| block.metadata.deletion_timestamp.is_none()))
    }
}
