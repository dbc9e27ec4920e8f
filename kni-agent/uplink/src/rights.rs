//! Holds who may use which addresses on this node, and reports which interfaces are refused egress.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use kni_model::{
    EndpointId,
    egress::{EgressRefusal, EgressUser, EgressWay, RefusedAddress},
};

use tokio::sync::watch;

use super::{State, Uplink};

/// Who may use which address on this node, or why not. An address that is missing may not be used.
pub type EgressRights = BTreeMap<(EgressUser, IpAddr), Result<EgressWay, EgressRefusal>>;

impl Uplink {
    /// Replaces the rights; they are applied in the background. `answering`: the addresses that this node takes for
    /// pods of other nodes, whether or not it has pods that leave with them. Returns the version of the rights; see
    /// [`Self::applied_rights`]. Waits for a change that is being carried out.
    pub fn set_rights(&self, rights: EgressRights, answering: BTreeSet<IpAddr>) -> u64 {
        let mut state = self.state();
        if state.rights.as_ref() != Some(&rights) || state.answering != answering {
            state.rights = Some(rights);
            state.answering = answering;
            state.rights_version.0 += 1;
            self.wake.notify_one();
        }
        state.rights_version.0
    }

    /// Notifies of versions of rights that were applied.
    pub fn applied(&self) -> watch::Receiver<u64> {
        self.applied.subscribe()
    }

    /// The version of the rights that were applied last: no address that they or later ones refuse is on the uplink.
    pub fn applied_rights(&self) -> u64 {
        self.state().rights_version.1
    }

    /// The egress addresses that are, or may be, on the uplink.
    pub fn held_addresses(&self) -> BTreeSet<IpAddr> {
        let state = self.state();
        let marked = state
            .node
            .uplink
            .as_ref()
            .map(|uplink| state.node.marked(uplink.ifindex));
        &state.record.addresses | &marked.unwrap_or_default()
    }

    /// The interfaces that no packet leaves, with the addresses that it would have to leave with.
    pub fn refused_interfaces(&self) -> BTreeMap<EndpointId, Vec<RefusedAddress>> {
        self.state().refused.clone()
    }

    /// The addresses that this node has the right to take and that cannot be used on this link, with the reasons.
    pub fn address_problems(&self) -> BTreeMap<IpAddr, EgressRefusal> {
        let state = self.state();
        let refused = state.refused.values().flatten();
        let of_link = refused.filter(|refused| !matches!(refused.refusal, EgressRefusal::Unverified));
        let known = of_link.filter(|refused| {
            let right = state
                .rights
                .as_ref()
                .and_then(|rights| rights.get(&(refused.user.clone(), refused.address)));
            matches!(right, Some(Ok(way)) if way.is_here())
        });
        let known = known.map(|refused| (refused.address, refused.refusal.clone()));
        known.chain(state.not_answered.clone()).collect()
    }
}

impl State {
    /// The addresses that this node takes for pods of other nodes. None of its own is among them.
    pub(super) fn answering_for_others(&self) -> BTreeSet<IpAddr> {
        &self.answering - &self.node.own(&self.record.addresses)
    }

    /// Records which of these addresses are not on the uplink, unless that passes.
    pub(super) fn set_not_answered(&mut self, missing: &BTreeMap<IpAddr, EgressRefusal>) {
        let own = self.node.own(&self.record.addresses);
        let of_node = self.answering.intersection(&own);
        let of_node = of_node.map(|address| (*address, EgressRefusal::Reserved("an address of this node".to_owned())));
        let missing = missing
            .iter()
            .filter(|(address, refusal)| self.answering.contains(address) && **refusal != EgressRefusal::Unverified);
        self.not_answered = missing
            .map(|(address, refusal)| (*address, refusal.clone()))
            .chain(of_node)
            .collect();
    }

    /// Records why nothing leaves an interface, and logs what is new.
    pub(super) fn set_refused(&mut self, endpoint: EndpointId, refused: &[RefusedAddress]) {
        let before = if refused.is_empty() {
            self.refused.remove(&endpoint)
        } else {
            self.refused.insert(endpoint, refused.to_owned())
        };
        if before.unwrap_or_default() != refused {
            for one in refused {
                tracing::info!(endpoint = endpoint.0, reason = %one, "nothing leaves the node from this interface");
            }
        }
    }
}
