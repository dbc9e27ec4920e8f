//! Changes endpoints, policies, services, shares and the time between batches.

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::Result;
use fastrand::Rng;
use ipnet::IpNet;
use kni_integration::{
    model::{Endpoint, World},
    programs::{INTERFACES, Lockstep},
};

use super::{
    addresses::{HOSTS, address4, address6, host_mac, mac},
    beside,
};

/// The number of networks, all with the same subnets; the last one has access to the node's stack.
pub(super) const NETWORKS: u32 = 3;
/// Flow limit of an endpoint while shares are limited.
const FEW: u32 = 2;

/// Changes the world of programs and model.
pub(super) struct Changes {
    /// The number of changes.
    pub(super) made: u64,
    /// Whether the flow limit is low.
    limited: bool,
}

fn subnets() -> [IpNet; 2] {
    [
        IpNet::new_assert(Ipv4Addr::new(10, 0, 0, 0).into(), 24),
        IpNet::new_assert(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0).into(), 64),
    ]
}

impl Changes {
    /// Two endpoints in each network, with the same addresses; two interfaces are free.
    pub(super) fn begin(rng: &mut Rng, step: &mut Lockstep) -> Result<Self> {
        for network in 1..=NETWORKS {
            step.set_all_routes(network, &subnets(), &beside::ranges(), network == NETWORKS)?;
        }
        beside::begin(rng, step, NETWORKS)?;
        for id in 1..=2 * NETWORKS {
            let network = id.div_ceil(2);
            let host = 2 + id % 2;
            step.publish(id, &endpoint(id, network, host, true, true, network == NETWORKS))?;
        }
        Ok(Self {
            made: 0,
            limited: false,
        })
    }

    /// Makes a few changes, or none.
    pub(super) fn some(&mut self, rng: &mut Rng, step: &mut Lockstep) -> Result<()> {
        for _ in 0..rng.u32(0..4) {
            if rng.bool() {
                one(rng, step)?;
            } else {
                beside::one(rng, step, NETWORKS)?;
            }
            self.made += 1;
        }
        if self.limited || rng.u32(0..12) == 0 {
            self.limited = !self.limited;
            step.clear_shares()?;
            step.configure(beside::LIFETIMES, if self.limited { FEW } else { 0 }, 0)?;
        }
        if rng.u32(0..500) == 0 {
            step.age(beside::STEP * rng.u32(1..3))?;
        }
        // Usually all endpoints are ready, because otherwise no frame would reach the later checks.
        for id in 1..=INTERFACES {
            if rng.bool() {
                step.set_ready(id, step.model.world.endpoint(id).is_some())?;
            }
        }
        Ok(())
    }
}

fn one(rng: &mut Rng, step: &mut Lockstep) -> Result<()> {
    let id = rng.u32(1..=INTERFACES);
    let known = step.model.world.endpoint(id).cloned();
    match (rng.u32(0..10), known) {
        (0 | 1, Some(_)) => step.set_ready(id, false),
        (2 | 3, Some(endpoint)) => step.publish(id, &endpoint),
        (4, Some(endpoint)) => {
            let host_access = !endpoint.host_access;
            step.publish(
                id,
                &Endpoint {
                    host_access,
                    ..endpoint
                },
            )
        }
        (5 | 6, Some(_)) => step.withdraw(id),
        (8, _) => {
            let network = rng.u32(1..=NETWORKS);
            let ranges = &beside::ranges()[rng.usize(0..3)..];
            step.set_all_routes(network, &subnets()[rng.usize(0..2)..], ranges, rng.u32(0..3) == 0)?;
            let now = rng.u32(1..=NETWORKS);
            step.set_all_routes(now, &subnets(), &beside::ranges(), now == NETWORKS)
        }
        (_, None) => join(rng, step, id),
        (_, Some(_)) => Ok(()),
    }
}

/// Publishes the slot's next owner.
fn join(rng: &mut Rng, step: &mut Lockstep, id: u32) -> Result<()> {
    match newcomer(rng, &step.model.world, id) {
        Some(endpoint) => step.publish(id, &endpoint),
        None => Ok(()),
    }
}

/// An owner of the slot, in any network, with any address that is free there.
pub(super) fn newcomer(rng: &mut Rng, world: &World, id: u32) -> Option<Endpoint> {
    let taken = |network, host| {
        let mut others = (1..=INTERFACES).filter_map(|other| world.endpoint(other));
        others.any(|other| {
            let same = other.ipv4 == Some(address4(host)) || other.ipv6 == Some(address6(host));
            other.network == network && same
        })
    };
    let mut free = None;
    for _ in 0..8 {
        let (network, host) = (rng.u32(1..=NETWORKS), rng.u32(2..2 + HOSTS));
        if !taken(network, host) {
            free = Some((network, host));
        }
    }
    let (network, host) = free?;
    let families = rng.u32(0..6);
    let host_access = (network == NETWORKS) != (rng.u32(0..10) == 0);
    Some(endpoint(id, network, host, families != 0, families != 1, host_access))
}

fn endpoint(id: u32, network: u32, host: u32, v4: bool, v6: bool, host_access: bool) -> Endpoint {
    Endpoint {
        network,
        ipv4: v4.then(|| address4(host)),
        ipv6: v6.then(|| address6(host)),
        mac: mac(id),
        host_mac: host_mac(id),
        host_access,
    }
}
