//! Publishes what operators see of the uplink: a status never waits for a change that is being carried out, and is
//! never older than the change before it.

use std::{
    net::IpAddr,
    ops::{Deref, DerefMut},
    sync::{Mutex, MutexGuard},
};

use super::{State, Uplink, lock, node::UplinkLink};

/// The part of the state that operators see.
#[derive(Debug, Clone)]
pub(super) struct Shown {
    pub(super) uplink: Option<UplinkLink>,
    /// Egress addresses on the uplink.
    pub(super) dedicated: Vec<IpAddr>,
    /// Rows of host ports.
    pub(super) host_ports: usize,
    /// Why the node's own processes do not reach host ports.
    pub(super) node_unserved: Option<String>,
    /// Why the desired state is not applied.
    pub(super) problem: Option<String>,
    /// Whether the programs of the uplink must be attached: something needs them, and all inputs are known.
    pub(super) needs_programs: bool,
}

impl Shown {
    pub(super) fn of(state: &State) -> Self {
        Self {
            uplink: state.node.uplink.clone(),
            dedicated: state.record.addresses.iter().copied().collect(),
            host_ports: state.host_ports,
            node_unserved: state.node_unserved.clone(),
            problem: state.problem.clone(),
            needs_programs: Uplink::needs_programs(state) && state.is_complete(),
        }
    }
}

/// The locked state. Its release publishes it, so that the status shows every completed change.
pub(super) struct Held<'a> {
    state: MutexGuard<'a, State>,
    shown: &'a Mutex<Shown>,
}

impl<'a> Held<'a> {
    pub(super) const fn new(state: MutexGuard<'a, State>, shown: &'a Mutex<Shown>) -> Self {
        Self { state, shown }
    }
}

impl Deref for Held<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        *lock(self.shown) = Shown::of(&self.state);
    }
}
