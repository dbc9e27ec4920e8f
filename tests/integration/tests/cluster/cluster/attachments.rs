//! Tests additional interfaces of running pods: added and removed under traffic, without leftovers.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result};
use kni_api::{PodInterface, PodNetworkAttachment};
use kni_integration::{
    Cluster, Pod,
    cluster::{HELD, objects, patience, truth::STATUS},
    kubelet::Sandbox,
    require,
    traffic::{Servers, Stream, tcp_get},
    wait,
};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use super::scene::{
    ANSWER, PORT, address, assert_reached, at_rest, identity, interface_names, kernel_addresses, leased, names,
    patch_metadata, serve, tenants, tenants_with, wait_for_truth,
};

const IFNAME: &str = "data0";

/// The pods without changes, and the pods that join.
struct Cast {
    cluster: Cluster,
    pods: Vec<Pod>,
    _servers: Vec<Servers>,
}

impl Cast {
    async fn start(name: &str) -> Result<Self> {
        let cluster = Cluster::start(name, 1).await?;
        tenants(&cluster).await?;
        let pods = cluster
            .run(&[objects::pod("plain", "a", "node1"), objects::pod("plain", "b", "node1")])
            .await?;
        let servers: Result<Vec<Servers>> = pods.iter().map(serve).collect();
        Ok(Self {
            cluster,
            pods,
            _servers: servers?,
        })
    }

    /// Joins both pods to blue by an attachment.
    async fn join(&self) -> Result<()> {
        self.cluster
            .apply(&[objects::attachment("plain", "extra", "blue", IFNAME)])
            .await?;
        for pod in &self.pods {
            patch_metadata(&self.cluster, pod, &json!({ "labels": { "join": "extra" } })).await?;
        }
        for pod in &self.pods {
            self.wait_for(pod, true).await?;
        }
        Ok(())
    }

    async fn wait_for(&self, pod: &Pod, there: bool) -> Result<()> {
        let what = format!("{IFNAME} of {} is there: {there}", identity(pod));
        wait::until(&what, patience(), async || {
            let wanted = if there { 2 } else { 0 };
            Ok(interface_names(pod)?.iter().any(|name| name == IFNAME) == there
                && kernel_addresses(pod, IFNAME)?.len() == wanted)
        })
        .await
        .map(drop)
    }

    /// Waits until nothing is left of the attachment of these pods.
    async fn wait_for_nothing(&self, pods: &[Pod]) -> Result<()> {
        for pod in pods {
            self.wait_for(pod, false).await?;
        }
        wait::until_right("nothing is left", patience(), async || {
            let mut left = names::<PodInterface>(&self.cluster).await?;
            left.retain(|name| name.ends_with(IFNAME));
            let leases = leased(&self.cluster.nodes[0], "blue").await?;
            left.extend((leases > 0).then(|| format!("{leases} addresses of blue are handed out")));
            Ok(left)
        })
        .await
        .map(drop)
    }
}

fn attachment() -> Value {
    objects::attachment("plain", "extra", "blue", IFNAME)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[expect(
    clippy::too_many_lines,
    reason = "four ways of removal under the same traffic, in order"
)]
async fn interfaces_come_and_go_under_traffic_and_leave_nothing() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cast = Cast::start("cluster-hot").await?;
    let cluster = &cast.cluster;
    let [a, b] = &cast.pods[..] else {
        unreachable!("two were asked for");
    };
    // Creates the state that remains after a first interface.
    cast.join().await?;
    cluster.delete(&attachment()).await?;
    cast.wait_for_nothing(&cast.pods).await?;
    let before = at_rest(&cluster.nodes[0]).await?;

    let to = |v4| SocketAddr::new(address(b, v4), PORT);
    let streams = [
        Stream::udp(&a.inside, to(true))?,
        Stream::udp(&a.inside, to(false))?,
        Stream::tcp(&a.inside, to(true))?,
    ];
    // 1: the object is deleted.
    cast.join().await?;
    for address in kernel_addresses(b, IFNAME)? {
        let answer = tcp_get(&a.inside, address, PORT, ANSWER)?;
        assert_eq!(answer.identity, identity(b), "over the further interface");
    }
    wait_for_truth(cluster).await?;
    let api: Api<PodNetworkAttachment> = Api::namespaced(cluster.client.clone(), "plain");
    wait::until("the attachment tells its pods", patience(), async || {
        let status = api.get("extra").await?.status.context("no status yet")?;
        Ok((status.selected, status.attached) == (2, 2))
    })
    .await?;
    cluster.delete(&attachment()).await?;
    cast.wait_for_nothing(&cast.pods).await?;
    before.assert_unchanged(&cluster.nodes[0].node, patience());

    // 2: the pods lose the label, one after the other.
    cast.join().await?;
    patch_metadata(cluster, a, &json!({ "labels": { "join": null } })).await?;
    cast.wait_for(a, false).await?;
    cast.wait_for(b, true).await?;
    patch_metadata(cluster, b, &json!({ "labels": { "join": "another" } })).await?;
    cast.wait_for_nothing(&cast.pods).await?;
    before.assert_unchanged(&cluster.nodes[0].node, patience());

    // 3: the selector is edited.
    cast.join().await?;
    let mut edited = attachment();
    edited["spec"]["podSelector"]["matchLabels"] = json!({ "join": "nobody" });
    cluster.apply(&[edited]).await?;
    cast.wait_for_nothing(&cast.pods).await?;
    before.assert_unchanged(&cluster.nodes[0].node, patience());

    for (stream, kind) in streams.into_iter().zip(["UDP over IPv4", "UDP over IPv6", "TCP"]) {
        let report = stream.stop();
        println!(
            "{kind}: {} sent, {} lost, longest silence {:?}",
            report.sent,
            report.lost(),
            report.longest_silence
        );
        report.assert_whole(&identity(b));
    }

    // 4: a pod with the interface is deleted; the interface of the other pod remains.
    cluster.apply(&[attachment()]).await?;
    let labels = json!({ "labels": { "join": "extra" } });
    let third = cluster
        .run(&[objects::pod_with("plain", "third", "node1", &labels)])
        .await?;
    let mut there = interface_names(&third[0])?;
    there.sort();
    assert_eq!(there, [IFNAME, "eth0"], "there from the start");
    wait_for_truth(cluster).await?;
    cluster.remove("plain", &["third"]).await?;
    wait::until_right("nothing is left of the pod", patience(), async || {
        let mut left = names::<PodInterface>(cluster).await?;
        left.retain(|name| name.starts_with("third."));
        // Two pods have two addresses each.
        let leases = leased(&cluster.nodes[0], "blue").await?;
        left.extend((leases != 4).then(|| format!("{leases} addresses of blue are handed out")));
        Ok(left)
    })
    .await?;
    cluster.delete(&attachment()).await?;
    cast.wait_for_nothing(&cast.pods).await?;
    before.assert_unchanged(&cluster.nodes[0].node, patience());
    wait_for_truth(cluster).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn definitions_of_multus_lead_to_networks() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-definitions", 1).await?;
    // A requested address must be in a block of its node.
    tenants_with(&cluster, &json!({ "perNodePrefix": { "ipv4": 16, "ipv6": 64 } })).await?;
    cluster
        .apply(&[
            objects::attachment_definition("plain", "storage", "blue"),
            objects::attachment_definition("red-team", "elsewhere", "red"),
        ])
        .await?;
    let asking = |networks: &str| json!({ "annotations": { "k8s.v1.cni.cncf.io/networks": networks } });
    let pods = cluster
        .run(&[
            objects::pod_with("plain", "short", "node1", &asking("storage@data0, red-team/elsewhere")),
            objects::pod_with(
                "plain",
                "long",
                "node1",
                &asking(r#"[{"name":"storage","interface":"data1","ips":["10.10.7.7"],"mac":"02:00:00:00:07:07"}]"#),
            ),
        ])
        .await?;
    wait_for_truth(&cluster).await?;
    let api: Api<PodInterface> = Api::namespaced(cluster.client.clone(), "plain");
    for (pod, ifname, network) in [(0, "data0", "blue"), (0, "net2", "red"), (1, "data1", "blue")] {
        let object = kni_api::pod_interface::name(&pods[pod].name, &pods[pod].uid, ifname);
        let found = api.get(&object).await.with_context(|| object.clone())?;
        assert_eq!(found.spec.pod_network_name, network, "{object}");
    }
    // The status names the definitions that the pods named.
    let expected = [
        ("eth0", "default", true),
        ("data0", "plain/storage", false),
        ("net2", "red-team/elsewhere", false),
    ];
    assert_eq!(
        reported(&cluster, &pods[0]).await?,
        expected.map(|(ifname, name, default)| json!([ifname, name, default]))
    );
    let addresses = kernel_addresses(&pods[1], "data1")?;
    assert_eq!(addresses.first(), Some(&"10.10.7.7".parse()?), "{addresses:?}");

    a_policy_is_about_the_interfaces_of_its_definition(&cluster, &pods).await?;

    // A missing object is waited for, and reported.
    cluster
        .create_pods(&[objects::pod_with("plain", "early", "node1", &asking("later"))])
        .await?;
    wait::until("the attach is refused", patience(), async || {
        let refusals = cluster.nodes[0].kubelet.refusals();
        Ok(refusals
            .iter()
            .any(|refusal| refusal.pod == "plain/early" && refusal.message.contains("later")))
    })
    .await?;
    cluster
        .apply(&[objects::attachment_definition("plain", "later", "blue")])
        .await?;
    let early = cluster.running("plain", "early").await?;
    assert_eq!(kernel_addresses(&early, "net1")?.len(), 2);
    Ok(())
}

/// `data1` of the second pod is on network blue by definition `storage`, and its `eth0` by none.
async fn a_policy_is_about_the_interfaces_of_its_definition(cluster: &Cluster, pods: &[Pod]) -> Result<()> {
    let _server = serve(&pods[1])?;
    let there = kernel_addresses(&pods[1], "data1")?[0];
    let heard = || tcp_get(&pods[0].inside, there, PORT, ANSWER).is_ok();
    assert!(heard(), "no policy yet");
    let policy = json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta1",
        "kind": "MultiNetworkPolicy",
        "metadata": {
            "name": "closed", "namespace": "plain", "annotations": { "k8s.v1.cni.cncf.io/policy-for": "storage" },
        },
        "spec": { "podSelector": {}, "policyTypes": ["Ingress"] },
    });
    cluster.apply(std::slice::from_ref(&policy)).await?;
    wait::until("the interface is isolated", patience(), async || Ok(!heard())).await?;
    assert_reached(&pods[0], &pods[1]);
    cluster.delete(&policy).await?;
    wait::until("the interface is open again", patience(), async || Ok(heard()))
        .await
        .map(drop)
}

/// Interface, name and `default` of each entry of a pod's network status.
async fn reported(cluster: &Cluster, pod: &Pod) -> Result<Vec<Value>> {
    let api: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(cluster.client.clone(), &pod.namespace);
    let object = api.get(&pod.name).await?;
    let status = object.annotations().get(STATUS).context("no network status")?;
    let entries: Vec<Value> = serde_json::from_str(status)?;
    let listed = entries.iter();
    Ok(listed
        .map(|entry| json!([entry["interface"], entry["name"], entry["default"]]))
        .collect())
}

/// A call that is repeated while the first one is still undone must not report a pod that is about to be detached.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn overlapping_attaches_agree_where_an_additional_interface_fails() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-overlap", 1).await?;
    tenants_with(&cluster, &json!({ "perNodePrefix": { "ipv4": 16, "ipv6": 64 } })).await?;
    cluster
        .apply(&[objects::attachment_definition("plain", "storage", "blue")])
        .await?;
    let networks = "k8s.v1.cni.cncf.io/networks";
    let wish = r#"[{"name":"storage","interface":"data0","ips":["10.10.7.7"]}]"#;
    let taken = json!({ "annotations": { networks: wish } });
    let holder = objects::pod_with("plain", "holder", "node1", &taken);
    cluster.run(&[holder]).await?;
    let kubelet = &cluster.nodes[0].kubelet;
    kubelet.hold();
    let mut late = objects::pod_with("plain", "late", "node1", &taken);
    late["metadata"]["labels"] = json!({ HELD: "yes" });
    cluster.create_pods(&[late]).await?;
    wait::until("the node knows the pod", patience(), async || {
        Ok(kubelet.knows("plain", "late"))
    })
    .await?;

    let api: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(cluster.client.clone(), "plain");
    let uid = api.get("late").await?.uid().context("uid")?;
    let kni = kubelet.kni();
    for _round in 0..20 {
        let netns = kni.create_network("plain", "late").await?;
        let mut sandbox = Sandbox::new("plain", "late", &netns);
        sandbox.uid.clone_from(&uid);
        sandbox.annotate(&[(networks, wish)]);
        // Spread over the duration of an attach, so that some arrive between its steps.
        let calls = (0..12).map(async |delay| {
            tokio::time::sleep(Duration::from_millis(delay)).await;
            kni.attach(&sandbox).await
        });
        let attached = futures::future::join_all(calls).await;
        for answer in attached {
            let refusal = answer.err().context("attached, though its address is taken")?;
            assert!(refusal.message().contains("10.10.7.7"), "{refusal}");
        }
        kni.delete_network(&sandbox.id).await?;
    }
    assert_eq!(
        leased(&cluster.nodes[0], "default").await?,
        2,
        "those of the pod that holds the address"
    );
    Ok(())
}
