//! Compares what a pod's namespace and the node's routes have with what was made.

use std::net::IpAddr;

use ipnet::IpNet;
use kni_model::{Attachment, Sandbox, provider::InterfaceKind};
use kni_netlink as netlink;
use kni_netlink::{Netlink, PodInterface};

use super::{Inner, error::chain};

impl Inner {
    /// What is wrong with an interface as the pod and the node's stack see it, one sentence each. Takes a millisecond,
    /// and blocks: not for a task's own thread.
    pub(super) fn problems_inside(&self, sandbox: &Sandbox, attachment: &Attachment) -> Vec<String> {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return Vec::new();
        };
        runtime.block_on(async {
            let mut problems = match self.pod_interfaces(sandbox).await {
                Ok(interfaces) => compare(attachment, &interfaces),
                Err(problem) => vec![problem],
            };
            if attachment.host_access {
                problems.extend(self.missing_host_routes(attachment).await);
            }
            problems
        })
    }

    async fn pod_interfaces(&self, sandbox: &Sandbox) -> Result<Vec<PodInterface>, String> {
        let failed = |error: netlink::Error| format!("the pod's namespace cannot be looked at: {}", chain(&error));
        let netns = netlink::netns::open(&sandbox.netns).map_err(failed)?;
        if netns.id() != sandbox.netns_identity {
            return Err(format!("{} is another namespace by now", sandbox.netns.display()));
        }
        let inside = Netlink::in_namespace(&netns).await.map_err(failed)?;
        inside.pod_interfaces().await.map_err(failed)
    }

    async fn missing_host_routes(&self, attachment: &Attachment) -> Vec<String> {
        let routes = match self.netlink.list_our_routes().await {
            Ok(routes) => routes,
            Err(error) => return vec![format!("the node's routes cannot be read: {}", chain(&error))],
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
}

/// What differs inside the pod.
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
    // What other kinds have inside is whoever's inside them.
    if attachment.kind != InterfaceKind::Veth {
        return problems;
    }
    for address in attachment.addresses() {
        if !found.addresses.iter().any(|net| net.addr() == address) {
            problems.push(format!("interface {ifname} has lost the address {address}"));
        }
        let gateway = netlink::own::gateway_of(address);
        for net in wanted_routes(attachment, address) {
            let mut routes = found.routes.iter();
            if !routes.any(|route| route.destination == net && route.gateway == Some(gateway)) {
                problems.push(format!("interface {ifname} has lost the route to {net}"));
            }
        }
    }
    problems
}

fn wanted_routes(attachment: &Attachment, address: IpAddr) -> impl Iterator<Item = IpNet> {
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
