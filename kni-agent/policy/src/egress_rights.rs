//! Decides who may use which egress addresses: pools, addresses of others, one user per address.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use kni_model::{
    egress::{EgressPool, EgressRefusal, EgressUser, PoolNamespaces},
    policy::Labels,
};

use super::{pods::labels_of, selector::matches};

/// The pools that count, and why the others do not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EgressPools {
    accepted: Vec<EgressPool>,
    /// Pools that overlap an older one, by name, with the reason. Their addresses cannot be used.
    pub refused: BTreeMap<String, String>,
}

impl EgressPools {
    /// Sorts pools out: of two that overlap, the older one counts; of two of one age, the first one by name.
    pub fn new(mut pools: Vec<EgressPool>) -> Self {
        pools.sort_by(|one, other| (one.created, &one.name).cmp(&(other.created, &other.name)));
        let mut sorted = Self::default();
        for pool in pools {
            let overlap = sorted.accepted.iter().find_map(|older| {
                let (own, theirs) = overlapping(&pool.ranges, &older.ranges)?;
                Some(format!(
                    "{own} overlaps {theirs} of EgressAddressPool {}, which is older",
                    older.name
                ))
            });
            match overlap {
                Some(reason) => drop(sorted.refused.insert(pool.name, reason)),
                None => sorted.accepted.push(pool),
            }
        }
        sorted
    }

    /// The pool of an address, where it admits the namespace. `labels` are those of the namespace.
    pub fn admit(&self, namespace: &str, labels: &Labels, address: IpAddr) -> Result<&str, EgressRefusal> {
        let has = |pool: &&EgressPool| pool.ranges.iter().any(|range| range.contains(&address));
        let pool = self.accepted.iter().find(has).ok_or(EgressRefusal::NotInPool)?;
        let admits = match &pool.namespaces {
            PoolNamespaces::All => true,
            PoolNamespaces::Selected(selector) => matches(selector, labels),
            PoolNamespaces::None => false,
        };
        if admits {
            return Ok(&pool.name);
        }
        Err(EgressRefusal::PoolNotAllowed {
            pool: pool.name.clone(),
            namespace: namespace.to_owned(),
        })
    }
}

fn overlapping<'a>(one: &'a [IpNet], other: &'a [IpNet]) -> Option<(&'a IpNet, &'a IpNet)> {
    let mut pairs = one.iter().flat_map(|a| other.iter().map(move |b| (a, b)));
    pairs.find(|(a, b)| a.contains(*b) || b.contains(*a))
}

/// The right to an address: the pool that it is from, none for an address of a network; or why it may not be used.
pub type EgressRight = Result<Option<String>, EgressRefusal>;

/// What the rights depend on beside pools.
pub struct EgressFacts<'a> {
    /// The pools.
    pub pools: &'a EgressPools,
    /// Labels by namespace. One that is missing has the label of its name only.
    pub namespaces: &'a BTreeMap<String, Labels>,
    /// What an address is, if it is that of something else: "the address of node n1".
    pub reserved: &'a dyn Fn(IpAddr) -> Option<String>,
    /// Who has been granted an address before.
    pub holder: &'a dyn Fn(IpAddr) -> Option<EgressUser>,
}

/// The rights of all users to the addresses that they request. Of several users of one address that may not share it,
/// the earlier holder has it, else the first one in their order.
pub fn egress_rights(
    requests: &BTreeSet<(EgressUser, IpAddr)>,
    facts: &EgressFacts<'_>,
) -> BTreeMap<(EgressUser, IpAddr), EgressRight> {
    let mut rights = BTreeMap::new();
    let mut granted: BTreeMap<IpAddr, EgressUser> = BTreeMap::new();
    for (user, address) in requests {
        let right = admit(user, *address, facts);
        if right.is_ok() {
            let before = (facts.holder)(*address).filter(|holder| {
                requests.iter().any(|(other, requested)| {
                    requested == address && other.shares_with(holder) && admit(other, *address, facts).is_ok()
                })
            });
            granted
                .entry(*address)
                .or_insert_with(|| before.unwrap_or_else(|| user.clone()));
        }
        rights.insert((user.clone(), *address), right);
    }
    for ((user, address), right) in &mut rights {
        if right.is_ok()
            && let Some(holder) = granted.get(address)
            && !holder.shares_with(user)
        {
            *right = Err(EgressRefusal::InUse(holder.to_string()));
        }
    }
    rights
}

fn admit(user: &EgressUser, address: IpAddr, facts: &EgressFacts<'_>) -> EgressRight {
    let pool = match user {
        EgressUser::Network(_) => None,
        EgressUser::Policy(policy) => {
            let labels = labels_of(facts.namespaces, &policy.namespace);
            Some(facts.pools.admit(&policy.namespace, &labels, address)?.to_owned())
        }
    };
    match (facts.reserved)(address) {
        Some(what) => Err(EgressRefusal::Reserved(what)),
        None => Ok(pool),
    }
}

#[cfg(test)]
mod tests {
    use kni_model::policy::{Operator, PolicyKind, PolicyRef, Requirement, Selector};

    use super::*;

    fn pool(name: &str, created: i64, ranges: &[&str], namespaces: PoolNamespaces) -> EgressPool {
        EgressPool {
            name: name.to_owned(),
            created,
            ranges: ranges.iter().map(|range| range.parse().unwrap()).collect(),
            namespaces,
        }
    }

    fn of_tenant(tenant: &str) -> PoolNamespaces {
        PoolNamespaces::Selected(Selector {
            requirements: vec![Requirement {
                key: "tenant".to_owned(),
                operator: Operator::In([tenant.to_owned()].into()),
            }],
        })
    }

    fn policy(namespace: &str, name: &str) -> EgressUser {
        EgressUser::Policy(PolicyRef {
            kind: PolicyKind::EgressPolicy,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        })
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn namespaces() -> BTreeMap<String, Labels> {
        let of = |name: &str| (name.to_owned(), [("tenant".to_owned(), name.to_owned())].into());
        [of("red"), of("blue")].into()
    }

    fn reasons(requests: &[(EgressUser, &str)], pools: &EgressPools, holder: Option<&EgressUser>) -> Vec<String> {
        let requests = requests.iter().map(|(user, address)| (user.clone(), ip(address)));
        let requests: BTreeSet<_> = requests.collect();
        let namespaces = namespaces();
        let facts = EgressFacts {
            pools,
            namespaces: &namespaces,
            reserved: &|address| (address == ip("192.0.2.1")).then(|| "the gateway".to_owned()),
            holder: &|_| holder.cloned(),
        };
        let rights = egress_rights(&requests, &facts);
        let word = |right: &EgressRight| match right {
            Ok(pool) => pool.clone().unwrap_or_default(),
            Err(refusal) => refusal.reason().to_owned(),
        };
        rights
            .iter()
            .map(|((user, address), right)| format!("{user} {address} {}", word(right)))
            .collect()
    }

    #[test]
    fn an_older_pool_goes_before_one_that_overlaps_it() {
        let pools = EgressPools::new(vec![
            pool("a", 7, &["192.0.2.0/28"], PoolNamespaces::All),
            pool("b", 5, &["192.0.2.8/29", "2001:db8::/120"], PoolNamespaces::None),
            pool("c", 9, &["198.51.100.0/24"], PoolNamespaces::All),
        ]);
        assert_eq!(
            pools.refused,
            [(
                "a".to_owned(),
                "192.0.2.0/28 overlaps 192.0.2.8/29 of EgressAddressPool b, which is older".to_owned()
            )]
            .into()
        );
        let admit = |address| {
            pools
                .admit("red", &Labels::new(), ip(address))
                .map_err(|refusal| refusal.reason())
        };
        assert_eq!(admit("192.0.2.1"), Err("AddressNotInPool"));
        assert_eq!(admit("192.0.2.9"), Err("PoolNotAllowed"));
        assert_eq!(admit("2001:db8::9"), Err("PoolNotAllowed"));
        assert_eq!(admit("198.51.100.9"), Ok("c"));
    }

    #[test]
    fn a_policy_takes_addresses_of_pools_that_admit_its_namespace() {
        let pools = EgressPools::new(vec![
            pool("red", 0, &["192.0.2.0/28"], of_tenant("red")),
            pool("blue", 0, &["192.0.2.16/28"], of_tenant("blue")),
        ]);
        let requests = [
            (policy("red", "a"), "192.0.2.2"),
            (policy("red", "b"), "192.0.2.20"),
            (policy("red", "c"), "203.0.113.1"),
            (policy("red", "d"), "192.0.2.1"),
            (policy("unlabelled", "e"), "192.0.2.2"),
            (EgressUser::Network("net".parse().unwrap()), "203.0.113.9"),
        ];
        assert_eq!(
            reasons(&requests, &pools, None),
            [
                "PodNetwork net 203.0.113.9 ",
                "EgressPolicy red/a 192.0.2.2 red",
                "EgressPolicy red/b 192.0.2.20 PoolNotAllowed",
                "EgressPolicy red/c 203.0.113.1 AddressNotInPool",
                "EgressPolicy red/d 192.0.2.1 AddressReserved",
                "EgressPolicy unlabelled/e 192.0.2.2 PoolNotAllowed",
            ]
        );
    }

    #[test]
    fn an_address_has_one_tenant_the_first_one() {
        let pools = EgressPools::new(vec![pool("all", 0, &["192.0.2.0/28"], PoolNamespaces::All)]);
        let requests = [
            (policy("blue", "a"), "192.0.2.2"),
            (policy("blue", "b"), "192.0.2.2"),
            (policy("red", "c"), "192.0.2.2"),
        ];
        let blue_first = [
            "EgressPolicy blue/a 192.0.2.2 all",
            "EgressPolicy blue/b 192.0.2.2 all",
            "EgressPolicy red/c 192.0.2.2 AddressInUse",
        ];
        assert_eq!(reasons(&requests, &pools, None), blue_first);
        let red = policy("red", "gone");
        assert_eq!(
            reasons(&requests, &pools, Some(&red)),
            [
                "EgressPolicy blue/a 192.0.2.2 AddressInUse",
                "EgressPolicy blue/b 192.0.2.2 AddressInUse",
                "EgressPolicy red/c 192.0.2.2 all",
            ],
            "another policy of the namespace that had it"
        );
        let green = policy("green", "gone");
        assert_eq!(
            reasons(&requests, &pools, Some(&green)),
            blue_first,
            "nobody of that namespace requests it"
        );
    }
}
