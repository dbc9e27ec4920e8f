//! Provides a victim: the pods, the Service and the policy of a tenant, and how far each works as it did.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use kni_integration::{
    Cluster, Pod,
    cluster::{objects, patience},
    eventually,
    traffic::{Servers, Stream, new_token, tcp_get, udp_ask, udp_ask_to},
};
use kni_proto::runtime::ListDropsRequest;
use kube::Api;
use serde_json::{Value, json};

use super::{
    super::scene::{ANSWER, PORT, address, identity, serve},
    row::Target,
};

/// The port of Services.
const FRONT: u16 = 80;
/// New flows until each backend of a Service has answered one: that one of two stays away by chance is rarer than 1 of
/// a billion.
const FLOWS: usize = 31;
/// The part of the patience for which a datagram may be neither dropped by a policy nor received: one to a new pod may
/// be lost where a node does not know the pod yet.
const FATE: u32 = 20;
/// How long the sender of a datagram waits for an answer that must not come; a counter shows its fate.
const NO_ANSWER: Duration = Duration::from_millis(1);
/// The pods whose policy is the same as that of the victim's first pods, and that are made for one measurement.
pub(super) const LATE: &str = "late";

/// A tenant.
pub(super) struct Victim {
    pub(super) namespace: &'static str,
    network: &'static str,
    labels: Value,
    /// A backend on each node.
    pub(super) backends: [Pod; 2],
    pub(super) servers: [Servers; 2],
    /// A pod that the policy allows, on node2.
    pub(super) friend: Pod,
    /// One that it does not allow, on node1.
    stranger: Pod,
    front: IpAddr,
}

impl Victim {
    pub(super) async fn start(
        cluster: &Cluster,
        namespace: &'static str,
        network: &'static str,
        labels: &Value,
    ) -> Result<Self> {
        let pod = |name: &str, node: &str, key: &str, value: &str| {
            objects::pod_with(namespace, name, node, &json!({ "labels": { key: value } }))
        };
        let pods = [
            pod("server1", "node1", "app", "server"),
            pod("server2", "node2", "app", "server"),
            pod("friend", "node2", "friend", "yes"),
            pod("stranger", "node1", "friend", "no"),
        ];
        let pods = <[Pod; 4]>::try_from(cluster.run(&pods).await?);
        let [first, second, friend, stranger] = pods.ok().context("four pods")?;
        let backends = [first, second];
        let servers = [serve(&backends[0])?, serve(&backends[1])?];
        cluster.apply(&[guard(namespace, "guard", "server")]).await?;
        cluster
            .apply(&service(namespace, "web", &backends.each_ref(), labels))
            .await?;
        let services: Api<Service> = Api::namespaced(cluster.client.clone(), namespace);
        let spec = services.get("web").await?.spec.context("spec")?;
        let front = spec.cluster_ip.context("address")?.parse()?;
        Ok(Self {
            namespace,
            network,
            labels: labels.clone(),
            backends,
            servers,
            friend,
            stranger,
            front,
        })
    }

    /// What attempts are aimed at.
    pub(super) fn target(&self) -> Result<Target> {
        let pod = &self.backends[0];
        Ok(Target {
            namespace: self.namespace.to_owned(),
            network: self.network.to_owned(),
            pod: pod.ip(true).context("an address")?,
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            service: self.front,
        })
    }

    /// A stream from the friend to a backend on the other node.
    pub(super) fn stream(&self, tcp: bool) -> Result<Stream> {
        let to = SocketAddr::new(address(&self.backends[0], true), PORT);
        if tcp {
            Stream::tcp(&self.friend.inside, to)
        } else {
            Stream::udp(&self.friend.inside, to)
        }
    }

    /// Whether the Service is answered by its backends and by no other pod, on both nodes.
    pub(super) fn is_served(&self) -> Result<()> {
        let backends = self.backends.each_ref();
        for from in [&self.friend, &self.backends[0]] {
            answers(from, self.front, &backends)?;
        }
        Ok(())
    }

    /// Whether the policy allows and denies what it did: the friend reaches each backend, the others none.
    pub(super) async fn is_policed(&self, cluster: &Cluster, others: &[&Pod]) -> Result<()> {
        let pairs = self.backends.iter().zip(&self.servers);
        for (backend, server) in pairs {
            self.is_guarded(cluster, (backend, server), others).await?;
        }
        Ok(())
    }

    async fn is_guarded(&self, cluster: &Cluster, (to, server): (&Pod, &Servers), others: &[&Pod]) -> Result<()> {
        reaches(&self.friend, to)?;
        for from in others.iter().copied().chain([&self.stranger]) {
            for v4 in [true, false] {
                is_denied(cluster, (from, to), v4, server).await?;
            }
        }
        Ok(())
    }

    /// Makes a pod on each node with a policy and a Service of its own, and removes them; whether they come to work.
    /// As their objects are younger than those of any attempt before, the nodes have evaluated these, too.
    pub(super) async fn is_extensible(&self, cluster: &Cluster, limit: Duration, annotations: &Value) -> Result<()> {
        let made = self.extended(cluster, limit, annotations).await;
        for object in service(self.namespace, LATE, &[], &self.labels) {
            cluster.delete(&object).await?;
        }
        cluster.delete(&guard(self.namespace, LATE, LATE)).await?;
        cluster.remove(self.namespace, &["late1", "late2"]).await?;
        made
    }

    async fn extended(&self, cluster: &Cluster, limit: Duration, annotations: &Value) -> Result<()> {
        let more = json!({ "labels": { "app": LATE }, "annotations": annotations });
        let pods = ["1", "2"].map(|number| {
            objects::pod_with(
                self.namespace,
                &format!("{LATE}{number}"),
                &format!("node{number}"),
                &more,
            )
        });
        cluster.apply(&[guard(self.namespace, LATE, LATE)]).await?;
        cluster.create_pods(&pods).await?;
        let running = eventually(limit, async || {
            let found = ["late1", "late2"].map(|name| {
                let mut nodes = cluster.nodes.iter();
                nodes.find_map(|node| node.kubelet.reported(self.namespace, name))
            });
            let [Some(first), Some(second)] = found else {
                anyhow::bail!("{}", cluster.refusals())
            };
            Ok([first, second])
        });
        let running = running.await.context("a new pod does not run")?;
        let servers = [serve(&running[0])?, serve(&running[1])?];
        let objects = service(self.namespace, LATE, &running.each_ref(), &self.labels);
        cluster.apply(&objects).await?;
        let services: Api<Service> = Api::namespaced(cluster.client.clone(), self.namespace);
        let spec = services.get(LATE).await?.spec.context("spec")?;
        let front = spec.cluster_ip.context("address")?.parse()?;
        eventually(limit, async || {
            for (pod, server) in running.iter().zip(&servers) {
                self.is_guarded(cluster, (pod, server), &[]).await?;
            }
            for from in [&self.friend, &running[0]] {
                answers(from, front, &running.each_ref())?;
            }
            Ok(())
        })
        .await
    }
}

/// Only friends reach the pods with this label `app`, and these themselves.
pub(super) fn guard(namespace: &str, name: &str, app: &str) -> Value {
    let peer = |key: &str, value: &str| json!({ "podSelector": { "matchLabels": { key: value } } });
    let spec = json!({
        "podSelector": { "matchLabels": { "app": app } },
        "policyTypes": ["Ingress"],
        "ingress": [{ "from": [peer("friend", "yes"), peer("app", app)] }],
    });
    objects::policy(namespace, name, &spec)
}

/// A Service with these pods as its endpoints.
pub(super) fn service(namespace: &str, name: &str, backends: &[&Pod], labels: &Value) -> [Value; 2] {
    let [service, mut slice] = objects::service(namespace, name, FRONT, ("0.0.0.0", PORT), labels);
    let endpoints = backends.iter().map(|pod| {
        json!({
            "addresses": [address(pod, true)],
            "conditions": { "ready": true },
            "targetRef": { "kind": "Pod", "namespace": namespace, "name": pod.name, "uid": pod.uid },
        })
    });
    slice["endpoints"] = endpoints.collect();
    [service, slice]
}

/// Whether the friend gets answers from both addresses.
fn reaches(from: &Pod, to: &Pod) -> Result<()> {
    for v4 in [true, false] {
        let answer = tcp_get(&from.inside, address(to, v4), PORT, ANSWER);
        let answer = answer.with_context(|| format!("{} asks {}", identity(from), identity(to)))?;
        ensure!(answer.identity == identity(to), "{answer:?}");
    }
    Ok(())
}

/// Whether new flows to a Service lead to each of its backends, and to nothing else.
fn answers(from: &Pod, front: IpAddr, backends: &[&Pod]) -> Result<()> {
    let expected: BTreeSet<String> = backends.iter().map(|pod| identity(pod)).collect();
    let mut found = BTreeSet::new();
    for _flow in 0..FLOWS {
        let answer = udp_ask(&from.inside, front, FRONT, ANSWER);
        let answer = answer.with_context(|| format!("{} asks {front}", identity(from)))?;
        ensure!(
            expected.contains(&answer.identity),
            "{} answers at {front}",
            answer.identity
        );
        found.insert(answer.identity);
        if found == expected {
            return Ok(());
        }
    }
    anyhow::bail!("only {found:?} answer at {front}")
}

/// Whether a policy drops a datagram: a node has counted that at one of both pods, and no server has received it.
async fn is_denied(cluster: &Cluster, (from, to): (&Pod, &Pod), v4: bool, server: &Servers) -> Result<()> {
    let before = dropped(cluster, [from, to]).await?;
    let token = new_token();
    let at = SocketAddr::new(address(to, v4), PORT);
    let answer = udp_ask_to(&from.inside, at, &token, NO_ANSWER);
    let what = format!("{} to {} at {at}", identity(from), identity(to));
    ensure!(answer.is_err(), "{what}: {answer:?}");
    let arrived = eventually(patience() / FATE, async || {
        let mut now = dropped(cluster, [from, to]).await?;
        now.retain(|reason, count| *count > before.get(reason).copied().unwrap_or_default());
        let counted = now.keys().any(|reason| reason.starts_with("policy"));
        ensure!(
            counted || server.saw(&token),
            "{what}: neither received nor dropped by a policy, but {now:?}"
        );
        Ok(!counted)
    });
    ensure!(!arrived.await? && !server.saw(&token), "{what} arrives");
    Ok(())
}

/// Packets that the nodes have dropped at these pods, by the reason.
pub(super) async fn dropped(cluster: &Cluster, pods: [&Pod; 2]) -> Result<BTreeMap<String, u64>> {
    let mut sums = BTreeMap::new();
    for member in &cluster.nodes {
        let request = ListDropsRequest::default();
        let listed = member.kubelet.kni().runtime().list_drops(request).await?;
        let mut of_pods = listed.into_inner().drops;
        of_pods.retain(|drop| {
            let is = |pod: &&Pod| (&pod.namespace, &pod.name) == (&drop.pod_namespace, &drop.pod_name);
            pods.iter().any(is)
        });
        for drop in of_pods {
            *sums.entry(drop.reason).or_default() += drop.count.map_or(0, |count| count.packets);
        }
    }
    Ok(sums)
}
