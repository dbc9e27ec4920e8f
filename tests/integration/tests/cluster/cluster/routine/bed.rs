//! Provides the nodes, networks, pods and servers of all rows: three nodes, the last one with a name that is longer
//! than a label.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use kni_api::NodeNetwork;
use kni_integration::{
    Cluster, Pod,
    cluster::{Member, MemberOptions, objects, patience},
    traffic::{Servers, tcp_get, udp_ask},
    wait,
};
use kube::Api;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    super::scene::{
        ANSWER, PORT, address, friends, identity, serve, wait_for_condition, wait_for_silence, wait_for_truth,
    },
    objects::Picture,
};

/// The namespace of all pods, and its network.
pub(super) const TEAM: &str = "red-team";
pub(super) const NETWORK: &str = "red";
/// The label that admits it.
pub(super) const TENANT: &str = "tenant";
/// The port of the Service.
pub(super) const FRONT: u16 = 80;
/// The policies of the bed.
const POLICIES: i64 = 2;
/// After this time a server is asked again.
pub(super) const SOON: Duration = Duration::from_secs(1);
/// How long an address rests, in seconds.
const REST: &str = "2";

/// The cluster, and its pods by name.
pub(super) struct Bed {
    pub(super) cluster: Cluster,
    pods: BTreeMap<String, Pod>,
    servers: BTreeMap<String, Servers>,
    /// The addresses of the Services, IPv4 first.
    fronts: [SocketAddr; 2],
    /// Another program of the agent is there.
    pub(super) folder: TempDir,
}

impl Bed {
    pub(super) async fn start(name: &str) -> Result<Self> {
        let mut cluster = Cluster::without_nodes(name).await?;
        for name in [None, None, Some(format!("node3.{}.example", "n".repeat(60)))] {
            let mut options = MemberOptions::default();
            options.args.extend(["--test-address-rest", REST].map(str::to_owned));
            cluster.add_node(MemberOptions { name, ..options }).await?;
        }
        cluster.apply(&networks()).await?;
        wait_for_condition(&cluster, "default", "Programmed", true).await?;
        wait_for_condition(&cluster, NETWORK, "Programmed", true).await?;
        let third = cluster.nodes[2].name.clone();
        let scout = cluster.run(&[objects::pod(TEAM, "scout", &third)]).await?;
        let pods = cluster.run(&pods(&third, &beside(&scout[0].ips())?)).await?;
        cluster.remove(TEAM, &["scout"]).await?;
        let servers = pods
            .iter()
            .filter(|pod| !["client", "dialer", "stranger"].contains(&&*pod.name));
        let servers = servers.map(|pod| Ok((pod.name.clone(), serve(pod)?)));
        let mut bed = Self {
            servers: servers.collect::<Result<_>>()?,
            pods: pods.into_iter().map(|pod| (pod.name.clone(), pod)).collect(),
            cluster,
            fronts: [([0; 4], 0).into(), ([0; 16], 0).into()],
            folder: tempfile::tempdir()?,
        };
        bed.guard().await?;
        for (at, v4) in [true, false].into_iter().enumerate() {
            bed.fronts[at] = bed.serve_at(front_name(v4), &["remote"], v4).await?;
        }
        bed.is_right().await?;
        Ok(bed)
    }

    pub(super) fn pod(&self, name: &str) -> &Pod {
        &self.pods[name]
    }

    pub(super) const fn front(&self, v4: bool) -> SocketAddr {
        self.fronts[if v4 { 0 } else { 1 }]
    }

    /// The node that operations are about, with the long name.
    pub(super) fn third(&mut self) -> &mut Member {
        &mut self.cluster.nodes[2]
    }

    /// How many packets the guarded pods have received.
    pub(super) fn received_by_guarded(&self) -> u64 {
        let guarded = ["guarded1", "guarded2"].map(|name| self.servers[name].seen());
        guarded.iter().map(|seen| *seen as u64).sum()
    }

    /// Waits until a pod runs again that has ended, and serves in it.
    pub(super) async fn runs_again(&mut self, name: &str) -> Result<()> {
        let pod = self.cluster.running(TEAM, name).await?;
        self.servers.insert(name.to_owned(), serve(&pod)?);
        self.pods.insert(name.to_owned(), pod);
        Ok(())
    }

    /// Ends the server of a pod, and drops the pod: its namespace lives no longer than the sandbox.
    pub(super) fn ends(&mut self, name: &str) {
        self.servers.remove(name);
        self.pods.remove(name);
    }

    /// The policies, and the proof that the guarded pods would receive what it denies: packets of the client.
    async fn guard(&self) -> Result<()> {
        self.cluster.apply(&[friends(), guard(FRIENDS)]).await?;
        let client = self.pod("client");
        for name in ["guarded1", "guarded2"] {
            let guarded = self.pod(name);
            wait::until(&format!("the client reaches {name}"), patience(), async || {
                for v4 in [true, false] {
                    let answer = udp_ask(&client.inside, address(guarded, v4), PORT, ANSWER)?;
                    ensure!(answer.identity == identity(guarded), "{answer:?}");
                }
                Ok(true)
            })
            .await?;
            wait_for_silence(self.pod("stranger"), guarded).await?;
        }
        ensure!(self.received_by_guarded() >= 4, "the servers count what they receive");
        Ok(())
    }

    /// Writes a Service with these pods as backends; returns its address.
    pub(super) async fn serve_at(&self, name: &str, backends: &[&str], v4: bool) -> Result<SocketAddr> {
        self.cluster.apply(&self.service(name, FRONT, backends, v4)).await?;
        let api: Api<Service> = Api::namespaced(self.cluster.client.clone(), TEAM);
        let spec = api.get(name).await?.spec.unwrap_or_default();
        Ok(SocketAddr::new(spec.cluster_ip.context("an address")?.parse()?, FRONT))
    }

    /// A Service and its slice.
    pub(super) fn service(&self, name: &str, port: u16, backends: &[&str], v4: bool) -> [Value; 2] {
        let addresses: Vec<String> = backends
            .iter()
            .map(|backend| address(self.pod(backend), v4).to_string())
            .collect();
        let labels = json!({ "kni.dev/network": NETWORK });
        let [service, mut slice] = objects::service(TEAM, name, port, (&addresses[0], PORT), &labels);
        let endpoints = addresses
            .iter()
            .map(|address| json!({ "addresses": [address], "conditions": { "ready": true } }));
        slice["endpoints"] = endpoints.collect();
        [service, slice]
    }

    /// Waits until the report of each node has its pods.
    pub(super) async fn is_reported(&self) -> Result<()> {
        wait::until("the nodes report their pods", patience(), async || {
            for member in &self.cluster.nodes {
                let pods = i64::try_from(member.kubelet.running().len())?;
                let api: Api<NodeNetwork> = Api::all(self.cluster.client.clone());
                let status = api.get(&member.name).await?.status.context("no status")?;
                let used: i64 = status.networks.iter().map(|network| network.used).sum();
                let seen = (status.interfaces, used, status.policies.known);
                ensure!(seen == (pods, pods, POLICIES), "{}: {seen:?}, {pods} pods", member.name);
            }
            Ok(true)
        })
        .await
        .map(drop)
    }

    /// Waits until the client reaches all servers, and the objects equal the kernel and rest.
    pub(super) async fn is_right(&self) -> Result<Picture> {
        let client = self.pod("client");
        for v4 in [true, false] {
            let direct = ["beside", "remote", "third"].map(|name| {
                let pod = self.pod(name);
                (SocketAddr::new(address(pod, v4), PORT), identity(pod))
            });
            let service = (self.front(v4), identity(self.pod("remote")));
            for (at, server) in direct.into_iter().chain([service]) {
                wait::until(&format!("{server} answers at {at}"), patience(), async || {
                    let answer = tcp_get(&client.inside, at.ip(), at.port(), SOON)?;
                    ensure!(answer.identity == server, "{answer:?}");
                    Ok(true)
                })
                .await?;
            }
        }
        wait_for_truth(&self.cluster).await?;
        wait::until_some("the objects rest", patience(), async || {
            let first = Picture::take(&self.cluster).await?;
            // Longer than between two writes of the same report.
            tokio::time::sleep(Duration::from_millis(300)).await;
            let second = Picture::take(&self.cluster).await?;
            Ok((first == second).then_some(second))
        })
        .await
    }
}

/// The peers that [`guard`] allows.
pub(super) const FRIENDS: &str = "friend";

/// The policy that guards pods of the network from all but pods with this label: of a kind that the API server does not
/// check.
pub(super) fn guard(label: &str) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta1",
        "kind": "MultiNetworkPolicy",
        "metadata": {
            "name": "guard", "namespace": TEAM, "annotations": { "k8s.v1.cni.cncf.io/policy-for": NETWORK },
        },
        "spec": {
            "podSelector": { "matchLabels": { "app": "guarded" } },
            "policyTypes": ["Ingress"],
            "ingress": [{ "from": [{ "podSelector": { "matchLabels": { label: "yes" } } }] }],
        },
    })
}

/// The name of the Service of a family.
pub(super) const fn front_name(v4: bool) -> &'static str {
    if v4 { "front4" } else { "front6" }
}

/// The namespaces, and the networks.
pub(super) fn networks() -> Vec<Value> {
    let admitted = json!({ "matchLabels": { TENANT: NETWORK } });
    let more = json!({
        "namespaceSelector": admitted,
        "access": { "namespaces": { "from": "Selected", "selector": admitted }, "revoke": true },
    });
    vec![
        objects::default_network(),
        objects::network(NETWORK, &["10.10.0.0/16", "fd10::/64"], &more),
        objects::namespace(TEAM, &json!({ TENANT: NETWORK })),
    ]
}

/// Addresses in the same blocks as these, which other pods do not get soon.
fn beside(ips: &[IpAddr]) -> Result<String> {
    let next = ips.iter().map(|ip| match ip {
        IpAddr::V4(ip) => Ipv4Addr::from(u32::from(*ip) + 9).to_string(),
        IpAddr::V6(ip) => Ipv6Addr::from(u128::from(*ip) + 9).to_string(),
    });
    let next: Vec<String> = next.collect();
    ensure!(next.len() == 2, "{ips:?}");
    Ok(next.join(","))
}

/// The pods. That of node3 has these addresses, also after a reboot.
fn pods(third: &str, chosen: &str) -> Vec<Value> {
    let server = json!({ "labels": { "app": "server" } });
    let guarded = json!({ "labels": { "app": "guarded" } });
    let with_addresses = json!({ "labels": { "app": "server" }, "annotations": { "kni.dev/ips": chosen } });
    let friend = json!({ "labels": { "friend": "yes" } });
    vec![
        objects::pod_with(TEAM, "client", "node1", &friend),
        // Its connections to the Service have no port of a stream to the same backend.
        objects::pod_with(TEAM, "dialer", "node1", &friend),
        objects::pod(TEAM, "stranger", "node1"),
        objects::pod_with(TEAM, "beside", "node1", &server),
        objects::pod_with(TEAM, "guarded1", "node1", &guarded),
        objects::pod_with(TEAM, "remote", "node2", &server),
        objects::pod_with(TEAM, "guarded2", "node2", &guarded),
        objects::pod_with(TEAM, "third", third, &with_addresses),
    ]
}
