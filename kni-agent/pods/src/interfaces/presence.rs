//! Compares the record of an interface with the kernel, without rtnetlink.

use kni_model::{Attachment, InterfaceKind, Sandbox};
use kni_netlink::{self as netlink, InterfaceFacts};

/// Whether the interface of an attachment still exists: its host end under its own name and index, or for kinds without
/// one, the interface inside the pod. Three short system calls for the former, about 0.1 ms for the latter.
pub(crate) fn exists(sandbox: &Sandbox, attachment: &Attachment) -> bool {
    match attachment.kind {
        InterfaceKind::Veth => host_end_exists(attachment),
        InterfaceKind::Macvlan(_) | InterfaceKind::HostDevice(_) | InterfaceKind::Tap(_) | InterfaceKind::Cni(_) => {
            facts(sandbox, attachment).is_some()
        }
    }
}

/// Whether the host end still exists under its own name and index. Three short system calls, no netlink.
pub fn host_end_exists(attachment: &Attachment) -> bool {
    is_on_host(attachment.host_ifname.as_str(), attachment.host_ifindex)
}

/// Whether an interface of the node has this name and this index. Three short system calls, no netlink.
pub(crate) fn is_on_host(ifname: &str, ifindex: u32) -> bool {
    nix::net::if_::if_nametoindex(ifname).is_ok_and(|index| index == ifindex)
}

/// Problems of an interface that the row of the dataplane cannot show, for kinds other than veth; one sentence each.
pub fn problems_without_row(sandbox: &Sandbox, attachment: &Attachment) -> Vec<String> {
    let Attachment { ifname, kind, .. } = attachment;
    let Some(facts) = facts(sandbox, attachment) else {
        return vec![format!("interface {ifname} does not exist in the pod")];
    };
    let mut problems = Vec::new();
    if !facts.up {
        problems.push(format!("interface {ifname} is down"));
    }
    // The guest behind a tap device configures the addresses.
    if !matches!(kind, InterfaceKind::Tap(_)) {
        let missing = attachment
            .addresses()
            .filter(|address| !facts.addresses.contains(address));
        problems.extend(missing.map(|address| format!("interface {ifname} does not have address {address}")));
    }
    if kind.is_plugins() && !host_end_exists(attachment) {
        problems.push(format!("host interface {} does not exist", attachment.host_ifname));
    }
    problems
}

fn facts(sandbox: &Sandbox, attachment: &Attachment) -> Option<InterfaceFacts> {
    let inside = netlink::look_inside(&sandbox.netns, sandbox.netns_identity)?;
    inside
        .into_iter()
        .find(|facts| facts.name == attachment.ifname.as_str())
}

#[cfg(test)]
mod tests {
    use super::is_on_host;

    #[test]
    fn an_interface_is_known_by_its_name_and_its_index() {
        // The index of `lo` in every network namespace.
        assert!(is_on_host("lo", 1));
        assert!(!is_on_host("lo", 2));
        assert!(!is_on_host("no-such", 1));
        assert!(!is_on_host("no-such", 0));
    }
}
