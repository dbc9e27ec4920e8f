//! Checks the allocator against a model that enumerates every address, including the upper end of both families.

use proptest::prelude::*;

use super::*;

/// Owners of leases: each remembers what rests after it.
const OWNERS: [&str; 2] = ["pod", "other"];

/// One family of the network, as sets of single addresses.
#[derive(Default)]
struct ModelPool {
    exists: bool,
    usable: BTreeSet<u128>,
    used: BTreeSet<u128>,
    released: Vec<u128>,
    /// Owner, and when it was withdrawn.
    resting: BTreeMap<u128, (&'static str, Option<u64>)>,
    owners: BTreeMap<u128, &'static str>,
    cursor: u128,
}

impl ModelPool {
    fn set(&mut self, spec: &NetworkSpec, v4: bool) {
        self.exists = false;
        self.usable.clear();
        for subnet in spec.subnets.iter().filter(|s| s.network().is_ipv4() == v4) {
            self.exists = true;
            let first = number(subnet.network());
            let all: Vec<u128> = (first..=number(subnet.broadcast())).collect();
            let last_kept = if v4 { all.len() - 1 } else { all.len() };
            self.usable.extend(&all[2..last_kept]);
        }
        for exclude in spec.exclude_subnets.iter().filter(|s| s.network().is_ipv4() == v4) {
            self.usable
                .retain(|a| *a < number(exclude.network()) || *a > number(exclude.broadcast()));
        }
        self.released.retain(|a| self.usable.contains(a));
    }

    /// `Ok(None)` if the family does not exist, `Err` if no address is free: whether one rests.
    fn next(&self, owner: &str) -> Result<Option<u128>, bool> {
        let fresh: Vec<u128> = self
            .usable
            .iter()
            .copied()
            .filter(|a| !self.used.contains(a) && !self.released.contains(a) && !self.resting.contains_key(a))
            .collect();
        if !self.exists {
            return Ok(None);
        }
        let found = fresh
            .iter()
            .find(|a| **a >= self.cursor)
            .or(fresh.first())
            .or(self.released.first());
        let resting = || self.resting.iter().filter(|(a, _)| self.usable.contains(a));
        let own = || resting().find(|(_, (last, _))| *last == owner).map(|(a, _)| a);
        found
            .or_else(own)
            .copied()
            .map(Some)
            .ok_or_else(|| resting().next().is_some())
    }

    fn take(&mut self, address: Option<u128>, owner: &'static str) {
        if let Some(address) = address {
            assert!(self.used.insert(address), "leased twice");
            self.released.retain(|a| *a != address);
            self.resting.remove(&address);
            self.owners.insert(address, owner);
        }
    }

    fn release(&mut self, address: u128) {
        if self.used.remove(&address) {
            self.free(address);
        }
    }

    fn free(&mut self, address: u128) {
        if self.usable.contains(&address) {
            self.released.push(address);
        }
    }

    fn rest(&mut self, address: u128) {
        if self.used.remove(&address) {
            self.resting.insert(address, (self.owners[&address], None));
        }
    }

    /// The addresses whose rest ends.
    fn end_rests(&mut self, now: u64) -> BTreeSet<u128> {
        let mut over: Vec<(u64, u128)> = Vec::new();
        for (address, (_, withdrawn)) in &self.resting {
            over.extend(withdrawn.filter(|at| at + 10 <= now).map(|at| (at, *address)));
        }
        over.sort_unstable();
        for (_, address) in &over {
            self.resting.remove(address);
            self.free(*address);
        }
        over.into_iter().map(|(_, address)| address).collect()
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => from_v4(v4),
        IpAddr::V6(v6) => v6.into(),
    }
}

/// The position of the 256 addresses of a case: in the middle, or at the very end of the family.
#[derive(Debug, Clone, Copy)]
struct Base(u128, u128);

impl Base {
    fn at(self, v4: bool, offset: u8) -> IpAddr {
        let offset = u128::from(offset);
        if v4 {
            IpAddr::V4(to_v4(self.0 + offset))
        } else {
            IpAddr::V6((self.1 + offset).into())
        }
    }

    fn net(self, v4: bool, offset: u8, host_bits: u8) -> ipnet::IpNet {
        let len = if v4 { 32 } else { 128 } - host_bits;
        ipnet::IpNet::new(self.at(v4, offset), len).unwrap().trunc()
    }
}

#[derive(Debug, Clone)]
enum Op {
    Lease(usize),
    LeaseFixed(usize, bool, u8),
    Release(usize),
    Rest(usize),
    Withdrawn(usize, bool),
    Pass(u64),
    ReleaseAny(bool, u8),
    Adopt(Option<u8>, Option<u8>),
    Change(usize),
    Remove,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => (0_usize..2).prop_map(Op::Lease),
        3 => (0_usize..2, any::<bool>(), any::<u8>()).prop_map(|(owner, v4, o)| Op::LeaseFixed(owner, v4, o)),
        4 => any::<usize>().prop_map(Op::Release),
        6 => any::<usize>().prop_map(Op::Rest),
        5 => (any::<usize>(), proptest::bool::weighted(0.8)).prop_map(|(pick, is)| Op::Withdrawn(pick, is)),
        3 => (0_u64..12).prop_map(Op::Pass),
        1 => (any::<bool>(), any::<u8>()).prop_map(|(v4, o)| Op::ReleaseAny(v4, o)),
        1 => any::<(Option<u8>, Option<u8>)>().prop_map(|(a, b)| Op::Adopt(a, b)),
        1 => (0_usize..3).prop_map(Op::Change),
        1 => Just(Op::Remove),
    ]
}

/// Subnets in up to four slots of 64 addresses, so that they never overlap, and excluded ranges anywhere.
fn spec(base: Base) -> impl Strategy<Value = NetworkSpec> {
    let subnets = proptest::collection::btree_map((any::<bool>(), 0_u8..4), 2_u8..=6, 1..5);
    let excludes = proptest::collection::vec((any::<bool>(), any::<u8>(), 0_u8..=5), 0..4);
    (subnets, excludes).prop_map(move |(subnets, excludes)| NetworkSpec {
        // Aligned to the end of the slot, so that the last one ends with the family.
        subnets: subnets
            .iter()
            .map(|((v4, slot), bits)| base.net(*v4, slot * 64 + 63, *bits))
            .collect(),
        exclude_subnets: excludes
            .iter()
            .map(|(v4, offset, bits)| base.net(*v4, *offset, *bits))
            .collect(),
        ..network(&[], &[])
    })
}

fn case() -> impl Strategy<Value = (Base, Vec<NetworkSpec>, Vec<Op>)> {
    let bases = [
        Base(0x0a00_0000, 0xfd00 << 112),
        Base(u128::from(u32::MAX) - 255, u128::MAX - 255),
    ];
    proptest::sample::select(bases.to_vec()).prop_flat_map(|base| {
        let specs = proptest::collection::vec(spec(base), 3);
        (Just(base), specs, proptest::collection::vec(op(), 1..250))
    })
}

struct Run {
    base: Base,
    specs: Vec<NetworkSpec>,
    ipam: Ipam,
    served: bool,
    now: u64,
    v4: ModelPool,
    v6: ModelPool,
}

impl Run {
    fn clock(&self) -> Duration {
        Duration::from_secs(self.now)
    }

    /// All addresses that `of` gives, of both families.
    fn all(&self, of: impl Fn(&ModelPool) -> Vec<u128>) -> Vec<(bool, u128)> {
        let v4 = of(&self.v4).into_iter().map(|address| (true, address));
        v4.chain(of(&self.v6).into_iter().map(|address| (false, address)))
            .collect()
    }

    fn change(&mut self, spec: &NetworkSpec) {
        self.ipam.set_network(spec);
        self.v4.set(spec, true);
        self.v6.set(spec, false);
        self.served = true;
    }

    fn lease(&mut self, owner: &'static str) {
        let now = self.clock();
        let got = self.ipam.lease(&name("blue"), owner, &[], now);
        match (self.served, self.v4.next(owner), self.v6.next(owner)) {
            (false, ..) => assert!(matches!(got, Err(IpamError::UnknownNetwork { .. }))),
            (true, Ok(ipv4), Ok(ipv6)) => {
                let lease = got.unwrap();
                assert_eq!((lease.ipv4.map(from_v4), lease.ipv6.map(u128::from)), (ipv4, ipv6));
                for (pool, address) in [(&mut self.v4, ipv4), (&mut self.v6, ipv6)] {
                    pool.take(address, owner);
                    pool.cursor = address.map_or(pool.cursor, |a| a.wrapping_add(1));
                }
            }
            (true, Err(rests), _) => assert_none_free(&got, Family::Ipv4, rests),
            (true, Ok(_), Err(rests)) => assert_none_free(&got, Family::Ipv6, rests),
        }
    }

    fn lease_fixed(&mut self, owner: &'static str, v4: bool, offset: u8) {
        let address = self.base.at(v4, offset);
        let wanted = number(address);
        let now = self.clock();
        let got = self.ipam.lease(&name("blue"), owner, &[address], now);
        let (pool, other) = if v4 {
            (&mut self.v4, &mut self.v6)
        } else {
            (&mut self.v6, &mut self.v4)
        };
        if !self.served {
            assert!(matches!(got, Err(IpamError::UnknownNetwork { .. })));
            return;
        }
        let rests = pool.resting.get(&wanted).is_some_and(|(last, _)| *last != owner);
        let free = pool.usable.contains(&wanted) && !pool.used.contains(&wanted) && !rests;
        match (free, other.next(owner)) {
            (true, Ok(found)) => {
                let lease = got.unwrap();
                let (ipv4, ipv6) = (lease.ipv4.map(from_v4), lease.ipv6.map(u128::from));
                assert_eq!(if v4 { (ipv4, ipv6) } else { (ipv6, ipv4) }, (Some(wanted), found));
                pool.take(Some(wanted), owner);
                other.take(found, owner);
                other.cursor = found.map_or(other.cursor, |a| a.wrapping_add(1));
            }
            (true, Err(rests)) => assert_none_free(&got, if v4 { Family::Ipv6 } else { Family::Ipv4 }, rests),
            // With the other family exhausted as well, either error is right.
            (false, Err(_)) => assert!(got.is_err()),
            (false, Ok(_)) if pool.usable.contains(&wanted) && rests => {
                assert!(matches!(got, Err(IpamError::AddressRests { .. })), "{got:?}");
            }
            (false, Ok(_)) if pool.usable.contains(&wanted) => {
                assert!(matches!(got, Err(IpamError::AddressInUse { .. })), "{got:?}");
            }
            (false, Ok(_)) => assert!(matches!(got, Err(IpamError::AddressNotInNetwork { .. })), "{got:?}"),
        }
    }

    fn adopt(&mut self, ipv4: Option<u8>, ipv6: Option<u8>) {
        let (a4, a6) = (
            ipv4.map(|o| number(self.base.at(true, o))),
            ipv6.map(|o| number(self.base.at(false, o))),
        );
        let got = self
            .ipam
            .adopt(&name("blue"), OWNERS[0], a4.map(to_v4), a6.map(Ipv6Addr::from));
        let clash = a4.is_some_and(|a| self.v4.used.contains(&a)) || a6.is_some_and(|a| self.v6.used.contains(&a));
        assert_eq!(got.is_err(), clash, "{got:?}");
        if !clash {
            for (pool, address) in [(&mut self.v4, a4), (&mut self.v6, a6)] {
                pool.take(address, OWNERS[0]);
                pool.cursor = pool.cursor.max(address.map_or(0, |a| a.saturating_add(1)));
            }
        }
    }

    fn release(&mut self, v4: bool, address: u128) {
        if v4 {
            self.v4.release(address);
            self.ipam.release(&name("blue"), Some(to_v4(address)), None);
        } else {
            self.v6.release(address);
            self.ipam.release(&name("blue"), None, Some(address.into()));
        }
    }

    fn rest(&mut self, (v4, address): (bool, u128)) {
        if v4 {
            self.v4.rest(address);
            self.ipam.rest(&name("blue"), Some(to_v4(address)), None);
        } else {
            self.v6.rest(address);
            self.ipam.rest(&name("blue"), None, Some(address.into()));
        }
    }

    fn withdrawn(&mut self, (v4, address): (bool, u128), is: bool) {
        let pool = if v4 { &mut self.v4 } else { &mut self.v6 };
        let (_, known) = pool.resting.get_mut(&address).unwrap();
        let is_new = known.is_some() != is;
        if is_new {
            *known = is.then_some(self.now);
        }
        let ip = if v4 {
            IpAddr::V4(to_v4(address))
        } else {
            IpAddr::V6(address.into())
        };
        let at = is.then(|| self.clock());
        assert_eq!(self.ipam.set_withdrawn(&name("blue"), ip, at), is_new);
    }

    fn pass(&mut self, seconds: u64) {
        self.now += seconds;
        let ended = self.ipam.end_rests(self.clock());
        let ended: BTreeSet<u128> = ended.into_iter().map(|(_, address)| number(address)).collect();
        let mut expected = self.v4.end_rests(self.now);
        expected.extend(self.v6.end_rests(self.now));
        assert_eq!(ended, expected);
    }

    fn step(&mut self, op: &Op) {
        match op {
            Op::Lease(owner) => self.lease(OWNERS[*owner]),
            Op::LeaseFixed(owner, v4, offset) => self.lease_fixed(OWNERS[*owner], *v4, *offset),
            Op::Rest(pick) => {
                let leased = self.all(|pool| pool.used.iter().copied().collect());
                if !leased.is_empty() {
                    self.rest(leased[pick % leased.len()]);
                }
            }
            Op::Withdrawn(pick, is) => {
                let resting = self.all(|pool| pool.resting.keys().copied().collect());
                if !resting.is_empty() {
                    self.withdrawn(resting[pick % resting.len()], *is);
                }
            }
            Op::Pass(seconds) => self.pass(*seconds),
            Op::Adopt(ipv4, ipv6) => self.adopt(*ipv4, *ipv6),
            Op::ReleaseAny(v4, offset) => self.release(*v4, number(self.base.at(*v4, *offset))),
            Op::Release(pick) => {
                let leased = self.all(|pool| pool.used.iter().copied().collect());
                if !leased.is_empty() {
                    let (v4, address) = leased[pick % leased.len()];
                    self.release(v4, address);
                }
            }
            Op::Change(index) => {
                let spec = self.specs[*index].clone();
                self.change(&spec);
            }
            Op::Remove => {
                self.ipam.remove_network(&name("blue"));
                self.served = false;
                self.v4.set(&network(&[], &[]), true);
                self.v6.set(&network(&[], &[]), false);
            }
        }
        self.reset_if_empty();
        self.compare();
    }

    /// A removed network is dropped with its last lease or rest, together with its cursors.
    fn reset_if_empty(&mut self) {
        let is_unused = |pool: &ModelPool| pool.used.is_empty() && pool.resting.is_empty();
        if !self.served && is_unused(&self.v4) && is_unused(&self.v6) {
            self.v4.cursor = 0;
            self.v6.cursor = 0;
        }
    }

    fn compare(&self) {
        let usage = self.ipam.usage(&name("blue")).unwrap_or_default();
        for (pool, usage) in [(&self.v4, usage.ipv4), (&self.v6, usage.ipv6)] {
            assert_eq!(usage.total, pool.usable.len() as u128);
            assert_eq!(usage.used, pool.used.len() as u128);
            let (resting, rest) = pool
                .usable
                .iter()
                .partition::<Vec<u128>, _>(|a| pool.resting.contains_key(a));
            assert_eq!(usage.resting, resting.len() as u128);
            assert_eq!(
                usage.free,
                rest.iter().filter(|a| !pool.used.contains(a)).count() as u128
            );
        }
    }
}

fn assert_none_free(got: &Result<Lease, IpamError>, family: Family, rests: bool) {
    let found = match got {
        Err(IpamError::Exhausted { family, .. }) if !rests => *family,
        Err(IpamError::AllRest { family, .. }) if rests => *family,
        other => panic!("{other:?}, although there is no free {family} address"),
    };
    assert_eq!(found, family);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_allocator_does_what_the_model_does((base, specs, ops) in case()) {
        let first = specs[0].clone();
        let mut run = Run { base, specs, ipam: Ipam::new(), served: false, now: 0, v4: ModelPool::default(), v6: ModelPool::default() };
        run.change(&first);
        for op in &ops {
            run.step(op);
        }
    }
}
