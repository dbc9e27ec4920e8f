//! Defines why a node does not use a number for a network in the whole cluster, or not the one that the cluster has
//! given it.

use std::collections::BTreeMap;

use super::NetworkName;

/// Why a network has no number on a node, or not that of its `NetworkNumber`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NumberProblem {
    /// The API server does not serve the kind: its definitions are those of an earlier release.
    #[error("the API server does not serve NetworkNumbers")]
    NotServed,
    /// The objects were not read yet.
    #[error("the numbers of networks were not read yet")]
    Unread,
    /// There is no object.
    #[error("the network has no number yet; kni-controller gives it one")]
    Absent,
    /// Its only objects are released ones.
    #[error("number {0} of the network is released")]
    Released(u32),
    /// The object is gone while pods of the node are in the network.
    #[error("the network has lost number {retained}, which this node uses until its last pod has left the network")]
    Lost {
        /// The number that the node uses.
        retained: u32,
    },
    /// The number has changed while pods of the node are in the network.
    #[error(
        "the number of the network has changed from {retained} to {assigned}; this node uses {retained} until its last \
         pod has left the network"
    )]
    Changed {
        /// The number that the node uses.
        retained: u32,
        /// The number of the `NetworkNumber`.
        assigned: u32,
    },
    /// Several networks of the node have the number.
    #[error("number {number} is that of networks {}: none of them exchanges packets with other nodes", listed(.networks))]
    Shared {
        /// The number.
        number: u32,
        /// The networks, in order.
        networks: Vec<NetworkName>,
    },
}

impl NumberProblem {
    /// Whether the node uses another number than the cluster has given the network, because pods are in it.
    pub const fn is_retained(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::Changed { .. })
    }

    /// Whether a user has to act: nodes may disagree about the number, or do not use it.
    pub const fn is_conflict(&self) -> bool {
        matches!(self, Self::Changed { .. } | Self::Shared { .. })
    }
}

fn listed(networks: &[NetworkName]) -> String {
    let names: Vec<&str> = networks.iter().map(NetworkName::as_str).collect();
    names.join(" and ")
}

/// The numbers that several of the networks have, with all networks that have them.
pub fn shared_numbers<'a>(
    numbers: impl IntoIterator<Item = (&'a NetworkName, u32)>,
) -> BTreeMap<u32, Vec<NetworkName>> {
    let mut all: BTreeMap<u32, Vec<NetworkName>> = BTreeMap::new();
    for (network, number) in numbers {
        all.entry(number).or_default().push(network.clone());
    }
    all.retain(|_, networks| networks.len() > 1);
    for networks in all.values_mut() {
        networks.sort();
    }
    all
}

/// What a network uses before [`shared_numbers`] applies: the number that its pods began with stays while there are
/// any.
///
/// `retained` is the number of the network with pods on the node, `assigned` that of the cluster.
pub fn number_in_use(
    retained: Option<u32>,
    assigned: Option<u32>,
    problem: Option<&NumberProblem>,
) -> (Option<u32>, Option<NumberProblem>) {
    match (retained, assigned) {
        (Some(retained), Some(assigned)) if retained != assigned => {
            (Some(retained), Some(NumberProblem::Changed { retained, assigned }))
        }
        (Some(retained), None) => {
            let is_gone = matches!(problem, Some(NumberProblem::Absent | NumberProblem::Released(_)));
            (Some(retained), is_gone.then_some(NumberProblem::Lost { retained }))
        }
        (Some(_) | None, assigned) => (assigned, problem.cloned()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> NetworkName {
        text.parse().unwrap()
    }

    #[test]
    fn a_number_of_two_networks_names_both() {
        let [a, b, c] = ["a", "b", "c"].map(name);
        let shared = shared_numbers([(&b, 7), (&c, 8), (&a, 7)]);
        assert_eq!(shared, [(7, vec![a, b])].into());
        let problem = NumberProblem::Shared {
            number: 7,
            networks: shared[&7].clone(),
        };
        assert!(problem.is_conflict() && !problem.is_retained());
        assert_eq!(
            problem.to_string(),
            "number 7 is that of networks a and b: none of them exchanges packets with other nodes"
        );
    }

    #[test]
    fn the_number_that_pods_began_with_stays() {
        let changed = NumberProblem::Changed {
            retained: 7,
            assigned: 8,
        };
        let lost = NumberProblem::Lost { retained: 7 };
        let absent = NumberProblem::Absent;
        for (retained, assigned, problem, expected) in [
            (None, None, Some(&absent), (None, Some(absent.clone()))),
            (None, Some(8), None, (Some(8), None)),
            (Some(7), Some(7), None, (Some(7), None)),
            (Some(7), Some(8), None, (Some(7), Some(changed))),
            (Some(7), None, Some(&absent), (Some(7), Some(lost.clone()))),
            (Some(7), None, Some(&NumberProblem::Released(7)), (Some(7), Some(lost))),
            // The cluster is silent about it: nothing has changed.
            (Some(7), None, Some(&NumberProblem::Unread), (Some(7), None)),
            (Some(7), None, None, (Some(7), None)),
        ] {
            assert_eq!(
                number_in_use(retained, assigned, problem),
                expected,
                "{retained:?} {assigned:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn pods_never_see_a_change(retained in 1_u32..9, assigned in proptest::option::of(1_u32..9)) {
            let (used, problem) = number_in_use(Some(retained), assigned, None);
            prop_assert_eq!(used, Some(retained));
            prop_assert_eq!(problem.is_some(), assigned.is_some_and(|assigned| assigned != retained));
        }

        #[test]
        fn networks_without_a_shared_number_have_different_ones(numbers in proptest::collection::vec(1_u32..9, 0..12)) {
            let names: Vec<NetworkName> = (0..numbers.len()).map(|index| name(&format!("n{index}"))).collect();
            let shared = shared_numbers(names.iter().zip(numbers.iter().copied()));
            let open: Vec<u32> = numbers.iter().copied().filter(|number| !shared.contains_key(number)).collect();
            let distinct: std::collections::BTreeSet<u32> = open.iter().copied().collect();
            prop_assert_eq!(distinct.len(), open.len());
            let closed: usize = shared.values().map(Vec::len).sum();
            prop_assert_eq!(closed + open.len(), numbers.len());
        }
    }
}
