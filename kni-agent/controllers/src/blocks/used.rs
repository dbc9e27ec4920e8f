//! Decides which blocks the node may not release yet.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use ipnet::IpNet;
use kni_cluster::HeldBlocks;
use kni_model::NetworkName;

use super::super::ObjectControllers;

/// The addresses that pods have, and those that rest after pods.
pub(super) struct Used {
    leases: BTreeMap<NetworkName, Vec<IpAddr>>,
    resting: BTreeMap<NetworkName, Vec<IpAddr>>,
    held: Arc<HeldBlocks>,
}

impl Used {
    pub(super) fn of(controllers: &ObjectControllers) -> Self {
        Self {
            leases: (controllers.state.leases)(),
            resting: (controllers.state.resting)(),
            held: controllers.cache.blocks().held(),
        }
    }

    /// Whether one of them is in a block. Those in another block that is held belong to that one: a network that was
    /// made again may have units of another size, and a block of before would be needed for as long as pods have
    /// addresses of such a unit.
    pub(super) fn has(&self, network: &NetworkName, block: &IpNet) -> bool {
        let all = [&self.leases, &self.resting].into_iter();
        let mut all = all.filter_map(|addresses| addresses.get(network)).flatten();
        all.any(|address| block.contains(address) && !self.is_elsewhere(network, block, address))
    }

    fn is_elsewhere(&self, network: &NetworkName, block: &IpNet, address: &IpAddr) -> bool {
        let held = self.held.get(network);
        held.into_iter()
            .flatten()
            .any(|other| other != block && other.contains(address))
    }

    /// Whether a pod has an address of a block.
    pub(super) fn is_leased(&self, network: &NetworkName, block: &IpNet) -> bool {
        let leases = self.leases.get(network);
        leases.is_some_and(|leases| leases.iter().any(|address| block.contains(address)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(leases: &[&str], resting: &[&str], held: &[&str]) -> Used {
        let red: NetworkName = "red".parse().unwrap();
        let of = |addresses: &[&str]| {
            let addresses = addresses.iter().map(|address| address.parse().unwrap());
            [(red.clone(), addresses.collect())].into()
        };
        let held = held.iter().map(|block| block.parse().unwrap()).collect();
        Used {
            leases: of(leases),
            resting: of(resting),
            held: Arc::new([(red.clone(), held)].into()),
        }
    }

    fn has(used: &Used, block: &str) -> bool {
        used.has(&"red".parse().unwrap(), &block.parse().unwrap())
    }

    #[test]
    fn a_block_with_addresses_in_use_is_not_released() {
        let used = used(&["10.0.0.65"], &["10.0.0.130", "fd00::1"], &[]);
        for (block, expected) in [
            ("10.0.0.64/26", true),
            ("10.0.0.128/26", true),
            ("fd00::/122", true),
            ("10.0.0.192/26", false),
        ] {
            assert_eq!(has(&used, block), expected, "{block}");
        }
        assert!(!used.has(&"blue".parse().unwrap(), &"10.0.0.64/26".parse().unwrap()));
    }

    /// The network was deleted and made again with other units while a pod was running. The unit with the pod's address
    /// is claimed, and new pods get addresses of it.
    #[test]
    fn a_block_of_an_earlier_network_does_not_wait_for_pods_of_the_present_one() {
        for unit in ["10.0.0.64/28", "10.0.0.0/24"] {
            let covered = used(&["10.0.0.70", "10.0.0.71"], &["10.0.0.72"], &[unit]);
            assert!(!has(&covered, "10.0.0.64/26"), "{unit}");
            assert!(has(&covered, unit), "the present block is in use");
        }
        // One that no present block has.
        let beside = used(&["10.0.0.70", "10.0.0.100"], &[], &["10.0.0.64/28"]);
        assert!(has(&beside, "10.0.0.64/26"));
    }
}
