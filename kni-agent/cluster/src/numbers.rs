//! Derives the number of each network from the `NetworkNumber`s of the cluster. Pure.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use kni_api::NetworkNumber;
use kni_crd::PodNetwork;
use kni_model::{NetworkName, NumberProblem};
use kube::ResourceExt as _;

use super::tables::Tables;

/// The numbers of the networks of the cluster.
///
/// # Guarantees
/// - No two networks have the same number, because no two objects have the same name.
/// - Released objects, objects of networks that are not cached, and names that are no number have no effect.
/// - Of several objects of one network the oldest counts, and of equally old ones the lowest number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Numbers {
    by_network: BTreeMap<NetworkName, Result<u32, NumberProblem>>,
}

impl Numbers {
    /// Reads the numbers of all cached networks.
    pub fn of(tables: &Tables) -> Self {
        let objects = objects_by_uid(tables);
        let networks = tables.networks.rows().values();
        let by_network = networks.filter_map(|network| {
            let name = network.name_any().parse().ok()?;
            let number = if !tables.numbers.is_synced() {
                Err(NumberProblem::Unread)
            } else if tables.numbers.is_absent() && tables.numbers.rows().is_empty() {
                Err(NumberProblem::NotServed)
            } else {
                number_of(network, &objects)
            };
            Some((name, number))
        });
        Self {
            by_network: by_network.collect(),
        }
    }

    /// The number of a network; `None` if the network is not cached.
    pub fn get(&self, network: &NetworkName) -> Option<&Result<u32, NumberProblem>> {
        self.by_network.get(network)
    }
}

fn number_of(network: &PodNetwork, objects: &BTreeMap<&str, Vec<Claim<'_>>>) -> Result<u32, NumberProblem> {
    let uid = network.metadata.uid.as_deref().unwrap_or_default();
    let name = network.name_any();
    let claims = objects.get(uid).into_iter().flatten();
    let claim = claims
        .filter(|claim| claim.object.is_of(&name, uid))
        .min_by_key(|claim| claim.rank());
    match claim {
        None => Err(NumberProblem::Absent),
        Some(claim) if claim.object.released_at().is_some() => Err(NumberProblem::Released(claim.number)),
        Some(claim) => Ok(claim.number),
    }
}

/// An object and its number.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    /// The number.
    pub number: u32,
    /// The object.
    pub object: &'a Arc<NetworkNumber>,
}

impl Claim<'_> {
    /// The order in which objects of one network count: released ones last, the oldest first.
    pub fn rank(&self) -> impl Ord + use<> {
        let created = self.object.creation_timestamp().map(|time| time.0);
        // An object without a time is younger than any other.
        let created = Reverse(created.map(Reverse));
        (self.object.released_at().is_some(), created, self.number)
    }
}

/// The objects whose name is a number, by the UID of their network.
pub fn objects_by_uid(tables: &Tables) -> BTreeMap<&str, Vec<Claim<'_>>> {
    let mut objects: BTreeMap<&str, Vec<Claim<'_>>> = BTreeMap::new();
    for object in tables.numbers.rows().values() {
        if let Some(number) = object.number() {
            let claims = objects.entry(&object.spec.network_uid).or_default();
            claims.push(Claim { number, object });
        }
    }
    objects
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, time::Instant};

    use serde_json::json;

    use super::*;
    use crate::table::Key;

    fn network(tables: &mut Tables, name: &str, uid: &str) {
        let object = serde_json::from_value(json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": {"name": name, "uid": uid},
            "spec": {"subnets": ["10.0.0.0/16"]},
        }));
        tables.networks.put(Key::new("", name), Some(Arc::new(object.unwrap())));
    }

    fn number(tables: &mut Tables, number: &str, (network, uid): (&str, &str), second: Option<u8>, released: bool) {
        let created = second.map(|second| format!("2026-01-01T00:00:{second:02}Z"));
        let status = if released {
            json!({"releasedAt": "2026-01-02T00:00:00Z"})
        } else {
            json!({})
        };
        let object = serde_json::from_value(json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "NetworkNumber",
            "metadata": {"name": number, "creationTimestamp": created},
            "spec": {"network": network, "networkUID": uid}, "status": status,
        }));
        tables
            .numbers
            .put(Key::new("", number), Some(Arc::new(object.unwrap())));
    }

    /// Tables with an empty, complete list of numbers.
    fn tables() -> Tables {
        let mut tables = Tables::default();
        tables.numbers.begin();
        tables.numbers.complete();
        tables
    }

    fn of(tables: &Tables, network: &str) -> Result<u32, NumberProblem> {
        Numbers::of(tables).get(&network.parse().unwrap()).unwrap().clone()
    }

    #[test]
    fn a_network_has_the_number_of_its_uid() {
        let mut tables = tables();
        network(&mut tables, "blue", "u1");
        assert_eq!(of(&tables, "blue"), Err(NumberProblem::Absent));
        number(&mut tables, "7", ("blue", "u0"), Some(1), false);
        number(&mut tables, "8", ("red", "u1"), Some(1), false);
        number(&mut tables, "09", ("blue", "u1"), Some(1), false);
        assert_eq!(of(&tables, "blue"), Err(NumberProblem::Absent), "none is its own");
        number(&mut tables, "70", ("blue", "u1"), Some(2), false);
        assert_eq!(of(&tables, "blue"), Ok(70));
        assert_eq!(Numbers::of(&tables).get(&"red".parse().unwrap()), None);
    }

    #[test]
    fn the_oldest_counts_and_released_ones_do_not() {
        let mut tables = tables();
        network(&mut tables, "blue", "u1");
        number(&mut tables, "70", ("blue", "u1"), Some(2), true);
        assert_eq!(of(&tables, "blue"), Err(NumberProblem::Released(70)));
        number(&mut tables, "50", ("blue", "u1"), None, false);
        assert_eq!(of(&tables, "blue"), Ok(50));
        number(&mut tables, "60", ("blue", "u1"), Some(4), false);
        assert_eq!(of(&tables, "blue"), Ok(60), "one without a time is the youngest");
        number(&mut tables, "90", ("blue", "u1"), Some(3), false);
        assert_eq!(of(&tables, "blue"), Ok(90));
        number(&mut tables, "80", ("blue", "u1"), Some(3), false);
        assert_eq!(of(&tables, "blue"), Ok(80), "of equally old ones the lowest");
    }

    #[test]
    fn without_a_list_nothing_is_known() {
        let mut tables = Tables::default();
        network(&mut tables, "blue", "u1");
        assert_eq!(of(&tables, "blue"), Err(NumberProblem::Unread));
        tables.numbers.absent(Instant::now());
        assert_eq!(of(&tables, "blue"), Err(NumberProblem::NotServed));
        tables.numbers.served();
        assert_eq!(of(&tables, "blue"), Err(NumberProblem::Absent));
    }

    #[test]
    fn no_two_networks_have_one_number_whatever_the_objects_are() {
        let uids = ["u0", "u1", "u2"];
        // Every assignment of four objects to three networks, released or not.
        for choice in 0..(6_usize.pow(4)) {
            let mut tables = tables();
            for (index, uid) in uids.iter().enumerate() {
                network(&mut tables, &format!("n{index}"), uid);
            }
            let mut rest = choice;
            for object in 1..=4_u8 {
                let (owner, released) = (rest % 3, rest / 3 % 2 == 1);
                rest /= 6;
                let claim = (format!("n{owner}"), uids[owner]);
                let second = Some(object % 2);
                number(&mut tables, &object.to_string(), (&claim.0, claim.1), second, released);
            }
            let numbers = Numbers::of(&tables);
            let used: Vec<u32> = numbers.by_network.values().flatten().copied().collect();
            let distinct: BTreeSet<u32> = used.iter().copied().collect();
            assert_eq!(distinct.len(), used.len(), "{numbers:?}");
            for (name, number) in &numbers.by_network {
                let Ok(number) = number else { continue };
                let object = tables.numbers.get("", &number.to_string()).unwrap();
                assert!(object.spec.network == name.as_str() && object.released_at().is_none());
            }
        }
    }
}
