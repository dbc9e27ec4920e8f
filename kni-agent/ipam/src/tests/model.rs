//! Checks the allocator against a model that enumerates every address, including the upper end of both families.

use proptest::prelude::*;

use super::*;

const OWNER: &str = "pod";

/// One family of the network, as sets of single addresses.
#[derive(Default)]
struct ModelPool {
    exists: bool,
    usable: BTreeSet<u128>,
    used: BTreeSet<u128>,
    released: Vec<u128>,
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

    /// `Ok(None)` if the family does not exist, `Err` if no address is free.
    fn next(&self) -> Result<Option<u128>, ()> {
        let fresh: Vec<u128> = self
            .usable
            .iter()
            .copied()
            .filter(|a| !self.used.contains(a) && !self.released.contains(a))
            .collect();
        if !self.exists {
            return Ok(None);
        }
        let found = fresh
            .iter()
            .find(|a| **a >= self.cursor)
            .or(fresh.first())
            .or(self.released.first());
        found.copied().map(Some).ok_or(())
    }

    fn take(&mut self, address: Option<u128>) {
        if let Some(address) = address {
            assert!(self.used.insert(address), "leased twice");
            self.released.retain(|a| *a != address);
        }
    }

    fn release(&mut self, address: u128) {
        if self.used.remove(&address) && self.usable.contains(&address) {
            self.released.push(address);
        }
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
    Lease,
    LeaseFixed(bool, u8),
    Release(usize),
    ReleaseAny(bool, u8),
    Adopt(Option<u8>, Option<u8>),
    Change(usize),
    Remove,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => Just(Op::Lease),
        3 => (any::<bool>(), any::<u8>()).prop_map(|(v4, o)| Op::LeaseFixed(v4, o)),
        8 => any::<usize>().prop_map(Op::Release),
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
    v4: ModelPool,
    v6: ModelPool,
}

impl Run {
    fn change(&mut self, spec: &NetworkSpec) {
        self.ipam.set_network(spec);
        self.v4.set(spec, true);
        self.v6.set(spec, false);
        self.served = true;
    }

    fn lease(&mut self) {
        let got = self.ipam.lease(&name("blue"), OWNER, &[]);
        match (self.served, self.v4.next(), self.v6.next()) {
            (false, ..) => assert!(matches!(got, Err(IpamError::UnknownNetwork { .. }))),
            (true, Ok(ipv4), Ok(ipv6)) => {
                let lease = got.unwrap();
                assert_eq!((lease.ipv4.map(from_v4), lease.ipv6.map(u128::from)), (ipv4, ipv6));
                for (pool, address) in [(&mut self.v4, ipv4), (&mut self.v6, ipv6)] {
                    pool.take(address);
                    pool.cursor = address.map_or(pool.cursor, |a| a.wrapping_add(1));
                }
            }
            (true, ipv4, _) => {
                let family = if ipv4.is_err() { Family::Ipv4 } else { Family::Ipv6 };
                assert!(
                    matches!(&got, Err(IpamError::Exhausted { network, family: found, .. })
                        if *network == name("blue") && *found == family),
                    "{got:?}, not {family}"
                );
            }
        }
    }

    fn lease_fixed(&mut self, v4: bool, offset: u8) {
        let address = self.base.at(v4, offset);
        let wanted = number(address);
        let got = self.ipam.lease(&name("blue"), OWNER, &[address]);
        let (pool, other) = if v4 {
            (&mut self.v4, &mut self.v6)
        } else {
            (&mut self.v6, &mut self.v4)
        };
        if !self.served {
            assert!(matches!(got, Err(IpamError::UnknownNetwork { .. })));
            return;
        }
        let free = pool.usable.contains(&wanted) && !pool.used.contains(&wanted);
        match (free, other.next()) {
            (true, Ok(found)) => {
                let lease = got.unwrap();
                let (ipv4, ipv6) = (lease.ipv4.map(from_v4), lease.ipv6.map(u128::from));
                assert_eq!(if v4 { (ipv4, ipv6) } else { (ipv6, ipv4) }, (Some(wanted), found));
                pool.take(Some(wanted));
                other.take(found);
                other.cursor = found.map_or(other.cursor, |a| a.wrapping_add(1));
            }
            (true, Err(())) => assert!(matches!(got, Err(IpamError::Exhausted { .. }))),
            // With the other family exhausted as well, either error is right.
            (false, Err(())) => assert!(got.is_err()),
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
            .adopt(&name("blue"), OWNER, a4.map(to_v4), a6.map(Ipv6Addr::from));
        let clash = a4.is_some_and(|a| self.v4.used.contains(&a)) || a6.is_some_and(|a| self.v6.used.contains(&a));
        assert_eq!(got.is_err(), clash, "{got:?}");
        if !clash {
            for (pool, address) in [(&mut self.v4, a4), (&mut self.v6, a6)] {
                pool.take(address);
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

    fn step(&mut self, op: &Op) {
        match op {
            Op::Lease => self.lease(),
            Op::LeaseFixed(v4, offset) => self.lease_fixed(*v4, *offset),
            Op::Adopt(ipv4, ipv6) => self.adopt(*ipv4, *ipv6),
            Op::ReleaseAny(v4, offset) => self.release(*v4, number(self.base.at(*v4, *offset))),
            Op::Release(pick) => {
                let leased: Vec<_> = self
                    .v4
                    .used
                    .iter()
                    .map(|a| (true, *a))
                    .chain(self.v6.used.iter().map(|a| (false, *a)))
                    .collect();
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

    /// A removed network is dropped with its last lease, together with its cursors.
    fn reset_if_empty(&mut self) {
        if !self.served && self.v4.used.is_empty() && self.v6.used.is_empty() {
            self.v4.cursor = 0;
            self.v6.cursor = 0;
        }
    }

    fn compare(&self) {
        let usage = self.ipam.usage(&name("blue")).unwrap_or_default();
        for (pool, usage) in [(&self.v4, usage.ipv4), (&self.v6, usage.ipv6)] {
            assert_eq!(usage.total, pool.usable.len() as u128);
            assert_eq!(usage.used, pool.used.len() as u128);
            assert_eq!(usage.free, pool.usable.difference(&pool.used).count() as u128);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_allocator_does_what_the_model_does((base, specs, ops) in case()) {
        let first = specs[0].clone();
        let mut run = Run { base, specs, ipam: Ipam::new(), served: false, v4: ModelPool::default(), v6: ModelPool::default() };
        run.change(&first);
        for op in &ops {
            run.step(op);
        }
    }
}
