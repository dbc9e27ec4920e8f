//! Verifies that no other host has an address before the node takes it, and announces addresses that it has taken.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use kni_model::{MacAddr, egress::EgressRefusal};
use kni_netlink::Netlink;

use super::{State, Uplink, UplinkError, node::UplinkLink};

/// How long it counts that no host was found: the address is added at once.
const FRESH: Duration = Duration::from_secs(5);
/// Interval at which an address that cannot be used is looked for again.
pub(super) const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// What was found out about an address.
#[derive(Debug)]
pub(super) struct Verified {
    ifindex: u32,
    at: Instant,
    result: Result<(), EgressRefusal>,
}

impl State {
    /// Whether an address may be added to the uplink now.
    pub(super) fn may_add(&self, uplink: &UplinkLink, address: IpAddr) -> Result<(), EgressRefusal> {
        match self.verified.get(&address) {
            Some(found) if found.ifindex != uplink.ifindex => Err(EgressRefusal::Unverified),
            Some(found) if found.result.is_ok() && found.at.elapsed() > FRESH => Err(EgressRefusal::Unverified),
            Some(found) => found.result.clone(),
            None => Err(EgressRefusal::Unverified),
        }
    }

    /// Whether an address was found that cannot be used: it is looked for again later.
    pub(super) fn has_conflict(&self) -> bool {
        self.verified.values().any(|found| found.result.is_err())
    }
}

impl Uplink {
    /// Looks for other hosts that have the addresses that are about to be added. Blocks for up to 0.6 s if there are
    /// such addresses; holds no lock meanwhile.
    pub(super) fn verify(&self) {
        let (uplink, addresses, moving) = {
            let mut state = self.state();
            let Some(uplink) = state.node.uplink.clone() else {
                return;
            };
            if !state.is_complete() {
                return;
            }
            let desired = self.desired_addresses(&state);
            state.verified.retain(|address, _| desired.contains(address));
            let unknown = desired.into_iter().filter(|address| {
                let is_there = state.node.has(uplink.ifindex, *address) && state.record.addresses.contains(address);
                let conflict = state.verified.get(address).is_some_and(|found| {
                    found.ifindex == uplink.ifindex && found.result.is_err() && found.at.elapsed() < LOOK_AGAIN
                });
                !is_there && !conflict && state.may_add(&uplink, *address).is_err()
            });
            let unknown: BTreeSet<IpAddr> = unknown.collect();
            (uplink, unknown, state.answering.clone())
        };
        if addresses.is_empty() {
            return;
        }
        let found = self.examine(&uplink, &addresses, &moving).unwrap_or_else(|error| {
            let failed = |address: &IpAddr| (*address, EgressRefusal::NotAdded(error.to_string()));
            addresses.iter().map(failed).collect()
        });
        let mut state = self.state();
        for address in addresses {
            let result = found.get(&address).cloned().map_or(Ok(()), Err);
            let before = state.verified.get(&address).map(|before| before.result.clone());
            if let Err(refusal) = &result
                && before.as_ref() != Some(&result)
            {
                tracing::warn!(reason = refusal.message(address), "an egress address cannot be used");
            }
            let verified = Verified {
                ifindex: uplink.ifindex,
                at: Instant::now(),
                result,
            };
            state.verified.insert(address, verified);
        }
    }

    /// The addresses that cannot be used: gateways, neighbours, addresses that a host answers for. What the kernel
    /// knows of the neighbour with an address in `moving` may be the node that had it before: such a one is asked.
    fn examine(
        &self,
        uplink: &UplinkLink,
        addresses: &BTreeSet<IpAddr>,
        moving: &BTreeSet<IpAddr>,
    ) -> Result<BTreeMap<IpAddr, EgressRefusal>, UplinkError> {
        let gateways = self.block_on(self.netlink.list_gateways())?;
        let neighbours = self.block_on(self.netlink.list_neighbours())?;
        let mut found = BTreeMap::new();
        for address in addresses {
            let neighbour = neighbours
                .iter()
                .find(|neighbour| neighbour.address == *address && neighbour.confirmed)
                .filter(|neighbour| neighbour.fixed || !moving.contains(address));
            if gateways.contains(address) {
                let what = "the gateway of a route of this node".to_owned();
                found.insert(*address, EgressRefusal::Reserved(what));
            } else if let Some(neighbour) = neighbour {
                found.insert(*address, EgressRefusal::Conflict { mac: neighbour.mac });
            }
        }
        let remaining: BTreeSet<IpAddr> = addresses
            .iter()
            .filter(|one| !found.contains_key(*one))
            .copied()
            .collect();
        // A link without MAC addresses has two ends: no third host could have an address.
        if let Some(own) = self.mac_of(uplink)?.filter(|_| !remaining.is_empty()) {
            let hosts = Netlink::find_hosts(uplink.ifindex, own, &remaining)?.into_iter();
            found.extend(hosts.map(|(address, mac)| (address, EgressRefusal::Conflict { mac })));
        }
        Ok(found)
    }

    fn mac_of(&self, uplink: &UplinkLink) -> Result<Option<MacAddr>, UplinkError> {
        let link = self.block_on(self.netlink.get_link(uplink.ifindex))?;
        Ok(link.and_then(|link| link.mac))
    }

    /// Announces the addresses that were added since the last call. Blocks for 0.1 s if there are any.
    pub(super) fn announce(&self) {
        let (uplink, addresses) = {
            let mut state = self.state();
            (state.node.uplink.clone(), std::mem::take(&mut state.added))
        };
        let Some(uplink) = uplink.filter(|_| !addresses.is_empty()) else {
            return;
        };
        let announced = self.mac_of(&uplink).and_then(|own| match own {
            Some(own) => Ok(Netlink::announce_addresses(uplink.ifindex, own, &addresses)?),
            None => Ok(()),
        });
        if let Err(error) = announced {
            // Other hosts learn the address when they ask for it.
            tracing::warn!(%error, "cannot announce egress addresses");
        }
    }
}
