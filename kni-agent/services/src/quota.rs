//! Divides the rows of the service tables among namespaces, so that the Services of one never take those of others.
//!
//! The shares are max-min fair: a namespace that needs no more than an equal part gets all of it, and the rest is
//! divided among those that need more. They depend on what all namespaces need now and on nothing else, so it does not
//! matter who came first, and a namespace within an equal part never loses a row.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use kni_common::{address::AddressKey, service::ServiceKey};
use kni_model::{NetworkName, service::ServiceRef};

use super::frontend::Frontend;

/// The sizes of the service tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceQuota {
    /// Rows of `SERVICES`, and of `ADDRESSES` beside those of pods.
    pub services: usize,
    /// Rows of `BACKENDS`.
    pub backends: usize,
}

impl Default for ServiceQuota {
    fn default() -> Self {
        Self {
            services: usize::MAX,
            backends: usize::MAX,
        }
    }
}

impl ServiceQuota {
    /// Rows that may be in use while nothing changes. A changed list of backends is written beside the old one, which
    /// stays for some seconds.
    fn usable(self, table: Table) -> usize {
        match table {
            Table::Services | Table::Addresses => self.services,
            Table::Backends => self.backends / 2,
        }
    }
}

/// A table of the dataplane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Table {
    Addresses,
    Services,
    Backends,
}

impl Table {
    const ALL: [Self; 3] = [Self::Addresses, Self::Services, Self::Backends];
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Addresses => "ADDRESSES",
            Self::Services => "SERVICES",
            Self::Backends => "BACKENDS",
        })
    }
}

/// A Service in one network; a shared one is in several.
type Unit = (ServiceRef, NetworkName);

/// The rows that Services need.
#[derive(Debug, Default)]
struct Need {
    addresses: BTreeSet<AddressKey>,
    services: usize,
    backends: usize,
}

impl Need {
    /// Rows by [`Table::ALL`].
    fn rows(&self) -> [usize; 3] {
        [self.addresses.len(), self.services, self.backends]
    }
}

/// What is not applied.
#[derive(Debug, Default)]
pub(super) struct Limited {
    /// Services, with the reasons.
    pub(super) refused: Vec<String>,
    /// Their namespaces, with the reasons.
    pub(super) overruns: BTreeMap<String, String>,
}

/// Removes what exceeds the share of a namespace: whole Services, those that come first by name stay. A Service keeps
/// its addresses if these have room, so that its clients are refused at once.
pub(super) fn limit(
    quota: ServiceQuota,
    frontends: &mut BTreeMap<ServiceKey, Frontend>,
    addresses: &mut BTreeSet<AddressKey>,
) -> Limited {
    let backends = frontends.values().map(|frontend| frontend.choice.backends.len());
    let totals = [addresses.len(), frontends.len(), backends.sum()];
    let capacities = Table::ALL.map(|table| quota.usable(table));
    if totals.iter().zip(capacities).all(|(rows, capacity)| *rows <= capacity) {
        return Limited::default();
    }
    let needs = needs(frontends);
    let levels = levels(&needs, capacities);
    let mut limited = Limited::default();
    let (mut refused, mut held) = (BTreeSet::new(), BTreeSet::new());
    for (namespace, units) in &needs {
        let needed = sum(units.values().map(Need::rows));
        let mut granted = [0; 3];
        for (unit, need) in units {
            let all = sum([granted, need.rows()]);
            let over = Table::ALL.into_iter().zip(all.into_iter().zip(levels));
            let over: Vec<Table> = over
                .filter(|(_, (rows, level))| rows > level)
                .map(|(table, _)| table)
                .collect();
            let Some(table) = over.first() else {
                granted = all;
                held.extend(need.addresses.iter().copied());
                continue;
            };
            if *table != Table::Addresses {
                granted = sum([granted, [need.addresses.len(), 0, 0]]);
                held.extend(need.addresses.iter().copied());
            }
            let of_table = Table::ALL.into_iter().zip(needed.into_iter().zip(levels));
            for (_, (rows, share)) in of_table.filter(|(of, _)| of == table) {
                let reason = format!(
                    "the Services of namespace {namespace} need {rows} rows of table {table}, and its share is {share} \
                     (--max-services)"
                );
                let (service, network) = unit;
                limited
                    .refused
                    .push(format!("Service {service}: not applied in network {network}: {reason}"));
                limited.overruns.entry(namespace.clone()).or_insert(reason);
            }
            refused.insert(unit.clone());
        }
    }
    frontends.retain(|_, frontend| !refused.contains(&unit(frontend)));
    addresses.retain(|address| held.contains(address));
    limited
}

fn unit(frontend: &Frontend) -> Unit {
    (frontend.service.clone(), frontend.network.clone())
}

/// What each Service needs, by namespace.
fn needs(frontends: &BTreeMap<ServiceKey, Frontend>) -> BTreeMap<String, BTreeMap<Unit, Need>> {
    let mut needs: BTreeMap<String, BTreeMap<Unit, Need>> = BTreeMap::new();
    for (key, frontend) in frontends {
        let units = needs.entry(frontend.service.namespace.clone()).or_default();
        let need = units.entry(unit(frontend)).or_default();
        if !frontend.external {
            need.addresses.insert(AddressKey {
                network: key.network,
                address: key.address,
            });
        }
        need.services += 1;
        need.backends += frontend.choice.backends.len();
    }
    needs
}

/// The share of each table, by [`Table::ALL`].
fn levels(needs: &BTreeMap<String, BTreeMap<Unit, Need>>, capacities: [usize; 3]) -> [usize; 3] {
    let sums: Vec<[usize; 3]> = needs
        .values()
        .map(|units| sum(units.values().map(Need::rows)))
        .collect();
    let [addresses, services, backends] = capacities;
    [
        fair_level(sums.iter().map(|[rows, _, _]| *rows), addresses),
        fair_level(sums.iter().map(|[_, rows, _]| *rows), services),
        fair_level(sums.iter().map(|[_, _, rows]| *rows), backends),
    ]
}

fn sum(rows: impl IntoIterator<Item = [usize; 3]>) -> [usize; 3] {
    rows.into_iter()
        .fold([0; 3], |[a, b, c], [x, y, z]| [a + x, b + y, c + z])
}

/// The most that each may have, so that all have as much as they need up to that, and together no more than `capacity`.
fn fair_level(needs: impl Iterator<Item = usize>, capacity: usize) -> usize {
    let mut needs: Vec<usize> = needs.collect();
    needs.sort_unstable();
    let mut left = capacity;
    for (position, need) in needs.iter().enumerate() {
        let equal = left / (needs.len() - position);
        if *need > equal {
            return equal;
        }
        left -= need;
    }
    usize::MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_needs_little_gets_it_and_the_others_share_the_rest() {
        let level = |needs: &[usize], capacity| fair_level(needs.iter().copied(), capacity);
        assert_eq!(level(&[], 0), usize::MAX);
        assert_eq!(level(&[4, 3, 3], 10), usize::MAX);
        assert_eq!(level(&[5, 3, 3], 10), 4);
        assert_eq!(level(&[3, 5, 3], 10), 4, "in any order");
        assert_eq!(level(&[100, 100, 1], 21), 10);
        assert_eq!(level(&[7, 7, 7], 20), 6);
        assert_eq!(level(&[1, 1], 1), 0);
    }
}
