//! Compares the pod's namespace and the node's routes with the record of an interface.

use std::net::IpAddr;

use ipnet::IpNet;
use kni_model::{Attachment, Sandbox, error_chain, provider::InterfaceKind};
use kni_netlink::{self as netlink, Netlink, PodInterface};

/// Why the namespace of a pod could not be read.
#[derive(Debug, thiserror::Error)]
enum Unreadable {
    #[error("the pod's namespace cannot be read: {}", error_chain(.0))]
    Netlink(#[from] netlink::Error),
    #[error("{0} is another namespace by now")]
    Replaced(String),
}

/// Problems of an interface inside the pod and in the node's stack, one sentence each. Takes a millisecond, and blocks:
/// call it on a blocking thread.
pub(crate) fn problems_inside(node: &Netlink, sandbox: &Sandbox, attachment: &Attachment) -> Vec<String> {
    let Ok(runtime) = tokio::runtime::Handle::try_current() else {
        return Vec::new();
    };
    runtime.block_on(async {
        let mut problems = match pod_interfaces(sandbox).await {
            Ok(interfaces) => compare(attachment, &interfaces),
            Err(problem) => vec![problem.to_string()],
        };
        if attachment.host_access {
            problems.extend(missing_host_routes(node, attachment).await);
        }
        problems
    })
}

async fn pod_interfaces(sandbox: &Sandbox) -> Result<Vec<PodInterface>, Unreadable> {
    let netns = netlink::netns::open(&sandbox.netns)?;
    if netns.id() != sandbox.netns_identity {
        return Err(Unreadable::Replaced(sandbox.netns.display().to_string()));
    }
    let inside = Netlink::in_namespace(&netns).await?;
    Ok(inside.pod_interfaces().await?)
}

async fn missing_host_routes(node: &Netlink, attachment: &Attachment) -> Vec<String> {
    let routes = match node.list_our_routes().await {
        Ok(routes) => routes,
        Err(error) => return vec![format!("the node's routes cannot be read: {}", error_chain(&error))],
    };
    let there = |address: &IpAddr| {
        let mut routes = routes.iter();
        routes.any(|route| route.destination.addr() == *address && route.ifindex == attachment.host_ifindex)
    };
    let missing = attachment.addresses().filter(|address| !there(address));
    missing
        .map(|address| format!("the node has no route to {address}"))
        .collect()
}

/// Differences inside the pod.
fn compare(attachment: &Attachment, interfaces: &[PodInterface]) -> Vec<String> {
    let ifname = &attachment.ifname;
    let Some(found) = interfaces.iter().find(|found| found.link.name == ifname.as_str()) else {
        return vec![format!("interface {ifname} does not exist in the pod")];
    };
    let mut problems = Vec::new();
    if !found.link.up {
        problems.push(format!("interface {ifname} is down in the pod"));
    }
    if found.link.mac.is_some_and(|mac| mac != attachment.mac) {
        problems.push(format!("interface {ifname} has another MAC address in the pod"));
    }
    // Guests, plugins or parent links configure the other kinds.
    if attachment.kind != InterfaceKind::Veth {
        return problems;
    }
    for address in attachment.addresses() {
        if !found.addresses.iter().any(|net| net.addr() == address) {
            problems.push(format!("interface {ifname} has lost the address {address}"));
        }
        let gateway = netlink::own::gateway_of(address);
        for net in expected_routes(attachment, address) {
            let mut routes = found.routes.iter();
            if !routes.any(|route| route.destination == net && route.gateway == Some(gateway)) {
                problems.push(format!("interface {ifname} has lost the route to {net}"));
            }
        }
    }
    problems
}

fn expected_routes(attachment: &Attachment, address: IpAddr) -> impl Iterator<Item = IpNet> {
    let any = match address {
        IpAddr::V4(_) => IpNet::V4(ipnet::Ipv4Net::default()),
        IpAddr::V6(_) => IpNet::V6(ipnet::Ipv6Net::default()),
    };
    let of_family = move |net: &IpNet| net.addr().is_ipv4() == address.is_ipv4();
    let default = attachment.default_route.then_some(any);
    default
        .into_iter()
        .chain(attachment.routes.iter().copied().filter(of_family))
}
