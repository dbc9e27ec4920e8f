//! What clients are told about namespaces, sandboxes and networks.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
};

use kni_proto::kni::{CreateNetworkResponse, IpConfig, Network};
use tonic::Status;

use crate::model::{Attachment, Sandbox, view::NetworkView};

/// The answer to a created namespace.
pub(in crate::grpc) fn created(path: &Path) -> Result<CreateNetworkResponse, Status> {
    let text = path
        .to_str()
        .ok_or_else(|| Status::internal(format!("namespace path {} is not UTF-8", path.display())))?;
    Ok(CreateNetworkResponse {
        netns_path: text.to_owned(),
        extradata: extradata([("netns", text.to_owned())]),
    })
}

/// The interfaces of a sandbox by their names in the pod, and what is known of the sandbox itself.
pub(in crate::grpc) fn pod_network(sandbox: &Sandbox) -> (BTreeMap<String, IpConfig>, BTreeMap<String, String>) {
    let ipconfigs = sandbox
        .attachments
        .iter()
        .map(|a| (a.ifname.to_string(), ip_config(a)))
        .collect();
    let about = extradata([
        ("netns", sandbox.netns.display().to_string()),
        ("netns_inode", sandbox.netns_identity.inode.to_string()),
    ]);
    (ipconfigs, about)
}

/// The networks of the node in the given order, of which clients take the first as the node's readiness.
pub(in crate::grpc) fn node_networks(networks: &[NetworkView]) -> Vec<Network> {
    networks.iter().map(node_network).collect()
}

fn node_network(view: &NetworkView) -> Network {
    let spec = &view.network.spec;
    let subnets: Vec<String> = spec.subnets.iter().map(ToString::to_string).collect();
    let mut about = extradata([
        ("id", view.network.id.to_string()),
        ("default", spec.default.to_string()),
        ("subnets", subnets.join(",")),
        ("mtu", spec.mtu.to_string()),
    ]);
    if !view.ready {
        about.insert("reason".to_owned(), view.reason.clone());
    }
    Network {
        name: spec.name.to_string(),
        ready: view.ready,
        extradata: about,
    }
}

/// Addresses are bare and IPv4 comes first: the kubelet takes the first as the pod's address and drops all of them if
/// one does not parse.
fn ip_config(attachment: &Attachment) -> IpConfig {
    let v4 = attachment.ipv4.map(IpAddr::V4);
    let v6 = attachment.ipv6.map(IpAddr::V6);
    let mut about = extradata([
        ("network", attachment.network.to_string()),
        ("host_ifname", attachment.host_ifname.to_string()),
        ("host_ifindex", attachment.host_ifindex.to_string()),
        ("ifindex", attachment.ifindex.to_string()),
        ("mtu", attachment.mtu.to_string()),
        ("default_route", attachment.default_route.to_string()),
    ]);
    if v4.is_some() {
        about.insert(
            "gateway4".to_owned(),
            Ipv4Addr::from(kni_common::GATEWAY_V4).to_string(),
        );
    }
    if v6.is_some() {
        about.insert(
            "gateway6".to_owned(),
            Ipv6Addr::from(kni_common::GATEWAY_V6).to_string(),
        );
    }
    IpConfig {
        ip: v4.into_iter().chain(v6).map(|ip| ip.to_string()).collect(),
        mac: attachment.mac.to_string(),
        extradata: about,
    }
}

fn extradata<const N: usize>(entries: [(&str, String); N]) -> BTreeMap<String, String> {
    entries.map(|(key, value)| (key.to_owned(), value)).into()
}
