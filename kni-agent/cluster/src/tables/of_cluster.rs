//! Names the kinds that kni-controller follows.

use super::{Kept, Tables};

impl Tables {
    /// The kinds that kni-controller needs.
    fn of_cluster(&self) -> [(&'static str, &dyn Kept); 13] {
        [
            ("podnetworks", &self.networks),
            ("podnetworkattachments", &self.attachments),
            ("podinterfaces", &self.interfaces),
            ("egresspolicies", &self.egress_objects),
            ("egressaddresspools", &self.egress_pools),
            ("egressaddressclaims", &self.egress_claims),
            ("services", &self.services),
            ("addresses of services", &self.service_addresses),
            ("endpointslices", &self.slices),
            ("namespaces", &self.namespaces),
            ("pods", &self.pods),
            ("nodes", &self.nodes),
            ("nodenetworks", &self.node_networks),
        ]
    }

    /// The kinds that kni-controller follows where they are served.
    fn recent(&self) -> [(&'static str, &dyn Kept); 7] {
        [
            ("addressblocks", &self.blocks),
            ("networkmembers", &self.members),
            ("networknumbers", &self.numbers),
            ("nodeendpoints", &self.node_endpoints),
            ("networkpolicies", &self.network_policies),
            ("multi-networkpolicies", &self.multi_policies),
            ("network-attachment-definitions", &self.definition_names),
        ]
    }

    /// The kinds that kni-controller needs whose first list is not complete yet.
    pub fn missing_of_cluster(&self) -> Vec<&'static str> {
        let behind = self.of_cluster().into_iter().filter(|(_, table)| !table.is_synced());
        behind.map(|(name, _)| name).collect()
    }

    /// The kinds that kni-controller follows and the API server refuses to send, each with the reason.
    pub fn refused_of_cluster(&self) -> Vec<String> {
        let all = self.of_cluster().into_iter().chain(self.recent());
        // Definitions of an earlier release lack some kinds.
        let served = all.filter(|(_, table)| !table.is_absent());
        let refused = served.filter_map(|(name, table)| Some(format!("{name}: {}", table.problem()?)));
        refused.collect()
    }

    /// The number of cached objects by kind that kni-controller follows.
    pub fn counts_of_cluster(&self) -> Vec<(&'static str, usize)> {
        let all = self.of_cluster().into_iter().chain(self.recent());
        all.map(|(name, table)| (name, table.len())).collect()
    }
}
