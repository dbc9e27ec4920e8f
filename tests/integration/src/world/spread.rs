//! Runs the nine pods on the nodes of a cluster with an API server: namespaces, labels and policies are its objects.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Pod as PodObject;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{
    AGENT_ARGS, MEMBERS, Member, NAMESPACES, Net, NinePods, PolicyText, Setting,
    canary::{self, Canary, Way},
    full_name, names_of, objects,
};
use crate::{
    cluster::{Cluster, MemberOptions, definitions, objects as api_objects},
    kubelet::Pod,
    oracle::Labels,
    wait::{self, patience},
};

/// Nodes of the pods.
pub const NODES: usize = 2;

/// The node of each pod, from 1 on.
pub type Placement = [usize; MEMBERS];

/// Placements with pods of each namespace on both nodes. The first pod is on either node, and of the 36 pairs all but
/// six are on different nodes in one of the placements.
pub const PLACEMENTS: [Placement; 2] = [[1, 2, 1, 2, 2, 1, 2, 1, 2], [2, 1, 1, 1, 2, 2, 2, 1, 1]];

/// The cluster, and what is applied in it.
pub struct Spread {
    /// Its nodes and its API server.
    pub cluster: Cluster,
    placement: Placement,
    policies: Vec<Value>,
}

impl NinePods<Spread> {
    /// Runs all pods on two nodes; no policy selects them yet.
    pub async fn spread(name: &str, placement: Placement) -> Result<Self> {
        let mut options = MemberOptions::default();
        options.args.extend(AGENT_ARGS.map(str::to_owned));
        let mut cluster = Cluster::without_nodes(name).await?;
        define_newer_policies(&cluster).await?;
        for _node in 0..NODES {
            cluster.add_node(options.clone()).await?;
        }
        let stage = Spread {
            cluster,
            placement,
            policies: Vec::new(),
        };
        let setting = Setting::default();
        stage.prepare(&setting).await?;
        let mut members = Vec::new();
        for (index, pod) in stage.run_all(&setting).await?.iter().enumerate() {
            members.push(member(index, pod)?);
        }
        let canaries = stage.canaries().await?;
        let mut world = Self {
            members,
            setting,
            canaries,
            stage,
        };
        world
            .stage
            .cluster
            .apply(&objects::services(&world.addresses()))
            .await?;
        world.apply_canaries().await?;
        world.canaries.iter().try_for_each(Canary::wait_shut)?;
        world.apply(Net::Default, &[], &Setting::default()).await?;
        Ok(world)
    }

    /// Replaces the policies, which apply to `net`, and the labels, and waits until both agents have applied the
    /// policies. The policies of both networks are replaced. Labels reach the agents by other watches, and possibly
    /// later.
    pub async fn apply(&mut self, net: Net, policies: &[PolicyText], setting: &Setting) -> Result<()> {
        if self.setting.namespaces != setting.namespaces {
            let namespaces = objects::namespaces(&setting.namespaces);
            self.stage.cluster.apply(&namespaces).await?;
        }
        for index in 0..MEMBERS {
            self.relabel(index, &setting.pods[index]).await?;
        }
        self.setting = setting.clone();
        let policies = objects::policies(net, policies, &self.addresses());
        let policies = policies.into_iter().map(without_host_bits).collect();
        self.stage.replace_policies(policies).await?;
        self.apply_canaries().await?;
        let applied = self.canaries.iter().try_for_each(Canary::wait);
        applied.with_context(|| format!("the agents do not follow policies:\n{}", self.stage.logs()))
    }

    /// Changes the labels of a running pod.
    pub async fn relabel(&mut self, index: usize, labels: &Labels) -> Result<()> {
        let known = &self.setting.pods[index];
        if known == labels {
            return Ok(());
        }
        let (namespace, name) = names_of(index);
        let gone = known.keys().filter(|key| !labels.contains_key(*key));
        let gone = gone.map(|key| (key.as_str(), Value::Null));
        let now = labels.iter().map(|(key, value)| (key.as_str(), json!(value)));
        let changed: BTreeMap<&str, Value> = gone.chain(now).collect();
        let api: Api<PodObject> = Api::namespaced(self.stage.cluster.client.clone(), namespace);
        let patch = Patch::Merge(json!({ "metadata": { "labels": changed } }));
        let patched = api.patch(name, &PatchParams::default(), &patch).await;
        patched.with_context(|| format!("labels of {}", full_name(index)))?;
        self.setting.pods[index] = labels.clone();
        Ok(())
    }

    /// Deletes a pod, and runs another one of its name and node with these labels and with the same addresses on the
    /// default network.
    pub async fn replace(&mut self, index: usize, labels: &Labels) -> Result<()> {
        let (namespace, name) = names_of(index);
        let addresses = self.addresses();
        let same = [true, false].map(|v4| addresses.of(index, Net::Default, v4).to_string());
        // As the containers of a pod, its servers end before its namespace is removed.
        drop(self.members.remove(index));
        self.stage.cluster.remove(namespace, &[name]).await?;
        let mut pod = self.stage.pod(index, labels);
        pod["metadata"]["annotations"]["kni.dev/ips"] = json!(same.join(","));
        let pods = self.stage.cluster.run(&[pod]).await?;
        self.members.insert(index, member(index, &pods[0])?);
        self.setting.pods[index] = labels.clone();
        let now = self.addresses();
        ensure!(
            same == [true, false].map(|v4| now.of(index, Net::Default, v4).to_string()),
            "{} has other addresses: {now:?}",
            full_name(index)
        );
        Ok(())
    }

    async fn apply_canaries(&mut self) -> Result<()> {
        let policies: Vec<Value> = self
            .canaries
            .iter_mut()
            .map(|canary| without_host_bits(canary.next()))
            .collect();
        self.stage.cluster.apply(&policies).await
    }
}

impl Spread {
    /// Applies everything that pods need.
    async fn prepare(&self, setting: &Setting) -> Result<()> {
        let mut all: Vec<Value> = Net::BOTH.map(network).into();
        all.extend(objects::namespaces(&setting.namespaces));
        all.push(api_objects::namespace(canary::NAMESPACE, &json!({})));
        for namespace in NAMESPACES.into_iter().chain([canary::NAMESPACE]) {
            let named = Net::Named.name();
            all.push(api_objects::attachment_definition(namespace, named, named));
        }
        self.cluster.apply(&all).await
    }

    async fn run_all(&self, setting: &Setting) -> Result<Vec<Pod>> {
        let pods: Vec<Value> = (0..MEMBERS)
            .map(|index| self.pod(index, &setting.pods[index]))
            .collect();
        self.cluster.run(&pods).await
    }

    fn pod(&self, index: usize, labels: &Labels) -> Value {
        let mut pod = on_both(names_of(index), self.placement[index]);
        pod["metadata"]["labels"] = json!(labels);
        let ports = objects::named_ports();
        let ports = ports
            .iter()
            .map(|port| json!({ "name": port.name, "containerPort": port.port, "protocol": port.protocol.name() }));
        pod["spec"]["containers"][0]["ports"] = ports.collect();
        pod
    }

    /// A pod on each node, which receives what the one on the other node sends.
    async fn canaries(&self) -> Result<Vec<Canary>> {
        let pods: Vec<Value> = (1..=NODES)
            .map(|node| on_both((canary::NAMESPACE, &format!("on-node{node}")), node))
            .collect();
        let pods = self.cluster.run(&pods).await?;
        let of = |net: Net| -> Result<Canary> {
            let mut ways = Vec::new();
            for (sender, receiver) in [(&pods[0], &pods[1]), (&pods[1], &pods[0])] {
                let address = receiver.ips_of(interface(net)).first().copied();
                ways.push(Way {
                    sender: sender.inside.clone(),
                    receiver: receiver.inside.clone(),
                    address: address.context("a canary without an address")?,
                });
            }
            Ok(Canary::new(net, ways))
        };
        Net::BOTH.into_iter().map(of).collect()
    }

    /// Deletes the policies that are not in the list, or differ there, and applies those that are.
    async fn replace_policies(&mut self, policies: Vec<Value>) -> Result<()> {
        for policy in &self.policies {
            // Server-side apply keeps what is absent now: a selector that becomes empty, where the kind has no schema,
            // and the `policyTypes` that the API server has added.
            if !policies.contains(policy) {
                self.cluster.delete(policy).await?;
            }
        }
        self.cluster.apply(&policies).await?;
        self.policies = policies;
        Ok(())
    }

    /// The latest lines of each agent's log, for messages.
    fn logs(&self) -> String {
        let of_node = |node: &crate::cluster::Member| {
            let log = node.agent.log();
            let lines: Vec<&str> = log.lines().rev().take(20).collect();
            format!("{}, newest first:\n{}", node.name, lines.join("\n"))
        };
        self.cluster.nodes.iter().map(of_node).collect::<Vec<_>>().join("\n")
    }
}

fn network(net: Net) -> Value {
    let mut more = json!({ "serviceSubnets": objects::service_subnets(net) });
    if net == Net::Default {
        more["default"] = json!(true);
    }
    api_objects::network(net.name(), &objects::subnets(net), &more)
}

/// Replaces the definition of `MultiNetworkPolicy` by the version with `endPort`.
async fn define_newer_policies(cluster: &Cluster) -> Result<()> {
    let newer = definitions::multi_network_policy("v1beta2");
    // A version of which objects may be stored cannot be taken out of a definition.
    cluster.delete(&newer).await?;
    wait::until("the definition is gone", patience(), async || {
        Ok(cluster.get(&newer).await?.is_none())
    })
    .await?;
    definitions::apply(&cluster.client, vec![newer]).await
}

/// A policy without bits over the length of a prefix, which an API server refuses.
fn without_host_bits(mut policy: Value) -> Value {
    truncate_prefixes(&mut policy["spec"]);
    policy
}

fn truncate_prefixes(value: &mut Value) {
    match value {
        Value::Object(fields) => fields.values_mut().for_each(truncate_prefixes),
        Value::Array(items) => items.iter_mut().for_each(truncate_prefixes),
        Value::String(text) => {
            if let Ok(prefix) = text.parse::<IpNet>() {
                *text = prefix.trunc().to_string();
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => (),
    }
}

/// A pod for a node, on both networks.
fn on_both((namespace, name): (&str, &str), node: usize) -> Value {
    let more = json!({ "annotations": { "k8s.v1.cni.cncf.io/networks": Net::Named.name() } });
    api_objects::pod_with(namespace, name, &format!("node{node}"), &more)
}

/// The name of a pod's interface on a network.
const fn interface(net: Net) -> &'static str {
    match net {
        Net::Default => "eth0",
        Net::Named => "net1",
    }
}

fn member(index: usize, pod: &Pod) -> Result<Member> {
    let addresses = Net::BOTH.map(|net| (net, pod.ips_of(interface(net))));
    Member::serving(index, pod.id.clone(), pod.inside.clone(), addresses.into())
}
