//! Derives the pods of other nodes from their `PodInterface`s, after a check of what these claim. Pure.
//!
//! A node's account may write any `PodInterface` that names the node. What such an object claims beyond that is compared
//! with objects that the node cannot write: the pod must exist, with this UID and on this node, and its addresses must
//! lie in blocks of the node. So no node gives an address of another node the identity of a pod, nor the identity of
//! another node's pod to its own address.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use kni_cluster::{Key, Networks, Tables};
use kni_crd::{PodFacts, PodInterface};
use kni_model::{
    IfName, NetworkId, NetworkName, PodRef, SandboxId,
    policy::{PolicyInterface, PolicyPod},
    selection::PRIMARY_IFNAME,
};

use super::blocks::is_unit_of;

/// The pods of other nodes that policies may select.
#[derive(Debug, Default)]
pub(super) struct Peers {
    pub(super) pods: BTreeMap<SandboxId, PolicyPod>,
    /// Objects with a false claim, and the claim.
    pub(super) refused: BTreeMap<Key, String>,
}

/// The blocks of each node, by network.
type Blocks<'a> = BTreeMap<(&'a str, &'a str), Vec<IpNet>>;

impl Peers {
    /// The pods of all nodes but `node`, with their interfaces in networks that have a number.
    pub(super) fn of(
        tables: &Tables,
        networks: &Networks,
        node: &str,
        numbers: &BTreeMap<NetworkName, NetworkId>,
    ) -> Self {
        let mut peers = Self::default();
        let blocks = blocks(tables);
        for (key, object) in tables.interfaces.rows() {
            let spec = &object.spec;
            if spec.node_name == node {
                continue;
            }
            // Gone, or replaced by a pod of the same name: its object will go, too.
            let pod = tables.pods.get(&key.namespace, &spec.pod_name);
            let Some(pod) = pod.filter(|pod| pod.uid == spec.pod_uid) else {
                continue;
            };
            let Some(interface) = interface(object, numbers) else {
                continue;
            };
            // Plugins assign addresses of other ranges.
            let assigned = networks
                .spec(&interface.network)
                .is_none_or(|spec| spec.blocks.is_some());
            let blocks = assigned.then_some(&blocks);
            if let Err(reason) = check(object, &interface, pod, blocks) {
                peers.refused.insert(key.clone(), reason);
                continue;
            }
            let Ok(sandbox) = format!("peer:{}", spec.pod_uid).parse::<SandboxId>() else {
                continue;
            };
            let known = peers.pods.entry(sandbox.clone()).or_insert_with(|| PolicyPod {
                sandbox,
                pod: PodRef {
                    namespace: key.namespace.clone(),
                    name: spec.pod_name.clone(),
                    uid: spec.pod_uid.clone(),
                },
                labels: pod.labels.clone(),
                ports: pod.ports.clone(),
                interfaces: Vec::new(),
            });
            // During an upgrade the object may exist under its earlier name as well.
            if known.interfaces.iter().all(|other| other.ifname != interface.ifname) {
                known.interfaces.push(interface);
            }
        }
        peers
    }
}

fn blocks(tables: &Tables) -> Blocks<'_> {
    let mut blocks = Blocks::new();
    for (key, object) in tables.networks.rows() {
        for block in object.status.iter().flat_map(|status| &status.blocks) {
            // The list has each range once, but not each address: a wider range would cover units of other nodes.
            if let Ok(cidr) = block.cidr.parse()
                && is_unit_of(object, &cidr)
            {
                blocks.entry((&key.name, &block.node)).or_default().push(cidr);
            }
        }
    }
    blocks
}

/// What the object claims falsely. Without `blocks` addresses are not compared.
fn check(
    object: &PodInterface,
    interface: &PolicyInterface,
    pod: &PodFacts,
    blocks: Option<&Blocks<'_>>,
) -> Result<(), String> {
    let spec = &object.spec;
    if pod.node != spec.node_name {
        return Err(format!(
            "spec.nodeName is {}, but pod {} is assigned to {:?}",
            spec.node_name, spec.pod_name, pod.node
        ));
    }
    let Some(blocks) = blocks else { return Ok(()) };
    let own = blocks.get(&(spec.pod_network_name.as_str(), spec.node_name.as_str()));
    let ipv4 = interface.ipv4.map(IpAddr::V4);
    let ipv6 = interface.ipv6.map(IpAddr::V6);
    for address in ipv4.into_iter().chain(ipv6) {
        if !own.is_some_and(|own| own.iter().any(|block| block.contains(&address))) {
            return Err(format!(
                "address {address} is in no block of node {} in network {}",
                spec.node_name, spec.pod_network_name
            ));
        }
    }
    Ok(())
}

/// The interface, if its network has a number.
fn interface(object: &PodInterface, numbers: &BTreeMap<NetworkName, NetworkId>) -> Option<PolicyInterface> {
    let network: NetworkName = object.spec.pod_network_name.parse().ok()?;
    let ifname: IfName = object.spec.interface_name.parse().ok()?;
    let status = object.status.as_ref()?;
    let addresses = || status.addresses.iter().filter_map(|address| address.ip.parse().ok());
    Some(PolicyInterface {
        endpoint: None,
        primary: ifname.as_str() == PRIMARY_IFNAME,
        ifname,
        network_id: *numbers.get(&network)?,
        network,
        ipv4: addresses().find_map(|ip| match ip {
            IpAddr::V4(v4) => Some(v4),
            IpAddr::V6(_) => None,
        }),
        ipv6: addresses().find_map(|ip| match ip {
            IpAddr::V6(v6) => Some(v6),
            IpAddr::V4(_) => None,
        }),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kni_cluster::HeldBlocks;
    use serde_json::json;

    use super::*;

    /// Node n2 has pod web with UID u1 and block 10.0.0.64/26.
    fn tables() -> Tables {
        let mut tables = Tables::default();
        let network = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "red" },
            "spec": { "subnets": ["10.0.0.0/16"] },
            "status": { "blocks": [
                { "cidr": "10.0.0.64/26", "node": "n2" }, { "cidr": "10.0.0.128/26", "node": "n3" },
                // No unit: it covers the block of n3.
                { "cidr": "10.0.0.0/24", "node": "n2" },
            ]},
        });
        let network = serde_json::from_value(network).unwrap();
        tables.networks.put(Key::new("", "red"), Some(Arc::new(network)));
        let web = PodFacts {
            uid: "u1".to_owned(),
            node: "n2".to_owned(),
            ..PodFacts::default()
        };
        tables.pods.put(Key::new("shop", "web"), Some(Arc::new(web)));
        tables
    }

    fn put(tables: &mut Tables, name: &str, uid: &str, node: &str, address: &str) {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodInterface",
            "metadata": { "name": name, "namespace": "shop" },
            "spec": {
                "podName": "web", "podUid": uid, "nodeName": node, "podNetworkName": "red", "interfaceName": "eth0",
                "sandboxId": "s",
            },
            "status": { "addresses": [{ "ip": address, "family": "IPv4" }] },
        });
        let object = serde_json::from_value(object).unwrap();
        tables.interfaces.put(Key::new("shop", name), Some(Arc::new(object)));
    }

    fn peers(tables: &Tables) -> Peers {
        let networks = Networks::of(tables, &HeldBlocks::new());
        let numbers = [("red".parse().unwrap(), NetworkId::try_from(7).unwrap())].into();
        Peers::of(tables, &networks, "n1", &numbers)
    }

    #[test]
    fn an_object_of_the_pods_own_node_gives_its_identity() {
        let mut tables = tables();
        put(&mut tables, "web.eth0.u1", "u1", "n2", "10.0.0.65");
        // The same interface under the name of an earlier release.
        put(&mut tables, "web.eth0", "u1", "n2", "10.0.0.65");
        let peers = peers(&tables);
        let pods: Vec<_> = peers.pods.values().collect();
        assert_eq!((pods.len(), pods[0].interfaces.len()), (1, 1), "{pods:?}");
        assert_eq!(pods[0].interfaces[0].ipv4, Some([10, 0, 0, 65].into()));
        assert!(peers.refused.is_empty());
    }

    #[test]
    fn false_claims_give_nobody_an_identity() {
        for (uid, node, address, reason) in [
            ("u0", "n2", "10.0.0.65", None),
            (
                "u1",
                "n3",
                "10.0.0.129",
                Some("spec.nodeName is n3, but pod web is assigned to \"n2\""),
            ),
            (
                "u1",
                "n2",
                "10.0.0.129",
                Some("address 10.0.0.129 is in no block of node n2 in network red"),
            ),
            (
                "u1",
                "n2",
                "10.0.7.1",
                Some("address 10.0.7.1 is in no block of node n2 in network red"),
            ),
        ] {
            let mut tables = tables();
            put(&mut tables, "web.eth0.forged", uid, node, address);
            let peers = peers(&tables);
            assert!(peers.pods.is_empty(), "{uid} {node} {address}");
            assert_eq!(peers.refused.values().next().map(String::as_str), reason);
        }
    }
}
