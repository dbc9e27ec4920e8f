//! Records the enforcement of each endpoint and orders the row updates of a change.

use std::collections::{BTreeMap, BTreeSet};

use kni_common::endpoint::{EndpointPolicy, EndpointRow};
use kni_model::{EndpointId, enforcement::Enforcement};

use super::DataplaneError;

/// The enforcement of each endpoint, published or not.
#[derive(Debug, Default)]
pub(super) struct Enforced(BTreeMap<EndpointId, Enforcement>);

impl Enforced {
    /// Reads the rows of an earlier agent.
    pub(super) fn from_rows(rows: &[(u32, EndpointRow)], policies: &[(u32, EndpointPolicy)]) -> Self {
        Self(of_rows(rows, policies))
    }

    /// Fails for an endpoint without enforcement, which must not be published.
    pub(super) fn get(&self, endpoint: EndpointId) -> Result<Enforcement, DataplaneError> {
        let found = self.0.get(&endpoint).copied();
        found.ok_or(DataplaneError::NotEnforced { endpoint: endpoint.0 })
    }

    pub(super) fn record(&mut self, changes: &[(EndpointId, Enforcement)]) {
        self.0.extend(changes.iter().copied());
    }

    pub(super) fn remove(&mut self, endpoint: EndpointId) {
        self.0.remove(&endpoint);
    }
}

/// The enforcements in the rows of published endpoints.
pub(super) fn of_rows(
    rows: &[(u32, EndpointRow)],
    policies: &[(u32, EndpointPolicy)],
) -> BTreeMap<EndpointId, Enforcement> {
    let published: BTreeSet<u32> = published(rows).collect();
    let policies = policies.iter().filter(|(endpoint, _)| published.contains(endpoint));
    policies
        .map(|(endpoint, row)| {
            let enforcement = Enforcement {
                policy: row.policy,
                identity4: row.identity4,
                identity6: row.identity6,
            };
            (EndpointId(*endpoint), enforcement)
        })
        .collect()
}

fn published(rows: &[(u32, EndpointRow)]) -> impl Iterator<Item = u32> {
    rows.iter()
        .filter(|(_, row)| row.network != 0)
        .map(|(endpoint, _)| *endpoint)
}

/// The rows of a change, in the order in which they must be written: first the policy words, then the generations. A
/// program that reads a new generation reads words that are no older, so that no flow is ever marked as evaluated by
/// policies that were not yet applied.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rounds {
    pub(super) words: Vec<(u32, EndpointPolicy)>,
    pub(super) generations: Vec<(u32, EndpointRow)>,
}

/// The writes that apply other enforcements.
pub(super) fn rounds(
    rows: &[(u32, EndpointRow)],
    policies: &[(u32, EndpointPolicy)],
    changes: &[(EndpointId, Enforcement)],
    mut next_generation: impl FnMut() -> u32,
) -> Rounds {
    // Where an endpoint has two changes, the last one counts.
    let changes: BTreeMap<u32, Enforcement> = changes.iter().map(|(endpoint, to)| (endpoint.0, *to)).collect();
    let policies: BTreeMap<u32, EndpointPolicy> = policies.iter().copied().collect();
    let affected: Vec<(u32, EndpointRow, Enforcement)> = rows
        .iter()
        .filter(|(_, row)| row.network != 0)
        .filter_map(|(endpoint, row)| Some((*endpoint, *row, *changes.get(endpoint)?)))
        .collect();
    let before = |endpoint: &u32| policies.get(endpoint).copied().unwrap_or_default();
    Rounds {
        words: affected
            .iter()
            .map(|(endpoint, _, enforcement)| (*endpoint, with(&before(endpoint), *enforcement)))
            .collect(),
        generations: affected
            .iter()
            .map(|(endpoint, row, _)| {
                let generation = next_generation();
                (*endpoint, EndpointRow { generation, ..*row })
            })
            .collect(),
    }
}

/// The row with other policy words.
const fn with(row: &EndpointPolicy, enforcement: Enforcement) -> EndpointPolicy {
    EndpointPolicy {
        policy: enforcement.policy,
        identity4: enforcement.identity4,
        identity6: enforcement.identity6,
        ifindex: row.ifindex,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(network: u32, generation: u32) -> EndpointRow {
        EndpointRow {
            network,
            generation,
            incarnation: 3,
            flags: 1,
            ..EndpointRow::default()
        }
    }

    fn policy(policy: u32) -> EndpointPolicy {
        EndpointPolicy {
            policy,
            ifindex: 9,
            ..EndpointPolicy::default()
        }
    }

    const fn words(policy: u32) -> Enforcement {
        Enforcement {
            policy,
            identity4: policy + 1,
            identity6: policy + 2,
        }
    }

    #[test]
    fn words_come_before_generations_and_free_rows_are_left_alone() {
        let rows = [(1, row(5, 10)), (2, row(0, 11)), (3, row(5, 12))];
        let policies = [(1, policy(0)), (2, policy(0)), (3, policy(70))];
        let changes = [
            (EndpointId(3), words(90)),
            (EndpointId(2), words(50)),
            (EndpointId(1), words(40)),
            (EndpointId(9), words(60)),
        ];
        let mut generation = 20;
        let rounds = rounds(&rows, &policies, &changes, || {
            generation += 1;
            generation
        });
        let expected = [(1, with(&policy(0), words(40))), (3, with(&policy(70), words(90)))];
        assert_eq!(rounds.words, expected);
        let expected = [
            (
                1,
                EndpointRow {
                    generation: 21,
                    ..row(5, 10)
                },
            ),
            (
                3,
                EndpointRow {
                    generation: 22,
                    ..row(5, 12)
                },
            ),
        ];
        assert_eq!(rounds.generations, expected, "only the generation differs");
    }

    #[test]
    fn the_record_comes_from_published_rows_and_fails_closed() {
        let rows = [(1, row(5, 10)), (2, row(0, 11))];
        let mut enforced = Enforced::from_rows(&rows, &[(1, policy(40)), (2, policy(41))]);
        assert_eq!(enforced.get(EndpointId(1)).unwrap().policy, 40);
        assert!(matches!(
            enforced.get(EndpointId(2)),
            Err(DataplaneError::NotEnforced { endpoint: 2 })
        ));
        enforced.record(&[(EndpointId(2), words(7))]);
        assert_eq!(enforced.get(EndpointId(2)).unwrap(), words(7));
        enforced.remove(EndpointId(2));
        assert!(enforced.get(EndpointId(2)).is_err());
    }
}
