//! Finds the objects of a network, or of a node in a network, by their names.

use std::ops::Bound;

use kni_api::network_members;
use kni_cluster::{Key, Table};

/// The beginning of the names of a node's objects in a network.
pub(super) fn prefix(network: &str, node: &str) -> String {
    let mut first = network_members::name(network, node, 0);
    first.truncate(first.len() - 1);
    first
}

/// The objects whose names begin with `prefix`: those of a network, or of a node in a network.
pub(super) fn beginning_with<'a, V>(table: &'a Table<V>, prefix: &str) -> impl Iterator<Item = Key> + use<'a, V>
where
    V: PartialEq,
{
    let prefix = prefix.to_owned();
    let first = Key::new("", &prefix);
    let rows = table.rows().range((Bound::Included(first), Bound::Unbounded));
    rows.take_while(move |(key, _)| key.name.starts_with(&prefix))
        .map(|(key, _)| key.clone())
}
