//! Records the enforcement of each endpoint and orders the row updates of a change.

use std::collections::BTreeMap;

use kni_common::endpoint::EndpointRow;
use kni_model::{EndpointId, enforcement::Enforcement};

use super::DataplaneError;

/// The enforcement of each endpoint, published or not.
#[derive(Debug, Default)]
pub(super) struct Enforced(BTreeMap<EndpointId, Enforcement>);

impl Enforced {
    /// Reads the rows of an earlier agent.
    pub(super) fn from_rows<'a>(rows: impl IntoIterator<Item = &'a (u32, EndpointRow)>) -> Self {
        Self(of_rows(rows))
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
pub(super) fn of_rows<'a>(rows: impl IntoIterator<Item = &'a (u32, EndpointRow)>) -> BTreeMap<EndpointId, Enforcement> {
    let published = rows.into_iter().filter(|(_, row)| row.network != 0);
    published
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

/// The two rounds of writes that apply other enforcements: in the first one every row gets the new policy words and
/// keeps its generation, in the second one the generation follows. A program that reads a new generation has read words
/// that are no older, so that no flow is ever marked as judged by policies that were not yet applied.
pub(super) fn rounds(
    rows: &[(u32, EndpointRow)],
    changes: &[(EndpointId, Enforcement)],
    mut next_generation: impl FnMut() -> u32,
) -> [Vec<(u32, EndpointRow)>; 2] {
    let found: BTreeMap<u32, &EndpointRow> = rows.iter().map(|(endpoint, row)| (*endpoint, row)).collect();
    // Where an endpoint has two changes, the last one counts.
    let changes: BTreeMap<EndpointId, Enforcement> = changes.iter().copied().collect();
    let words: Vec<(u32, EndpointRow)> = changes
        .iter()
        .filter_map(|(endpoint, enforcement)| {
            let row = found.get(&endpoint.0).filter(|row| row.network != 0)?;
            Some((endpoint.0, with(row, *enforcement)))
        })
        .collect();
    let generations = words
        .iter()
        .map(|(endpoint, row)| {
            let generation = next_generation();
            (*endpoint, EndpointRow { generation, ..*row })
        })
        .collect();
    [words, generations]
}

/// The row with other policy words.
pub(super) fn with(row: &EndpointRow, enforcement: Enforcement) -> EndpointRow {
    EndpointRow {
        policy: enforcement.policy,
        identity4: enforcement.identity4,
        identity6: enforcement.identity6,
        ..*row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(network: u32, generation: u32, policy: u32) -> EndpointRow {
        EndpointRow {
            network,
            generation,
            incarnation: 3,
            policy,
            flags: 1,
            ..EndpointRow::default()
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
        let rows = [(1, row(5, 10, 0)), (2, row(0, 11, 0)), (3, row(5, 12, 70))];
        let changes = [
            (EndpointId(3), words(90)),
            (EndpointId(2), words(50)),
            (EndpointId(1), words(40)),
            (EndpointId(9), words(60)),
        ];
        let mut generation = 20;
        let [first, second] = rounds(&rows, &changes, || {
            generation += 1;
            generation
        });
        assert_eq!(
            first,
            [(1, with(&rows[0].1, words(40))), (3, with(&rows[2].1, words(90)))]
        );
        assert_eq!(
            first.iter().map(|(_, row)| row.generation).collect::<Vec<_>>(),
            [10, 12]
        );
        assert_eq!(
            second.iter().map(|(_, row)| row.generation).collect::<Vec<_>>(),
            [21, 22]
        );
        for ((endpoint, before), (same, after)) in first.iter().zip(&second) {
            assert_eq!(endpoint, same);
            let generation = after.generation;
            assert_eq!(
                EndpointRow { generation, ..*before },
                *after,
                "only the generation differs"
            );
        }
    }

    #[test]
    fn the_record_comes_from_published_rows_and_fails_closed() {
        let rows = [(1, row(5, 10, 40)), (2, row(0, 11, 41))];
        let mut enforced = Enforced::from_rows(&rows);
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
