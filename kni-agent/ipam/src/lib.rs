//! Leases addresses: owns the address pools of each network and their leases, without side effects.
//! Layer: engine.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use kni_model::{NetworkName, NetworkSpec};

pub mod blocks;
mod error;
mod interval;
mod pool;
#[cfg(test)]
mod tests;
mod usable;

pub use error::{Family, IpamError, LeaseError};
pub use pool::FamilyUsage;
use pool::Pool;
use usable::Usable;

/// How long an address rests after others have learned that its last owner is gone.
pub const REST: Duration = Duration::from_secs(10);

/// The addresses leased to one attachment: one of each family that the network has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// IPv4 address, if the network has IPv4 subnets.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address, if the network has IPv6 subnets.
    pub ipv6: Option<Ipv6Addr>,
}

/// The usage of a network, in addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Addresses that can be leased to pods, both families together, whether in use or not.
    pub total: u128,
    /// Leases, both families together.
    pub used: u128,
    /// IPv4 alone.
    pub ipv4: FamilyUsage,
    /// IPv6 alone.
    pub ipv6: FamilyUsage,
}

/// The leases of all networks of the node.
///
/// Addresses are unique within a network and independent between networks. A released address is leased again only when
/// the pool has no fresh address left, the one released longest ago first; explicitly requested addresses are exempt.
///
/// An address whose owner other nodes may know rests after its lease ([`Ipam::rest`]): until [`REST`] after
/// [`Ipam::set_withdrawn`] no other owner gets it, also not by an explicit request. Times are those of one clock that
/// never steps back, and are given by the caller.
///
/// No state survives a restart: [`Ipam::adopt`] and [`Ipam::adopt_rest`] rebuild it.
#[derive(Debug)]
pub struct Ipam {
    networks: BTreeMap<NetworkName, Pools>,
    /// How long an address rests.
    rest: Duration,
}

impl Default for Ipam {
    fn default() -> Self {
        Self {
            networks: BTreeMap::new(),
            rest: REST,
        }
    }
}

#[derive(Debug, Default)]
struct Pools {
    /// Whether the network exists; otherwise only its remaining leases are remembered.
    served: bool,
    ipv4: Pool,
    ipv6: Pool,
}

impl Ipam {
    /// No networks, no leases.
    pub fn new() -> Self {
        Self::default()
    }

    /// Changes how long addresses rest, before any does. Only for tests: nodes may know the last owner for [`REST`].
    pub const fn set_rest_time(&mut self, rest: Duration) {
        self.rest = rest;
    }

    /// When a rest ends that began at this time.
    pub const fn end_of_rest(&self, withdrawn: Duration) -> Duration {
        withdrawn.saturating_add(self.rest)
    }

    /// Adds a network or changes its ranges. Its leases stay, including those outside its new ranges.
    pub fn set_network(&mut self, spec: &NetworkSpec) {
        let pools = self.networks.entry(spec.name.clone()).or_default();
        pools.served = true;
        pools.ipv4.set_usable(Usable::of(spec, Family::Ipv4));
        pools.ipv6.set_usable(Usable::of(spec, Family::Ipv6));
    }

    /// Removes a network: no more addresses are leased from it. Its remaining leases and rests are remembered until
    /// they end, so that a recreated network of the same name does not lease them twice.
    pub fn remove_network(&mut self, network: &NetworkName) {
        if let Some(pools) = self.networks.get_mut(network) {
            pools.served = false;
            pools.ipv4.set_usable(Usable::default());
            pools.ipv6.set_usable(Usable::default());
        }
        self.remove_if_empty(network);
    }

    /// Leases one address of each family that the network has to `owner`, all or nothing. `wanted` requests specific
    /// addresses, at most one per family. The owner of the last lease of a resting address may have it again. The
    /// caller checks whether the network is enabled, and ends the rests that are over ([`Self::end_rests`]).
    pub fn lease(
        &mut self,
        network: &NetworkName,
        owner: &str,
        wanted: &[IpAddr],
        now: Duration,
    ) -> Result<Lease, IpamError> {
        self.lease_beside(&[], network, owner, wanted, now)
    }

    /// As [`Self::lease`], for a pod that has the addresses `beside` in other networks: it gets one of them again only
    /// by its request, or if the network has no other one. The routes of a pod cannot distinguish two interfaces with
    /// one address.
    pub fn lease_beside(
        &mut self,
        beside: &[IpAddr],
        network: &NetworkName,
        owner: &str,
        wanted: &[IpAddr],
        now: Duration,
    ) -> Result<Lease, IpamError> {
        let pools = self
            .networks
            .get_mut(network)
            .filter(|pools| pools.served)
            .ok_or_else(|| IpamError::UnknownNetwork {
                network: network.clone(),
            })?;
        let want4 = one_of(network, Family::Ipv4, wanted)?;
        let want6 = one_of(network, Family::Ipv6, wanted)?;
        // Both families are chosen before either is taken, so that nothing has to be undone.
        let (beside4, beside6) = (numbers(beside, Family::Ipv4), numbers(beside, Family::Ipv6));
        let ipv4 = pools.ipv4.choose(owner, want4, &beside4);
        let ipv4 = ipv4.map_err(|why| why.at(network, Family::Ipv4, now))?;
        let ipv6 = pools.ipv6.choose(owner, want6, &beside6);
        let ipv6 = ipv6.map_err(|why| why.at(network, Family::Ipv6, now))?;
        if let Some(address) = ipv4 {
            pools.ipv4.take(address, owner, want4.is_none());
        }
        if let Some(address) = ipv6 {
            pools.ipv6.take(address, owner, want6.is_none());
        }
        Ok(Lease {
            ipv4: ipv4.map(to_v4),
            ipv6: ipv6.map(Ipv6Addr::from),
        })
    }

    /// Takes over a lease from the records of an earlier process, all or nothing. The address may be outside the
    /// current ranges, and the network may be gone; only an address that is already leased is refused.
    pub fn adopt(
        &mut self,
        network: &NetworkName,
        owner: &str,
        ipv4: Option<Ipv4Addr>,
        ipv6: Option<Ipv6Addr>,
    ) -> Result<(), IpamError> {
        let (v4, v6) = (ipv4.map(from_v4), ipv6.map(u128::from));
        if let Some(pools) = self.networks.get(network) {
            pools
                .ipv4
                .check_unused(v4)
                .map_err(|why| why.at(network, Family::Ipv4, Duration::ZERO))?;
            pools
                .ipv6
                .check_unused(v6)
                .map_err(|why| why.at(network, Family::Ipv6, Duration::ZERO))?;
        }
        let pools = self.networks.entry(network.clone()).or_default();
        // Continuing after the highest adopted address prevents the reuse of addresses released just before a restart.
        if let Some(address) = v4 {
            pools.ipv4.adopt(address, owner);
        }
        if let Some(address) = v6 {
            pools.ipv6.adopt(address, owner);
        }
        self.remove_if_empty(network);
        Ok(())
    }

    /// Releases addresses. Unknown networks and addresses that are not leased are no error: a repeated release changes
    /// nothing.
    pub fn release(&mut self, network: &NetworkName, ipv4: Option<Ipv4Addr>, ipv6: Option<Ipv6Addr>) {
        if let Some(pools) = self.networks.get_mut(network) {
            if let Some(address) = ipv4 {
                pools.ipv4.release(from_v4(address));
            }
            if let Some(address) = ipv6 {
                pools.ipv6.release(address.into());
            }
        }
        self.remove_if_empty(network);
    }

    /// Ends leases whose owner other nodes may know: the addresses rest. Unknown networks and addresses that are not
    /// leased are no error.
    pub fn rest(&mut self, network: &NetworkName, ipv4: Option<Ipv4Addr>, ipv6: Option<Ipv6Addr>) {
        if let Some(pools) = self.networks.get_mut(network) {
            if let Some(address) = ipv4 {
                pools.ipv4.rest(from_v4(address));
            }
            if let Some(address) = ipv6 {
                pools.ipv6.rest(address.into());
            }
        }
    }

    /// Takes over a rest from the records of an earlier process, after the leases. `withdrawn` is when the other nodes
    /// learned that the owner is gone. The address may be outside the current ranges, and the network may be gone; an
    /// address that is leased does not rest.
    pub fn adopt_rest(&mut self, network: &NetworkName, address: IpAddr, owner: &str, withdrawn: Option<Duration>) {
        let end = withdrawn.map(|at| self.end_of_rest(at));
        let pools = self.networks.entry(network.clone()).or_default();
        let (pool, number) = pools.pool_of(address);
        pool.adopt_rest(number, owner, end);
        self.remove_if_empty(network);
    }

    /// Notes since when no other node knows the last owner of a resting address; `None` if one may know it again. The
    /// first time counts. Returns whether that is new; addresses that do not rest are left as they are.
    pub fn set_withdrawn(&mut self, network: &NetworkName, address: IpAddr, withdrawn: Option<Duration>) -> bool {
        let end = withdrawn.map(|at| self.end_of_rest(at));
        self.networks.get_mut(network).is_some_and(|pools| {
            let (pool, number) = pools.pool_of(address);
            pool.set_end_of_rest(number, end)
        })
    }

    /// When the next rest ends; `None` while none is withdrawn.
    pub fn next_end_of_rest(&self) -> Option<Duration> {
        let pools = self.networks.values().flat_map(|pools| [&pools.ipv4, &pools.ipv6]);
        pools.filter_map(Pool::next_end_of_rest).min()
    }

    /// Ends the rests whose time is over, and returns their addresses.
    pub fn end_rests(&mut self, now: Duration) -> Vec<(NetworkName, IpAddr)> {
        let mut ended = Vec::new();
        for (name, pools) in &mut self.networks {
            let v4 = pools.ipv4.end_rests(now).into_iter();
            let v4 = v4.map(|number| IpAddr::V4(to_v4(number)));
            let v6 = pools.ipv6.end_rests(now).into_iter();
            let v6 = v6.map(|number| IpAddr::V6(number.into()));
            ended.extend(v4.chain(v6).map(|address| (name.clone(), address)));
        }
        for (name, _) in &ended {
            self.remove_if_empty(name);
        }
        ended
    }

    /// The usage of a network; `None` if it is unknown and has no leases.
    pub fn usage(&self, network: &NetworkName) -> Option<Usage> {
        let pools = self.networks.get(network)?;
        let (ipv4, ipv6) = (pools.ipv4.usage(), pools.ipv6.usage());
        Some(Usage {
            total: ipv4.total + ipv6.total,
            used: ipv4.used + ipv6.used,
            ipv4,
            ipv6,
        })
    }

    /// A free address of a family, the one that would be leased last; it stays free.
    pub fn spare(&self, network: &NetworkName, ipv4: bool) -> Option<IpAddr> {
        let pools = self.networks.get(network).filter(|pools| pools.served)?;
        if ipv4 {
            pools.ipv4.spare().map(|number| IpAddr::V4(to_v4(number)))
        } else {
            pools.ipv6.spare().map(|number| IpAddr::V6(number.into()))
        }
    }

    /// Every leased address, by network.
    pub fn leases(&self) -> BTreeMap<NetworkName, Vec<IpAddr>> {
        self.addresses(|pool| pool.leased().collect())
    }

    /// Every resting address, by network.
    pub fn resting(&self) -> BTreeMap<NetworkName, Vec<IpAddr>> {
        let mut resting = self.addresses(|pool| pool.resting().collect());
        resting.retain(|_, addresses| !addresses.is_empty());
        resting
    }

    fn addresses(&self, of: impl Fn(&Pool) -> Vec<u128>) -> BTreeMap<NetworkName, Vec<IpAddr>> {
        let both = |pools: &Pools| {
            let v4 = of(&pools.ipv4).into_iter().map(|number| IpAddr::V4(to_v4(number)));
            let v6 = of(&pools.ipv6).into_iter().map(|number| IpAddr::V6(number.into()));
            v4.chain(v6).collect()
        };
        let networks = self.networks.iter();
        networks.map(|(name, pools)| (name.clone(), both(pools))).collect()
    }

    fn remove_if_empty(&mut self, network: &NetworkName) {
        let empty = |pools: &Pools| !pools.served && pools.ipv4.is_unused() && pools.ipv6.is_unused();
        if self.networks.get(network).is_some_and(empty) {
            self.networks.remove(network);
        }
    }
}

impl Pools {
    /// The pool of an address's family, and the address as a number.
    fn pool_of(&mut self, address: IpAddr) -> (&mut Pool, u128) {
        match address {
            IpAddr::V4(v4) => (&mut self.ipv4, from_v4(v4)),
            IpAddr::V6(v6) => (&mut self.ipv6, v6.into()),
        }
    }
}

/// The single requested address of a family, as a number.
fn one_of(network: &NetworkName, family: Family, wanted: &[IpAddr]) -> Result<Option<u128>, IpamError> {
    let found = numbers(wanted, family);
    match found.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some(*one)),
        more => Err(IpamError::TooManyAddresses {
            network: network.clone(),
            family,
            count: more.len(),
        }),
    }
}

/// The addresses of a family, as numbers.
fn numbers(addresses: &[IpAddr], family: Family) -> Vec<u128> {
    let of_family = addresses.iter().filter_map(|address| match (address, family) {
        (IpAddr::V4(v4), Family::Ipv4) => Some(from_v4(*v4)),
        (IpAddr::V6(v6), Family::Ipv6) => Some(u128::from(*v6)),
        (IpAddr::V4(_), Family::Ipv6) | (IpAddr::V6(_), Family::Ipv4) => None,
    });
    of_family.collect()
}

/// Pools count in `u128` for both families; an IPv4 address is its 32-bit number.
fn from_v4(address: Ipv4Addr) -> u128 {
    u128::from(u32::from(address))
}

/// The inverse of [`from_v4`]; IPv4 pools hold no number above `u32::MAX`.
fn to_v4(number: u128) -> Ipv4Addr {
    Ipv4Addr::from(u32::try_from(number).unwrap_or(u32::MAX))
}
