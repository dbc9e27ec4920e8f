//! Owns the addresses of one family of one network: leased, never used, and released ones.

use std::collections::BTreeMap;

use super::{error::PoolError, interval::IntervalSet, usable::Usable};

/// How many released addresses a pool remembers the order of. Beyond that, the one released longest ago counts as never
/// used again; it would have been the next to be reused anyway. Bounds the memory of a pool that is much larger than
/// the number of its pods.
const MAX_RESTING: usize = 65_536;

/// The usage of one family of a network, in addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FamilyUsage {
    /// Addresses that can be leased, in use or not.
    pub total: u128,
    /// Leases, including adopted ones outside the current ranges.
    pub used: u128,
    /// Addresses that can be leased now.
    pub free: u128,
}

/// Every usable address is in exactly one of `leases`, `fresh` and `resting`.
#[derive(Debug, Default)]
pub(super) struct Pool {
    usable: Usable,
    /// Address to owner; may hold adopted addresses that are not usable.
    leases: BTreeMap<u128, String>,
    /// Free addresses that were not released recently.
    fresh: IntervalSet,
    resting: Resting,
    /// Start of the next search for a fresh address.
    cursor: u128,
}

/// Released addresses, in the order of their release.
#[derive(Debug, Default)]
struct Resting {
    by_turn: BTreeMap<u64, u128>,
    turns: BTreeMap<u128, u64>,
    next_turn: u64,
}

impl Pool {
    /// Changes the ranges; leases and the order of released addresses stay.
    pub(super) fn set_usable(&mut self, usable: Usable) {
        self.usable = usable;
        self.fresh = self.usable.addresses.clone();
        self.resting.retain(|address| self.usable.addresses.contains(address));
        for taken in self.leases.keys().chain(self.resting.turns.keys()) {
            self.fresh.remove(*taken, *taken);
        }
    }

    /// The address that a lease would get; changes nothing. `None` if the network does not have the family.
    pub(super) fn choose(&self, wanted: Option<u128>) -> Result<Option<u128>, PoolError> {
        if let Some(address) = wanted {
            if let Some(reason) = self.usable.lease_error(address) {
                return Err(PoolError::NotHere { address, reason });
            }
            self.check_unused(wanted)?;
            return Ok(wanted);
        }
        if !self.usable.has_subnets() {
            return Ok(None);
        }
        let found = self.fresh.next_cyclic(self.cursor).or_else(|| self.resting.longest());
        let total = self.usable.addresses.count();
        found.map(Some).ok_or(PoolError::Exhausted { total })
    }

    /// Leases an address that [`Self::choose`] found. A requested address does not move the cursor.
    pub(super) fn take(&mut self, address: u128, owner: &str, move_cursor: bool) {
        self.fresh.remove(address, address);
        self.resting.remove(address);
        self.leases.insert(address, owner.to_owned());
        if move_cursor {
            self.cursor = address.wrapping_add(1);
        }
    }

    /// Leases any unused address, including one that is not usable, and continues the search after it.
    pub(super) fn adopt(&mut self, address: u128, owner: &str) {
        self.take(address, owner, false);
        self.cursor = self.cursor.max(address.saturating_add(1));
    }

    pub(super) fn check_unused(&self, address: Option<u128>) -> Result<(), PoolError> {
        match address.and_then(|address| self.leases.get_key_value(&address)) {
            Some((&address, owner)) => Err(PoolError::InUse {
                address,
                owner: owner.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Ends a lease; an address without one is left as it is.
    pub(super) fn release(&mut self, address: u128) {
        if self.leases.remove(&address).is_none() || !self.usable.addresses.contains(address) {
            return;
        }
        self.resting.push(address);
        if self.resting.len() > MAX_RESTING
            && let Some(oldest) = self.resting.longest()
        {
            self.resting.remove(oldest);
            self.fresh.insert(oldest, oldest);
        }
    }

    /// The leased addresses, in order.
    pub(super) fn leased(&self) -> impl Iterator<Item = u128> {
        self.leases.keys().copied()
    }

    pub(super) fn is_unused(&self) -> bool {
        self.leases.is_empty()
    }

    pub(super) fn usage(&self) -> FamilyUsage {
        FamilyUsage {
            total: self.usable.addresses.count(),
            used: self.leases.len() as u128,
            free: self.fresh.count() + self.resting.len() as u128,
        }
    }
}

impl Resting {
    fn push(&mut self, address: u128) {
        self.by_turn.insert(self.next_turn, address);
        self.turns.insert(address, self.next_turn);
        self.next_turn += 1;
    }

    fn remove(&mut self, address: u128) {
        if let Some(turn) = self.turns.remove(&address) {
            self.by_turn.remove(&turn);
        }
    }

    fn retain(&mut self, keep: impl Fn(u128) -> bool) {
        self.by_turn.retain(|_, address| keep(*address));
        self.turns.retain(|address, _| keep(*address));
    }

    /// The address released longest ago.
    fn longest(&self) -> Option<u128> {
        self.by_turn.first_key_value().map(|(_, address)| *address)
    }

    fn len(&self) -> usize {
        self.turns.len()
    }
}
