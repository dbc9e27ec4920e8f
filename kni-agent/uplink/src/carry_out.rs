//! Applies the desired state to the dataplane and the uplink, in an order that never sends a packet without a return
//! path.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    net::IpAddr,
};

use kni_common::uplink::HostPortKey;
use kni_dataplane::{EgressRow, HostPort, XdpChoice};
use kni_model::{
    EndpointId, Fabric, NetworkSpec,
    egress::{EgressRefusal, RefusedAddress},
    network::EgressMode,
    policy::PolicyPod,
};
use kni_store::{Change, UplinkRecord};

use super::{
    EgressRights, State, Uplink, UplinkError,
    desired::{self, Egress},
    has_host_port, log_uplink,
    node::{self, NodeNetwork, UplinkLink},
    report::NODE_UNSERVED,
};

/// Addresses that are not on the uplink although their users have the right to them, with the reasons.
type Missing = BTreeMap<IpAddr, EgressRefusal>;

fn dedicated_of(egress: &[(EndpointId, Egress)]) -> BTreeSet<IpAddr> {
    egress
        .iter()
        .flat_map(|(_, egress)| egress.dedicated.keys().copied())
        .collect()
}

/// An address that the kernel refused is added later. Others wait for what they depend on.
fn first_failure(missing: &Missing) -> Result<(), UplinkError> {
    let mut failed = missing
        .iter()
        .filter(|(_, refusal)| matches!(refusal, EgressRefusal::NotAdded(_)));
    failed.next().map_or(Ok(()), |(address, refusal)| {
        Err(UplinkError::Address(refusal.message(*address)))
    })
}

impl Uplink {
    /// Applies the whole desired state. The rows of the pods are written last when egress is enabled, and removed first
    /// when it is disabled. An address that cannot be added affects only the pods that use it.
    pub(super) fn carry_out(&self, state: &mut State, node: NodeNetwork) -> Result<(), UplinkError> {
        if (&node.uplink, &node.unusable) != (&state.node.uplink, &state.node.unusable) {
            log_uplink(&node);
        }
        self.dataplane.set_node_routes(node.routes())?;
        state.node = node;
        if !state.is_complete() {
            return Ok(());
        }
        let pods = state.pods.values();
        let egress: Vec<_> = pods.flat_map(|known| self.egress_of(state, &known.pod)).collect();
        let version = state.rights_version.0;
        let mut dedicated = &dedicated_of(&egress) | &state.answering_for_others();
        let mut missing = Missing::new();
        if let Some(uplink) = state.node.uplink.clone() {
            missing = self.prepare(state, &uplink, &dedicated)?;
        }
        state.set_not_answered(&missing);
        self.set_host_ports(state)?;
        state
            .refused
            .retain(|endpoint, _| egress.iter().any(|(other, _)| other == endpoint));
        self.set_egress(state, &egress, &missing)?;
        dedicated.retain(|address| !missing.contains_key(address));
        if let Some(uplink) = state.node.uplink.clone() {
            self.tidy(state, &uplink, &dedicated)?;
        }
        // After others are removed from the uplink, and before their release is reported. While the node has no uplink,
        // nothing is removed from the interface.
        let is_there = state.node.uplink.is_some();
        self.dataplane
            .set_held_addresses(if is_there { &dedicated } else { &state.record.addresses })?;
        state.rights_version.1 = version;
        self.applied.send_replace(version);
        first_failure(&missing)?;
        match state.node.unusable.clone() {
            Some(unusable) if Self::needs_programs(state) => Err(unusable.into()),
            _ => Ok(()),
        }
    }

    /// Applies the egress of one pod that is about to be published.
    pub(super) fn carry_out_pod(&self, state: &mut State, pod: &PolicyPod) -> Result<(), UplinkError> {
        let egress = self.egress_of(state, pod);
        let mut missing = Missing::new();
        if let Some(uplink) = state.node.uplink.clone() {
            let dedicated = dedicated_of(&egress);
            missing = self.add_addresses(state, &uplink, &dedicated)?;
            if dedicated.iter().any(|address| state.added.contains(address)) {
                // The background task does the rest.
                self.wake.notify_one();
            }
        }
        self.set_egress(state, &egress, &missing)?;
        first_failure(&missing)
    }

    /// Without one of its dedicated addresses an interface has no egress, instead of egress with another address. While
    /// one that several nodes share is on its way to this node, its flows stay: the dataplane drops their packets.
    fn set_egress(
        &self,
        state: &mut State,
        egress: &[(EndpointId, Egress)],
        missing: &Missing,
    ) -> Result<(), UplinkError> {
        for (endpoint, egress) in egress {
            let mut refused = egress.refused.clone();
            refused.extend(egress.dedicated.iter().filter_map(|(address, user)| {
                let refusal = missing.get(address)?.clone();
                Some(RefusedAddress {
                    address: *address,
                    user: user.clone(),
                    refusal,
                })
            }));
            let is_decisive = |refused: &RefusedAddress| {
                let passes = matches!(refused.refusal, EgressRefusal::Unverified | EgressRefusal::Unforwarded);
                !passes || !egress.shared.contains(&refused.address)
            };
            let row = match &egress.source {
                _ if refused.iter().any(is_decisive) => EgressRow::Refused,
                Some(source) => EgressRow::From(source.clone()),
                None => EgressRow::None,
            };
            self.dataplane.set_masquerade(*endpoint, &row)?;
            state.set_refused(*endpoint, &refused);
        }
        Ok(())
    }

    /// The addresses that the pods may use and that are not the node's own.
    pub(super) fn desired_addresses(&self, state: &State) -> BTreeSet<IpAddr> {
        let pods = state.pods.values();
        let egress: Vec<_> = pods.flat_map(|known| self.egress_of(state, &known.pod)).collect();
        &dedicated_of(&egress) | &state.answering_for_others()
    }

    /// Applies the host ports after a pod with host ports has been published.
    pub(super) fn carry_out_host_ports(&self, state: &mut State) -> Result<(), UplinkError> {
        if let Some(uplink) = state.node.uplink.clone() {
            self.attach(state, &uplink)?;
        }
        self.set_host_ports(state)
    }

    pub(super) fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// Reads the current network of the node, without the addresses in `ours`.
    pub(super) fn read_node(&self, ours: &BTreeSet<IpAddr>) -> Result<NodeNetwork, UplinkError> {
        let read = node::read(&self.netlink, self.options.interface.as_deref(), ours);
        Ok(self.block_on(read)?)
    }

    fn egress_of(&self, state: &State, pod: &PolicyPod) -> Vec<(EndpointId, Egress)> {
        let own = state.node.own(&state.record.addresses);
        let none = EgressRights::new();
        let facts = desired::Facts {
            node: &state.node,
            own: &own,
            ports: &self.options.ports,
            rights: state.rights.as_ref().unwrap_or(&none),
        };
        let interfaces = pod.interfaces.iter();
        let egress = interfaces.filter_map(|interface| {
            let endpoint = interface.endpoint?;
            let spec = state.networks.as_ref()?.get(&interface.network)?;
            let requested = self.policies.egress_addresses(endpoint);
            Some((endpoint, facts.egress(spec, interface, &requested)))
        });
        egress.collect()
    }

    /// Whether TC programs are needed at the uplink.
    pub(super) fn needs_programs(state: &State) -> bool {
        let networks = state.networks.iter().flat_map(BTreeMap::values);
        // Also where packets reach other nodes: only the tunnel may send to its port.
        let needs = |spec: &NetworkSpec| spec.egress == EgressMode::Masquerade || spec.fabric != Fabric::None;
        !state.answering.is_empty()
            || networks.into_iter().any(needs)
            || state.pods.values().any(|known| has_host_port(&known.mappings))
    }

    /// Sets up everything that a packet needs before it leaves.
    fn prepare(
        &self,
        state: &mut State,
        uplink: &UplinkLink,
        dedicated: &BTreeSet<IpAddr>,
    ) -> Result<Missing, UplinkError> {
        self.leave_former(state, uplink)?;
        let missing = self.add_addresses(state, uplink, dedicated)?;
        if Self::needs_programs(state) {
            self.attach(state, uplink)?;
        }
        self.keep_out(state, uplink)?;
        Ok(missing)
    }

    fn attach(&self, state: &mut State, uplink: &UplinkLink) -> Result<(), UplinkError> {
        self.record(state, uplink, state.record.addresses.clone())?;
        self.dataplane.attach_uplink(&uplink.ifname, uplink.ifindex)?;
        self.dataplane.set_uplink(Some(uplink.ifindex))?;
        Ok(())
    }

    /// Blocks denied sources: first the list, then the program that reads it.
    fn keep_out(&self, state: &mut State, uplink: &UplinkLink) -> Result<(), UplinkError> {
        let networks = || state.networks.iter().flat_map(BTreeMap::values);
        let networks = self.options.drop_bogons.then(networks);
        let (rows, real) = desired::sources(&self.options.deny, networks, &state.node.connected());
        if real != state.logged {
            for subnet in &real {
                tracing::warn!(%subnet, "the node itself is in this subnet of a pod network: its sources are let in");
            }
            state.logged = real;
        }
        self.dataplane.set_sources(&rows)?;
        if self.options.xdp != XdpChoice::Off {
            self.record(state, uplink, state.record.addresses.clone())?;
        }
        self.dataplane
            .set_uplink_xdp(&uplink.ifname, uplink.ifindex, self.options.xdp)?;
        Ok(())
    }

    /// Cleans up the previous uplink if another interface has become the uplink.
    fn leave_former(&self, state: &mut State, uplink: &UplinkLink) -> Result<(), UplinkError> {
        let former = state.record.clone();
        if former.ifname.is_empty() || former.ifindex == uplink.ifindex {
            return Ok(());
        }
        tracing::info!(former = %former.ifname, now = %uplink.ifname, "another interface is the uplink");
        for address in &former.addresses {
            self.block_on(self.netlink.del_egress_address(former.ifindex, *address))?;
        }
        // Links move with their pins, which have the same name for every uplink.
        kni_dataplane::remove_uplink_filters(&former.ifname);
        self.commit(state, UplinkRecord::default())
    }

    fn add_addresses(
        &self,
        state: &mut State,
        uplink: &UplinkLink,
        desired: &BTreeSet<IpAddr>,
    ) -> Result<Missing, UplinkError> {
        let is_there =
            |address: &IpAddr| state.node.has(uplink.ifindex, *address) && state.record.addresses.contains(address);
        let absent = desired.iter().filter(|address| !is_there(address));
        let checked: Vec<_> = absent
            .map(|address| (*address, state.may_add(uplink, *address)))
            .collect();
        let mut missing = Missing::new();
        let mut new = BTreeSet::new();
        for (address, checked) in checked {
            match checked {
                Ok(()) => drop(new.insert(address)),
                Err(refusal) => drop(missing.insert(address, refusal)),
            }
        }
        if missing.values().any(|refusal| *refusal == EgressRefusal::Unverified) {
            // The background task verifies them.
            self.wake.notify_one();
        }
        // Without the rows of other nodes' shares the node's stack would reset their connections. The background task
        // adds the address when they are known.
        let unforwarded = &(&new & &state.answering) - &self.answered.borrow();
        new.retain(|address| !unforwarded.contains(address));
        missing.extend(
            unforwarded
                .into_iter()
                .map(|address| (address, EgressRefusal::Unforwarded)),
        );
        if new.is_empty() {
            return Ok(missing);
        }
        // Without the programs the node's stack would get what other nodes' pods are sent.
        if Self::needs_programs(state) {
            self.attach(state, uplink)?;
        }
        // Recorded before they are added (I5): a restarted agent must not take them for addresses of the node.
        self.record(state, uplink, &state.record.addresses | &new)?;
        self.dataplane.set_held_addresses(&state.record.addresses)?;
        for address in new {
            tracing::info!(%address, ifname = %uplink.ifname, "adding an egress address");
            state.verified.remove(&address);
            match self.block_on(self.netlink.add_egress_address(uplink.ifindex, address)) {
                Ok(()) => drop(state.added.insert(address)),
                Err(error) => drop(missing.insert(address, EgressRefusal::NotAdded(error.to_string()))),
            }
        }
        state.node.addresses = self.block_on(node::read_addresses(&self.netlink))?;
        self.dataplane.set_node_routes(state.node.routes())?;
        Ok(missing)
    }

    /// Removes everything that is no longer needed.
    fn tidy(&self, state: &mut State, uplink: &UplinkLink, dedicated: &BTreeSet<IpAddr>) -> Result<(), UplinkError> {
        // Marked addresses without a record belong to an agent whose state was lost.
        let ours: BTreeSet<IpAddr> = &state.record.addresses | &state.node.marked(uplink.ifindex);
        let unused: Vec<IpAddr> = ours.difference(dedicated).copied().collect();
        for address in &unused {
            tracing::info!(%address, ifname = %uplink.ifname, "removing an egress address that nothing uses");
            self.block_on(self.netlink.del_egress_address(uplink.ifindex, *address))?;
        }
        if !Self::needs_programs(state) {
            let touched = !state.record.ifname.is_empty();
            self.dataplane
                .detach_uplink(touched.then_some(uplink.ifname.as_str()))?;
            self.dataplane.set_uplink(None)?;
        }
        let used = Self::needs_programs(state) || self.options.xdp != XdpChoice::Off || !dedicated.is_empty();
        if used {
            self.record(state, uplink, dedicated.clone())
        } else {
            self.commit(state, UplinkRecord::default())
        }
    }

    fn set_host_ports(&self, state: &mut State) -> Result<(), UplinkError> {
        let own = state.node.own(&state.record.addresses);
        let rows: BTreeMap<HostPortKey, HostPort> = desired::host_ports(state.pods.values(), &own);
        self.dataplane.set_host_ports(&rows)?;
        state.host_ports = rows.len();
        self.set_node_ports(state, &own);
        self.end_node_sockets(state);
        Ok(())
    }

    /// A failure concerns only the node's own processes: it is shown, and everything else is served.
    fn set_node_ports(&self, state: &mut State, own: &BTreeSet<IpAddr>) {
        let rows: BTreeMap<HostPortKey, HostPort> = desired::node_ports(state.pods.values(), own);
        let failed = self.dataplane.set_node_ports(&rows).err();
        let unserved = failed.map(|error| kni_model::error_chain(&error));
        if unserved != state.node_unserved {
            if let Some(reason) = &unserved {
                tracing::warn!(reason, "{NODE_UNSERVED}");
            } else {
                tracing::info!("the node's own processes reach the host ports");
            }
            state.node_unserved = unserved;
        }
    }

    fn record(&self, state: &mut State, uplink: &UplinkLink, addresses: BTreeSet<IpAddr>) -> Result<(), UplinkError> {
        let record = UplinkRecord {
            ifname: uplink.ifname.clone(),
            ifindex: uplink.ifindex,
            addresses,
        };
        self.commit(state, record)
    }

    fn commit(&self, state: &mut State, record: UplinkRecord) -> Result<(), UplinkError> {
        if state.record != record {
            self.store.commit(Change::new().uplink(&record))?;
            state.record = record;
        }
        Ok(())
    }
}
