//! Converts namespaces, sandboxes and networks to response messages.

use std::{collections::BTreeMap, net::IpAddr, path::Path};

use kni_model::{Attachment, Sandbox, view::NetworkView};
use kni_proto::{
    cni,
    kni::{CreateNetworkResponse, IpConfig, Network},
};
use tonic::Status;

/// The response for a created namespace.
pub(crate) fn created(path: &Path) -> Result<CreateNetworkResponse, Status> {
    let text = path
        .to_str()
        .ok_or_else(|| Status::internal(format!("namespace path {} is not UTF-8", path.display())))?;
    Ok(CreateNetworkResponse {
        netns_path: text.to_owned(),
        extradata: extradata([("netns", text.to_owned())]),
    })
}

/// The interfaces of a sandbox by their names in the pod, and the properties of the sandbox itself. A pod that
/// requested no primary interface has `none`: without it a client cannot distinguish its sandbox from an unknown one by
/// addresses.
pub(crate) fn pod_network(sandbox: &Sandbox) -> (BTreeMap<String, IpConfig>, BTreeMap<String, String>) {
    let ipconfigs = sandbox
        .attachments
        .iter()
        .map(|a| (a.ifname.to_string(), ip_config(a)))
        .collect();
    let mut about = extradata([
        ("netns", sandbox.netns.display().to_string()),
        ("netns_inode", sandbox.netns_identity.inode.to_string()),
    ]);
    if sandbox.has_no_primary_interface() {
        about.insert(cni::NONE.to_owned(), true.to_string());
    }
    (ipconfigs, about)
}

/// The networks of the node in the given order. Clients take the first one as the node's readiness.
pub(crate) fn node_networks(networks: &[NetworkView]) -> Vec<Network> {
    networks.iter().map(node_network).collect()
}

fn node_network(view: &NetworkView) -> Network {
    let spec = &view.network.spec;
    let subnets: Vec<String> = spec.subnets.iter().map(ToString::to_string).collect();
    let features: Vec<&str> = view.features.iter().map(|feature| feature.as_str()).collect();
    let mut about = extradata([
        ("id", view.network.id.to_string()),
        ("default", spec.default.to_string()),
        ("subnets", subnets.join(",")),
        ("mtu", spec.mtu.to_string()),
        ("provider", spec.provider.as_str().to_owned()),
        ("features", features.join(",")),
    ]);
    about.insert("addresses_total".to_owned(), view.total_addresses.to_string());
    about.insert("addresses_used".to_owned(), view.used_addresses.to_string());
    if !view.exhausted.is_empty() {
        about.insert("addresses_exhausted".to_owned(), view.exhausted.clone());
    }
    if spec.xdp {
        about.insert("xdp".to_owned(), spec.xdp.to_string());
    }
    if !view.ready {
        about.insert("reason".to_owned(), view.reason.clone());
    }
    Network {
        name: spec.name.to_string(),
        ready: view.ready,
        extradata: about,
    }
}

/// Addresses have no prefix and IPv4 comes first: the kubelet takes the first as the pod's address and drops all of
/// them if one does not parse.
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
        ("host_mac", attachment.host_mac.to_string()),
        ("routes", routes(attachment)),
        ("addresses", addresses(attachment)),
    ]);
    if attachment.xdp {
        about.insert("xdp".to_owned(), attachment.xdp.to_string());
    }
    for gateway in attachment.gateways() {
        let key = if gateway.is_ipv4() { "gateway4" } else { "gateway6" };
        about.insert(key.to_owned(), gateway.to_string());
    }
    IpConfig {
        ip: v4.into_iter().chain(v6).map(|ip| ip.to_string()).collect(),
        mac: attachment.mac.to_string(),
        extradata: about,
    }
}

/// The addresses of an interface, in the order of `ip`, as JSON. `gateway` is absent where the pod has none.
fn addresses(attachment: &Attachment) -> String {
    let gateways = attachment.gateways();
    let each = attachment.addresses().map(|ip| {
        let mut address = serde_json::Map::new();
        address.insert("family".to_owned(), family(ip).into());
        if let Some(gateway) = gateways.iter().find(|gateway| gateway.is_ipv4() == ip.is_ipv4()) {
            address.insert("gateway".to_owned(), gateway.to_string().into());
        }
        address.insert("ip".to_owned(), ip.to_string().into());
        address.insert("prefix".to_owned(), attachment.prefix_len(ip).into());
        serde_json::Value::from(address)
    });
    each.collect::<serde_json::Value>().to_string()
}

/// The name of an address family, as Kubernetes writes it.
fn family(ip: IpAddr) -> &'static str {
    if ip.is_ipv4() { "IPv4" } else { "IPv6" }
}

/// The routes inside the pod through an interface, as JSON with the field names of CNI.
fn routes(attachment: &Attachment) -> String {
    let told = attachment.pod_routes().into_iter().map(|(net, gateway)| match gateway {
        Some(gateway) => serde_json::json!({"dst": net, "gw": gateway}),
        None => serde_json::json!({"dst": net}),
    });
    let routes: Vec<_> = told.collect();
    serde_json::Value::from(routes).to_string()
}

fn extradata<const N: usize>(entries: [(&str, String); N]) -> BTreeMap<String, String> {
    entries.map(|(key, value)| (key.to_owned(), value)).into()
}
