//! Gives the interfaces of a pod that has several of them routing tables of their own, by source address.

use ipnet::IpNet;
use kni_model::{Attachment, InterfaceKind, NetworkSpec, Sandbox, error_chain};
use kni_netlink::{self as netlink, Netns, SourceRouting};

/// The table of an interface and its addresses; none for kinds whose addresses a guest or a plugin configures. `spec`
/// is that of its network.
pub(crate) fn source_routing(attachment: &Attachment, spec: Option<&NetworkSpec>) -> Option<SourceRouting> {
    let gateways = match attachment.kind {
        InterfaceKind::Veth => attachment.gateways(),
        InterfaceKind::Macvlan(_) | InterfaceKind::HostDevice(_) => {
            spec.map(|spec| spec.provider.gateways().to_vec()).unwrap_or_default()
        }
        InterfaceKind::Tap(_) | InterfaceKind::Cni(_) => return None,
    };
    let with_prefix = |address| {
        let whole = IpNet::from(address);
        IpNet::new(address, attachment.prefix_len(address)).unwrap_or(whole)
    };
    Some(SourceRouting {
        ifindex: attachment.ifindex,
        addresses: attachment.addresses().map(with_prefix).collect(),
        gateways,
    })
}

/// Adds the tables and rules of the interfaces that are being attached, after those that the pod had before. The state
/// of the latter is the pod's own affair, for example where it has set one down: an error of theirs is only reported.
pub(crate) async fn add(netns: &Netns, present: Vec<SourceRouting>, new: Vec<SourceRouting>) -> netlink::Result<()> {
    let added = netns.visit(move |entrance| {
        let mut inside = entrance.enter()?;
        if let Err(error) = inside.add_source_routing(&present) {
            tracing::warn!(
                error = error_chain(&error),
                "an earlier interface of a pod has no routes by source address"
            );
        }
        inside.add_source_routing(&new)
    });
    added.await?
}

/// Removes the tables and rules of interfaces in the namespace of a sandbox; with the namespace they are gone.
/// Idempotent.
pub(crate) async fn remove(sandbox: &Sandbox, gone: Vec<SourceRouting>) -> netlink::Result<()> {
    let found = netlink::netns::open(&sandbox.netns).ok();
    let Some(netns) = found.filter(|netns| netns.id() == sandbox.netns_identity) else {
        return Ok(());
    };
    let removed = netns.visit(move |entrance| entrance.enter()?.remove_source_routing(&gone));
    removed.await?
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use kni_model::{
        Provider,
        provider::{Macvlan, MacvlanMode, Tap},
    };

    use super::*;
    use crate::plan::tests::attachment;

    const ROUTER: &str = "10.9.0.1";

    fn macvlan(gateways: &[&str]) -> Macvlan {
        Macvlan {
            parent: "eth9".parse().unwrap(),
            allow_uplink: false,
            mode: MacvlanMode::Bridge,
            gateways: gateways.iter().map(|text| text.parse().unwrap()).collect(),
        }
    }

    fn shown(found: &SourceRouting) -> (Vec<String>, Vec<String>) {
        let addresses = found.addresses.iter().map(ToString::to_string).collect();
        (addresses, found.gateways.iter().map(IpAddr::to_string).collect())
    }

    #[test]
    fn a_veth_pair_leads_to_its_gateways_whether_it_has_the_default_routes_or_not() {
        for default_route in [false, true] {
            let veth = Attachment {
                default_route,
                ..attachment(InterfaceKind::Veth)
            };
            let found = source_routing(&veth, None).unwrap();
            assert_eq!(found.ifindex, 3);
            let (addresses, gateways) = shown(&found);
            assert_eq!(addresses, ["10.9.0.5/32", "fd09::5/128"]);
            assert_eq!(gateways, ["169.254.1.1", "fe80::1"]);
        }
    }

    #[test]
    fn an_interface_on_a_shared_link_leads_to_its_link_and_the_gateways_of_its_network() {
        let (_, known) = crate::plan::tests::known("blue", 2, false, true);
        for (gateways, expected) in [(vec![], vec![]), (vec![ROUTER], vec![ROUTER])] {
            let macvlan = macvlan(&gateways);
            let spec = NetworkSpec {
                provider: Provider::Macvlan(macvlan.clone()),
                ..known.network.spec.clone()
            };
            let found = source_routing(&attachment(InterfaceKind::Macvlan(macvlan)), Some(&spec)).unwrap();
            let (addresses, gateways) = shown(&found);
            assert_eq!(addresses, ["10.9.0.5/16", "fd09::5/128"]);
            assert_eq!(gateways, expected);
        }
    }

    #[test]
    fn guests_and_plugins_decide_for_themselves() {
        let tap = Tap {
            owner: None,
            group: None,
            multi_queue: false,
        };
        assert_eq!(source_routing(&attachment(InterfaceKind::Tap(tap)), None), None);
    }
}
