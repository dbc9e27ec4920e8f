//! Keeps counters monotonic: rows of the dataplane restart from zero with their next owner, a metric must not.

use std::collections::BTreeMap;

use kni_common::{Direction, Verdict};

use super::Traffic;

/// Identifies one packet counter of the page.
pub(super) type Series = (String, Direction, Verdict);

/// Sums over all observed values. Counts from the first value of a row, so that an agent that takes over the rows of an
/// earlier one does not count them twice. Packets of an attachment between the last read and its end are not counted.
#[derive(Debug, Default)]
pub(super) struct Totals {
    begun: bool,
    last: BTreeMap<(String, Series), (u64, u64)>,
    sums: BTreeMap<Series, (u64, u64)>,
}

impl Totals {
    /// Adds the current rows.
    pub(super) fn take(&mut self, rows: &[Traffic]) {
        let mut now = BTreeMap::new();
        for row in rows {
            let series = (row.network.clone(), row.direction, row.verdict);
            let entry: &mut (u64, u64) = now.entry((row.owner.clone(), series)).or_default();
            entry.0 = entry.0.saturating_add(row.packets);
            entry.1 = entry.1.saturating_add(row.bytes);
        }
        for (key, (packets, bytes)) in &now {
            let last = self.last.get(key).copied();
            let sum = self.sums.entry(key.1.clone()).or_default();
            if self.begun {
                let (before_packets, before_bytes) = last.unwrap_or_default();
                sum.0 = sum.0.saturating_add(grown(before_packets, *packets));
                sum.1 = sum.1.saturating_add(grown(before_bytes, *bytes));
            }
        }
        self.last = now;
        self.begun = true;
    }

    /// Packets and bytes of each series.
    pub(super) fn sums(&self) -> &BTreeMap<Series, (u64, u64)> {
        &self.sums
    }
}

/// Converts a counter that may restart to a monotonic one. Counts from zero: its first value is included.
#[derive(Debug, Default)]
pub(super) struct Total {
    last: u64,
    sum: u64,
}

impl Total {
    /// Adds the current value; returns the sum.
    pub(super) fn take(&mut self, now: u64) -> u64 {
        self.sum = self.sum.saturating_add(grown(self.last, now));
        self.last = now;
        self.sum
    }
}

/// How much a counter has grown; one that is smaller than before has restarted from zero.
fn grown(before: u64, now: u64) -> u64 {
    now.checked_sub(before).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(owner: &str, packets: u64) -> Traffic {
        Traffic {
            owner: owner.to_owned(),
            network: "blue".to_owned(),
            direction: Direction::FromPod,
            verdict: Verdict::Redirected,
            packets,
            bytes: packets * 10,
        }
    }

    fn sum(totals: &Totals) -> (u64, u64) {
        totals
            .sums()
            .values()
            .fold((0, 0), |sum, row| (sum.0 + row.0, sum.1 + row.1))
    }

    #[test]
    fn what_was_there_before_is_not_counted_and_what_goes_stays_counted() {
        let mut totals = Totals::default();
        totals.take(&[row("a", 100)]);
        assert_eq!(sum(&totals), (0, 0));
        totals.take(&[row("a", 105), row("b", 7)]);
        assert_eq!(sum(&totals), (12, 120));
        totals.take(&[row("b", 8)]);
        assert_eq!(sum(&totals), (13, 130), "a is gone");
        totals.take(&[row("c", 2), row("b", 8)]);
        assert_eq!(sum(&totals), (15, 150), "c has a's row");
        totals.take(&[row("c", 1), row("b", 8)]);
        assert_eq!(sum(&totals), (16, 160), "a counter that shrinks began anew");
    }

    #[test]
    fn rows_of_one_owner_and_series_add_up() {
        let mut totals = Totals::default();
        totals.take(&[]);
        totals.take(&[row("a", 1), row("a", 2)]);
        assert_eq!(sum(&totals), (3, 30));
        assert_eq!(totals.sums().len(), 1);
    }

    #[test]
    fn a_number_that_begins_anew_goes_on() {
        let mut total = Total::default();
        assert_eq!([5, 7, 3, 3].map(|now| total.take(now)), [5, 7, 10, 10]);
    }
}
