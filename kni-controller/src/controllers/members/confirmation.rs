//! Decides which members of a report are confirmed. Pure.

use std::net::IpAddr;

use ipnet::IpNet;
use kni_api::{
    NetworkMembersSpec, NetworkMembersStatus,
    network_members::{ConfirmedMember, MemberKind, MemberPort, NetworkMember, RefusedMember},
    provider::ProviderType,
};
use kni_cluster::Tables;
use kni_crd::{PodFacts, PodNetwork};
use kni_ipam::blocks::{Prefixes, object_name, unit_of};
use kni_model::NetworkName;

/// Maximum size in bytes of what one member adds to an object, as JSON: labels, and named ports. With 64 such members
/// an object stays below the 1.5 MiB that etcd stores.
const MOST_BYTES: usize = 16 * 1024;
/// The status of a report.
pub(super) fn status(tables: &Tables, spec: &NetworkMembersSpec) -> NetworkMembersStatus {
    let mut status = NetworkMembersStatus::default();
    let owner = owner(tables, spec);
    for member in &spec.members {
        let confirmed = owner.as_ref().map_err(Clone::clone).and_then(|network| {
            let pod = pod_of(tables, spec, member)?;
            check_addresses(tables, network, spec, member)?;
            let kind = kind_of(pod);
            check_size(&kind).map(|()| kind)
        });
        match confirmed {
            Ok(kind) => {
                let known = status.kinds.iter().position(|known| *known == kind);
                let position = known.unwrap_or_else(|| {
                    status.kinds.push(kind);
                    status.kinds.len() - 1
                });
                status.members.push(ConfirmedMember {
                    member: member.clone(),
                    kind: u32::try_from(position).unwrap_or(u32::MAX),
                });
            }
            Err(reason) => status.refused.push(RefusedMember {
                pod_uid: member.pod_uid.clone(),
                interface: member.interface.clone(),
                reason,
            }),
        }
    }
    status.summary = format!("{}/{}", status.members.len(), spec.members.len());
    status
}

/// The network, if it and the node are those of the report.
fn owner<'a>(tables: &'a Tables, spec: &NetworkMembersSpec) -> Result<&'a PodNetwork, String> {
    let node = tables.nodes.get("", &spec.node_name).map(|row| row.uid.as_str());
    if node != Some(&spec.node_uid) {
        return Err(format!("spec.nodeUID is not the UID of node {}", spec.node_name));
    }
    let network = tables.networks.get("", &spec.network).map(AsRef::as_ref);
    network
        .filter(|network| network.metadata.uid.as_ref() == Some(&spec.network_uid))
        .ok_or_else(|| format!("spec.networkUID is not the UID of network {}", spec.network))
}

fn pod_of<'a>(tables: &'a Tables, spec: &NetworkMembersSpec, member: &NetworkMember) -> Result<&'a PodFacts, String> {
    let NetworkMember {
        namespace,
        pod_name,
        pod_uid,
        ..
    } = member;
    let pod = tables.pods.get(namespace, pod_name).filter(|pod| pod.uid == *pod_uid);
    let pod = pod.ok_or_else(|| format!("there is no pod {namespace}/{pod_name} with UID {pod_uid}"))?;
    if pod.node != spec.node_name {
        return Err(format!(
            "pod {namespace}/{pod_name} is assigned to node {:?}, not to {}",
            pod.node, spec.node_name
        ));
    }
    if pod.host_network {
        return Err(format!("pod {namespace}/{pod_name} uses the network of its node"));
    }
    Ok(pod)
}

/// Whether the addresses lie in blocks of the node. CNI plugins assign addresses without blocks.
fn check_addresses(
    tables: &Tables,
    network: &PodNetwork,
    spec: &NetworkMembersSpec,
    member: &NetworkMember,
) -> Result<(), String> {
    if !has_blocks(network) {
        return Ok(());
    }
    for text in &member.addresses {
        let address: IpAddr = text.parse().map_err(|_not_one| format!("{text} is no address"))?;
        if !is_of_node(tables, network, spec, address) {
            return Err(format!(
                "address {address} is in no block of node {} in network {}",
                spec.node_name, spec.network
            ));
        }
    }
    Ok(())
}

/// Whether addresses of the network are assigned from blocks: those of CNI plugins are not.
pub(super) fn has_blocks(network: &PodNetwork) -> bool {
    let provider = network.spec.provider.as_ref();
    provider.is_none_or(|provider| provider.kind != ProviderType::Cni)
}

/// Whether the labels of a pod leave room for those of the other members.
fn check_size(kind: &MemberKind) -> Result<(), String> {
    let size = serde_json::to_vec(kind).map_or(usize::MAX, |json| json.len());
    if size > MOST_BYTES {
        return Err(format!(
            "its labels and ports have {size} bytes as JSON, more than {MOST_BYTES}"
        ));
    }
    Ok(())
}

/// Whether the unit of an address is a block of the node.
fn is_of_node(tables: &Tables, network: &PodNetwork, spec: &NetworkMembersSpec, address: IpAddr) -> bool {
    let subnets: Vec<IpNet> = network.spec.subnets.iter().filter_map(|net| net.parse().ok()).collect();
    let asked = network.spec.per_node_prefix.unwrap_or_default();
    let asked = Prefixes {
        ipv4: asked.ipv4,
        ipv6: asked.ipv6,
    };
    let Some(unit) = unit_of(&subnets, asked, address) else {
        return false;
    };
    let Ok(name) = spec.network.parse::<NetworkName>() else {
        return false;
    };
    let block = tables.blocks.get("", &object_name(&name, &unit));
    block.is_some_and(|block| {
        let owner = &block.spec;
        owner.network_uid == spec.network_uid && owner.node_name == spec.node_name && owner.node_uid == spec.node_uid
    })
}

fn kind_of(pod: &PodFacts) -> MemberKind {
    let ports = pod.ports.iter().map(|port| MemberPort {
        name: port.name.clone(),
        protocol: port.protocol,
        port: port.port,
    });
    MemberKind {
        labels: pod.labels.clone(),
        ports: ports.collect(),
    }
}
