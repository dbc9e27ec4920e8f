//! Finds the objects of a node in a network that are more than its pods can need. Pure.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use kni_api::NetworkMembers;
use kni_cluster::{Key, Tables};

use super::super::member_names::{beginning_with, prefix};

/// How many objects a node may have in a network, whatever its pods: enough for 1024 interfaces. Objects from which
/// most members have gone are not joined, so their number alone is no sign of a false report.
pub(super) const MOST: usize = 16;
/// A node may have one more for so many pods.
const PODS: usize = 16;

/// The surplus objects by the beginning of their names: of a node in a network.
#[derive(Debug, Default)]
pub(super) struct Surplus(BTreeMap<String, BTreeSet<Key>>);

impl Surplus {
    /// Counts again where objects have changed; returns those that have become surplus or are so no longer.
    pub(super) fn update(&mut self, tables: &Tables, changed: &BTreeSet<Key>) -> BTreeSet<Key> {
        let groups: BTreeSet<&str> = changed.iter().filter_map(|key| group_of(&key.name)).collect();
        let mut concerned = BTreeSet::new();
        for group in groups {
            let now = surplus(tables, group);
            let before = self.0.remove(group).unwrap_or_default();
            concerned.extend(before.symmetric_difference(&now).cloned());
            if !now.is_empty() {
                self.0.insert(group.to_owned(), now);
            }
        }
        concerned
    }

    /// Whether an object is surplus, and if so, whether it is the first one of its node and network.
    pub(super) fn find(&self, key: &Key) -> Option<bool> {
        let of_node = self.0.get(group_of(&key.name)?)?;
        of_node.contains(key).then(|| of_node.first() == Some(key))
    }
}

/// The part of a name that the objects of one node in one network have in common.
fn group_of(name: &str) -> Option<&str> {
    name.get(..=name.rfind('.')?)
}

/// The objects over the permitted number: those with the fewest confirmed members, of equal ones the last ones.
fn surplus(tables: &Tables, group: &str) -> BTreeSet<Key> {
    let keys: Vec<Key> = beginning_with(&tables.members, group).collect();
    if keys.len() <= MOST {
        return BTreeSet::new();
    }
    let objects = keys
        .into_iter()
        .filter_map(|key| Some((tables.members.rows().get(&key)?, key)));
    // Others are removed anyway.
    let mut objects: Vec<_> = objects
        .filter(|(object, _)| prefix(&object.spec.network, &object.spec.node_name) == group)
        .collect();
    let Some((first, _)) = objects.first() else {
        return BTreeSet::new();
    };
    let node = first.spec.node_name.as_str();
    let pods = tables.pods.rows().values().filter(|pod| pod.node == node).count();
    let most = MOST + pods / PODS;
    let confirmed = |object: &NetworkMembers| object.status.as_ref().map_or(0, |status| status.members.len());
    objects.sort_by_cached_key(|(object, key)| (Reverse(confirmed(object)), key.name.len(), key.clone()));
    objects.into_iter().skip(most).map(|(_, key)| key).collect()
}
