//! Compares the interfaces of pods in the kernel with the objects that describe them.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::fs::MetadataExt as _,
};

use anyhow::{Context as _, Result};
use aya::programs::{SchedClassifier, TcAttachType};
use kni_api::{ConditionStatus, PodInterface};
use kube::{Api, ResourceExt as _, api::ListParams};
use serde_json::Value;

use super::{Cluster, Member};
use crate::{kubelet::Pod, namespaces::Namespaces};

/// One interface of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelInterface {
    /// Its index inside the pod.
    pub index: u32,
    /// MAC address.
    pub mac: String,
    /// MTU.
    pub mtu: u32,
    /// Addresses except link-local ones.
    pub addresses: BTreeSet<String>,
    /// Inode of the network namespace.
    pub netns: u64,
    /// Index and name of the host end.
    pub host: (u32, String),
    /// The kernel's ids of the TCX programs at the host end.
    pub programs: BTreeSet<u32>,
}

/// The interfaces of a pod by name except `lo`, as reported by the kernel of its node.
pub fn interfaces(node: &Namespaces, pod: &Pod) -> Result<BTreeMap<String, KernelInterface>> {
    let shown: Vec<Value> = serde_json::from_str(&pod.inside.run("ip", &["-j", "address", "show"])?)?;
    let netns = pod.enter(|| std::fs::metadata("/proc/thread-self/ns/net").map(|data| data.ino()))??;
    let mut found = BTreeMap::new();
    for link in shown {
        let name = link["ifname"].as_str().context("a link without a name")?;
        if name == "lo" {
            continue;
        }
        let host_index = number(&link["link_index"]);
        let (host_name, programs) = host_end(node, host_index)?;
        let addresses = link["addr_info"].as_array().into_iter().flatten();
        let addresses = addresses.filter(|address| address["scope"] == "global");
        found.insert(
            name.to_owned(),
            KernelInterface {
                index: number(&link["ifindex"]),
                mac: link["address"].as_str().unwrap_or_default().to_owned(),
                mtu: number(&link["mtu"]),
                addresses: addresses
                    .filter_map(|address| address["local"].as_str().map(str::to_owned))
                    .collect(),
                netns,
                host: (host_index, host_name),
                programs,
            },
        );
    }
    Ok(found)
}

fn number(value: &Value) -> u32 {
    value.as_u64().and_then(|number| number.try_into().ok()).unwrap_or(0)
}

/// The name of the node's interface with an index, and its programs.
fn host_end(node: &Namespaces, index: u32) -> Result<(String, BTreeSet<u32>)> {
    node.enter(|| {
        let name =
            kni_dataplane::interface_name(index).with_context(|| format!("the node has no interface {index}"))?;
        let mut programs = BTreeSet::new();
        for hook in [TcAttachType::Ingress, TcAttachType::Egress] {
            let (_revision, there) = SchedClassifier::query_tcx(&name, hook)?;
            programs.extend(there.iter().map(aya::programs::ProgramInfo::id));
        }
        Ok((name, programs))
    })?
}

impl Cluster {
    /// The differences between `PodInterface` objects or the annotation `network-status` and the kernel, for the
    /// running pods of all nodes.
    pub async fn untrue(&self) -> Result<Vec<String>> {
        let listed: Api<PodInterface> = Api::all(self.client.clone());
        let listed = listed.list(&ListParams::default()).await?.items;
        let mut objects: BTreeMap<(String, String), PodInterface> = listed
            .into_iter()
            .map(|object| ((object.namespace().unwrap_or_default(), object.name_any()), object))
            .collect();
        let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::all(self.client.clone());
        let pods = pods.list(&ListParams::default()).await?.items;
        let mut wrong = Vec::new();
        for member in &self.nodes {
            for pod in member.kubelet.running() {
                let what = format!("{}/{} on {}", pod.namespace, pod.name, member.name);
                let truth = interfaces(&member.node, &pod).with_context(|| what.clone())?;
                for (name, interface) in &truth {
                    let key = (
                        pod.namespace.clone(),
                        kni_api::pod_interface::name(&pod.name, &pod.uid, name),
                    );
                    let Some(object) = objects.remove(&key) else {
                        wrong.push(format!("{what}: {name} has no PodInterface"));
                        continue;
                    };
                    let lines = differences(member, &pod, name, interface, &object);
                    wrong.extend(lines.into_iter().map(|line| format!("{what}: {name}: {line}")));
                }
                let object = pods.iter().find(|object| object.uid().as_deref() == Some(&*pod.uid));
                let told = object.and_then(|object| object.annotations().get(STATUS));
                let lines = annotation_differences(told.map(String::as_str), &truth);
                wrong.extend(lines.into_iter().map(|line| format!("{what}: {line}")));
            }
        }
        wrong.extend(
            objects
                .keys()
                .map(|(ns, name)| format!("PodInterface {ns}/{name} is of no pod that runs")),
        );
        Ok(wrong)
    }
}

/// The annotation that clients of Multus read for a pod's interfaces.
pub const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";

fn differences(member: &Member, pod: &Pod, name: &str, truth: &KernelInterface, object: &PodInterface) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut check = |field: &str, told: String, is: String| {
        if told != is {
            wrong.push(format!("{field} is {is}, not {told}"));
        }
    };
    let spec = &object.spec;
    check("podName", spec.pod_name.clone(), pod.name.clone());
    check("podUid", spec.pod_uid.clone(), pod.uid.clone());
    check("nodeName", spec.node_name.clone(), member.name.clone());
    check("interfaceName", spec.interface_name.clone(), name.to_owned());
    check("sandboxId", spec.sandbox_id.clone(), pod.id.clone());
    let label = object.labels().get(kni_api::NETWORK_LABEL).cloned().unwrap_or_default();
    check("label of the network", label, spec.pod_network_name.clone());
    let owners: Vec<&str> = object.owner_references().iter().map(|owner| &*owner.uid).collect();
    check("owner", owners.join(","), pod.uid.clone());
    let status = object.status.clone().unwrap_or_default();
    check(
        "interfaceIndex",
        status.interface_index.to_string(),
        truth.index.to_string(),
    );
    check("mac", status.mac.clone(), truth.mac.clone());
    check("mtu", status.mtu.to_string(), truth.mtu.to_string());
    check("netnsInode", status.netns_inode.to_string(), truth.netns.to_string());
    check(
        "hostInterfaceIndex",
        status.host_interface_index.to_string(),
        truth.host.0.to_string(),
    );
    check(
        "hostInterfaceName",
        status.host_interface_name.clone(),
        truth.host.1.clone(),
    );
    let told: BTreeSet<&str> = status.addresses.iter().map(|address| &*address.ip).collect();
    let is: BTreeSet<&str> = truth.addresses.iter().map(String::as_str).collect();
    check("addresses", format!("{told:?}"), format!("{is:?}"));
    let told: BTreeSet<u32> = status.programs.iter().map(|program| program.program_id).collect();
    check("programs", format!("{told:?}"), format!("{:?}", truth.programs));
    let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready");
    let ready = ready.map_or(ConditionStatus::Unknown, |condition| condition.status);
    check("Ready", format!("{ready:?}"), format!("{:?}", ConditionStatus::True));
    wrong
}

/// Interfaces in the annotation: addresses and MAC by name.
fn annotation_differences(told: Option<&str>, truth: &BTreeMap<String, KernelInterface>) -> Vec<String> {
    let Some(told) = told else {
        return if truth.is_empty() {
            Vec::new()
        } else {
            vec!["the pod has no network-status".into()]
        };
    };
    let Ok(entries) = serde_json::from_str::<Vec<Value>>(told) else {
        return vec![format!("network-status is no list: {told}")];
    };
    let told: BTreeMap<String, (String, BTreeSet<String>)> = entries
        .iter()
        .map(|entry| {
            let text = |field: &str| entry[field].as_str().unwrap_or_default().to_owned();
            let ips = entry["ips"].as_array().into_iter().flatten();
            let ips = ips.filter_map(|ip| ip.as_str().map(str::to_owned)).collect();
            (text("interface"), (text("mac"), ips))
        })
        .collect();
    let is: BTreeMap<String, (String, BTreeSet<String>)> = truth
        .iter()
        .map(|(name, interface)| (name.clone(), (interface.mac.clone(), interface.addresses.clone())))
        .collect();
    if told == is {
        Vec::new()
    } else {
        vec![format!("network-status tells {told:?}, but it is {is:?}")]
    }
}
