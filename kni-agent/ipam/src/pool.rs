//! Owns the addresses of one family of one network: leased, never used, resting and released ones.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use super::{error::PoolError, interval::IntervalSet, usable::Usable};

/// How many released addresses a pool remembers the order of: those of a /22, and many times the pods of a node. Over
/// that, the one released longest ago counts as never used again; it would have been the next to be reused anyway.
/// Bounds the memory of a pool that is much larger than the number of its pods: 16 bytes for each address, for as long
/// as the agent runs.
const MAX_RELEASED: usize = 1024;

/// The usage of one family of a network, in addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FamilyUsage {
    /// Addresses that can be leased, in use or not.
    pub total: u128,
    /// Leases, including adopted ones outside the current ranges.
    pub used: u128,
    /// Addresses that can be leased now.
    pub free: u128,
    /// Addresses that can be leased again after their rest.
    pub resting: u128,
}

/// Every usable address is in exactly one of `leases`, `fresh`, `released` and `resting`.
#[derive(Debug, Default)]
pub(super) struct Pool {
    usable: Usable,
    /// Address to owner; may hold adopted addresses that are not usable.
    leases: BTreeMap<u128, String>,
    /// Free addresses that were not released recently.
    fresh: IntervalSet,
    released: Released,
    /// Addresses that only their last owner may have; some may not be usable.
    resting: BTreeMap<u128, Rest>,
    /// Start of the next search for a fresh address.
    cursor: u128,
}

/// The rest of an address.
#[derive(Debug)]
struct Rest {
    /// The last owner.
    owner: String,
    /// When it ends; `None` while others may know the last owner.
    end: Option<Duration>,
}

/// Addresses that can be leased again, in the order of their release. Without an index, since it grows with each pod
/// that ends: it is searched only for an address that a client or a record asks for.
#[derive(Debug, Default)]
struct Released(VecDeque<u128>);

impl Pool {
    /// Changes the ranges; leases and the order of released addresses stay.
    pub(super) fn set_usable(&mut self, usable: Usable) {
        self.usable = usable;
        self.fresh = self.usable.addresses.clone();
        self.released.retain(|address| self.usable.addresses.contains(address));
        let taken = self.leases.keys().chain(&self.released.0);
        for taken in taken.chain(self.resting.keys()) {
            self.fresh.remove(*taken, *taken);
        }
    }

    /// The address that a lease would get; changes nothing. `None` if the network does not have the family. Without a
    /// wish, one of `avoided` only if no other one is free.
    pub(super) fn choose(
        &self,
        owner: &str,
        wanted: Option<u128>,
        avoided: &[u128],
    ) -> Result<Option<u128>, PoolError> {
        if let Some(address) = wanted {
            if let Some(reason) = self.usable.lease_error(address) {
                return Err(PoolError::NotHere { address, reason });
            }
            self.check_unused(wanted)?;
            return match self.resting.get(&address).filter(|rest| rest.owner != owner) {
                Some(rest) => Err(PoolError::Rests { address, end: rest.end }),
                None => Ok(wanted),
            };
        }
        if !self.usable.has_subnets() {
            return Ok(None);
        }
        let first = || self.fresh.next_cyclic(self.cursor).or_else(|| self.released.longest());
        let free = self.free_beside(avoided).or_else(first);
        let found = free.or_else(|| self.own_resting(owner));
        found.map(Some).ok_or_else(|| self.no_free_address())
    }

    /// The free address that is leased next, without the avoided ones.
    fn free_beside(&self, avoided: &[u128]) -> Option<u128> {
        let mut from = self.cursor;
        // Each round leaves one avoided address behind.
        for _round in 0..=avoided.len() {
            match self.fresh.next_cyclic(from) {
                Some(address) if avoided.contains(&address) => from = address.wrapping_add(1),
                Some(address) => return Some(address),
                None => break,
            }
        }
        let mut released = self.released.0.iter().copied();
        released.find(|address| !avoided.contains(address))
    }

    /// An address that rests after this owner.
    fn own_resting(&self, owner: &str) -> Option<u128> {
        let mut own = self.usable_resting().filter(|(_, rest)| rest.owner == owner);
        own.next().map(|(address, _)| address)
    }

    fn usable_resting(&self) -> impl Iterator<Item = (u128, &Rest)> {
        let resting = self.resting.iter().map(|(address, rest)| (*address, rest));
        resting.filter(|(address, _)| self.usable.addresses.contains(*address))
    }

    fn no_free_address(&self) -> PoolError {
        let total = self.usable.addresses.count();
        match self.usable_resting().count() {
            0 => PoolError::Exhausted { total },
            resting => PoolError::AllRest {
                total,
                resting,
                end: self.usable_resting().filter_map(|(_, rest)| rest.end).min(),
            },
        }
    }

    /// The free address that is leased last; changes nothing.
    pub(super) fn spare(&self) -> Option<u128> {
        let newest = self.released.0.back().copied();
        newest.or_else(|| self.fresh.last_reaching(0, u128::MAX))
    }

    /// Leases an address that [`Self::choose`] found. A requested address does not move the cursor.
    pub(super) fn take(&mut self, address: u128, owner: &str, move_cursor: bool) {
        self.remove_free(address);
        self.resting.remove(&address);
        self.leases.insert(address, owner.to_owned());
        if move_cursor {
            self.cursor = address.wrapping_add(1);
        }
    }

    /// Removes an address from the free ones. It is in one of both only, of which the other one is slow to search.
    fn remove_free(&mut self, address: u128) {
        if self.fresh.contains(address) {
            self.fresh.remove(address, address);
        } else {
            self.released.remove(address);
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
        if self.leases.remove(&address).is_some() {
            self.free(address);
        }
    }

    /// Makes an address that is neither leased nor resting available, if it is usable.
    fn free(&mut self, address: u128) {
        if !self.usable.addresses.contains(address) {
            return;
        }
        if let Some(oldest) = self.released.push(address) {
            self.fresh.insert(oldest, oldest);
        }
    }

    /// Ends a lease whose owner others may know; an address without one is left as it is.
    pub(super) fn rest(&mut self, address: u128) {
        if let Some(owner) = self.leases.remove(&address) {
            self.resting.insert(address, Rest { owner, end: None });
        }
    }

    /// Takes over a rest. A leased address does not rest.
    pub(super) fn adopt_rest(&mut self, address: u128, owner: &str, end: Option<Duration>) {
        if !self.leases.contains_key(&address) {
            self.remove_free(address);
            let rest = Rest {
                owner: owner.to_owned(),
                end,
            };
            self.resting.insert(address, rest);
        }
    }

    /// Notes when the rest ends, as no other node knows the last owner; `None` if one may know it again. The first time
    /// counts. Returns whether that is new.
    pub(super) fn set_end_of_rest(&mut self, address: u128, end: Option<Duration>) -> bool {
        let Some(rest) = self.resting.get_mut(&address) else {
            return false;
        };
        let is_new = rest.end.is_some() != end.is_some();
        if is_new {
            rest.end = end;
        }
        is_new
    }

    /// When the next rest ends.
    pub(super) fn next_end_of_rest(&self) -> Option<Duration> {
        self.resting.values().filter_map(|rest| rest.end).min()
    }

    /// Ends the rests whose time is over, the first one first; returns their addresses.
    pub(super) fn end_rests(&mut self, now: Duration) -> Vec<u128> {
        let is_over = |rest: &Rest| rest.end.is_some_and(|end| end <= now);
        let over = self.resting.iter().filter(|(_, rest)| is_over(rest));
        let mut over: Vec<(Option<Duration>, u128)> = over.map(|(address, rest)| (rest.end, *address)).collect();
        over.sort_unstable();
        for (_, address) in &over {
            self.resting.remove(address);
            self.free(*address);
        }
        over.into_iter().map(|(_, address)| address).collect()
    }

    /// The leased addresses, in order.
    pub(super) fn leased(&self) -> impl Iterator<Item = u128> {
        self.leases.keys().copied()
    }

    /// The resting addresses, in order, also those that are not usable.
    pub(super) fn resting(&self) -> impl Iterator<Item = u128> {
        self.resting.keys().copied()
    }

    /// Whether no address is leased or rests.
    pub(super) fn is_unused(&self) -> bool {
        self.leases.is_empty() && self.resting.is_empty()
    }

    pub(super) fn usage(&self) -> FamilyUsage {
        FamilyUsage {
            total: self.usable.addresses.count(),
            used: self.leases.len() as u128,
            free: self.fresh.count() + self.released.len() as u128,
            resting: self.usable_resting().count() as u128,
        }
    }
}

impl Released {
    /// Returns the address that is no longer remembered for it. That one goes first: room for one more would double the
    /// memory of the queue.
    fn push(&mut self, address: u128) -> Option<u128> {
        let oldest = if self.0.len() < MAX_RELEASED {
            None
        } else {
            self.0.pop_front()
        };
        self.0.push_back(address);
        oldest
    }

    /// Takes constant time for the address released longest ago, which is leased next.
    fn remove(&mut self, address: u128) {
        if self.longest() == Some(address) {
            self.0.pop_front();
        } else if let Some(place) = self.0.iter().position(|released| *released == address) {
            self.0.remove(place);
        }
    }

    fn retain(&mut self, keep: impl Fn(u128) -> bool) {
        self.0.retain(|address| keep(*address));
    }

    /// The address released longest ago.
    fn longest(&self) -> Option<u128> {
        self.0.front().copied()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node makes and ends pods for as long as it runs, in a range that they never use up.
    #[test]
    fn released_addresses_need_no_more_memory_after_many_pods_than_after_some() {
        let mut usable = Usable::default();
        usable.addresses.insert(0, u128::from(u64::MAX));
        let mut pool = Pool::default();
        pool.set_usable(usable);
        let mut life = || {
            let address = pool.fresh.next_cyclic(pool.cursor).unwrap();
            pool.take(address, "pod", true);
            pool.release(address);
            (pool.released.0.capacity(), pool.usage())
        };
        let (few, _) = (0..MAX_RELEASED).map(|_| life()).next_back().unwrap();
        let (many, usage) = (0..100 * MAX_RELEASED).map(|_| life()).next_back().unwrap();
        assert!(many <= few, "room for {few} addresses, then for {many}");
        assert_eq!((usage.used, usage.free), (0, usage.total));
    }
}
