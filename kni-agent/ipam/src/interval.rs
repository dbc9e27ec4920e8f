//! Stores a set of numbers as maximal ranges: a /64 costs as much as a single address.

use std::collections::BTreeMap;

/// Disjoint ranges, both ends inclusive, no two of them adjacent; first number to last number. All operations are
/// O(log n) in the number of ranges, and correct up to and including `u128::MAX`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct IntervalSet {
    ranges: BTreeMap<u128, u128>,
    /// How many numbers the set holds. Saturates, which no set of validated subnets reaches.
    count: u128,
}

impl IntervalSet {
    pub(super) fn count(&self) -> u128 {
        self.count
    }

    pub(super) fn contains(&self, number: u128) -> bool {
        self.range_at(number).is_some()
    }

    /// Adds a range; numbers that are already in the set stay.
    pub(super) fn insert(&mut self, first: u128, last: u128) {
        if first > last {
            return;
        }
        let (mut low, mut high) = (first, last);
        // Merges all ranges that overlap or adjoin the new one. Iterating backwards, those are the ranges that begin at
        // or before `last + 1`.
        while let Some((&start, &end)) = self.ranges.range(..=last.saturating_add(1)).next_back() {
            if end < first && end != first.saturating_sub(1) {
                break;
            }
            self.drop_range(start, end);
            low = low.min(start);
            high = high.max(end);
        }
        self.add_range(low, high);
    }

    /// Removes a range; numbers that are not in the set are ignored.
    pub(super) fn remove(&mut self, first: u128, last: u128) {
        while let Some((&start, &end)) = self.ranges.range(..=last).next_back() {
            if end < first || first > last {
                break;
            }
            self.drop_range(start, end);
            if let Some(after) = last.checked_add(1).filter(|after| *after <= end) {
                self.add_range(after, end);
            }
            if let Some(before) = first.checked_sub(1).filter(|before| *before >= start) {
                self.add_range(start, before);
            }
        }
    }

    /// The intersection of the set with the given ranges, whose ends are inclusive.
    pub(super) fn within(&self, ranges: impl Iterator<Item = (u128, u128)>) -> Self {
        let mut both = Self::default();
        for (first, last) in ranges {
            for (&start, &end) in self.ranges.range(..=last) {
                if end >= first {
                    both.insert(start.max(first), end.min(last));
                }
            }
        }
        both
    }

    /// The smallest number of the set that is not below `from`; without one, the smallest of all.
    pub(super) fn next_cyclic(&self, from: u128) -> Option<u128> {
        if self.range_at(from).is_some() {
            return Some(from);
        }
        let above = self.ranges.range(from..).next();
        above.or_else(|| self.ranges.first_key_value()).map(|(&start, _)| start)
    }

    /// The end of the last range that has a number in common with `first..=last`.
    pub(super) fn last_reaching(&self, first: u128, last: u128) -> Option<u128> {
        let (_, &end) = self.ranges.range(..=last).next_back()?;
        (end >= first).then_some(end)
    }

    fn range_at(&self, number: u128) -> Option<(u128, u128)> {
        let (&start, &end) = self.ranges.range(..=number).next_back()?;
        (end >= number).then_some((start, end))
    }

    fn add_range(&mut self, start: u128, end: u128) {
        self.ranges.insert(start, end);
        self.count = self.count.saturating_add((end - start).saturating_add(1));
    }

    fn drop_range(&mut self, start: u128, end: u128) {
        self.ranges.remove(&start);
        self.count = self.count.saturating_sub((end - start).saturating_add(1));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn both_ends_of_the_number_range_work() {
        let mut set = IntervalSet::default();
        set.insert(u128::MAX, u128::MAX);
        set.insert(u128::MAX - 1, u128::MAX - 1);
        assert_eq!(set.ranges, BTreeMap::from([(u128::MAX - 1, u128::MAX)]));
        set.remove(u128::MAX, u128::MAX);
        assert!(!set.contains(u128::MAX) && set.contains(u128::MAX - 1));
        set.insert(0, 0);
        set.insert(1, 4);
        assert_eq!(set.ranges, BTreeMap::from([(0, 4), (u128::MAX - 1, u128::MAX - 1)]));
        set.remove(0, 0);
        assert_eq!(set.next_cyclic(u128::MAX), Some(1));
        assert_eq!(set.count(), 5);
    }

    /// The same sets, at the lower edge, in the middle and at the upper edge of the number range.
    const BASES: [u128; 3] = [0, 1 << 64, u128::MAX - 63];

    proptest! {
        #[test]
        fn behaves_like_a_set_of_numbers(
            base in proptest::sample::select(&BASES),
            ops in proptest::collection::vec((any::<bool>(), 0_u128..64, 0_u128..64), 0..60),
            from in 0_u128..64,
        ) {
            let mut set = IntervalSet::default();
            let mut model = BTreeSet::new();
            for (insert, a, b) in ops {
                if insert {
                    set.insert(base + a, base + b);
                    model.extend((a..=b).map(|n| base + n));
                } else {
                    set.remove(base + a, base + b);
                    model.retain(|n| *n < base + a || *n > base + b);
                }
                prop_assert_eq!(set.count(), model.len() as u128);
                for n in 0..64 {
                    prop_assert_eq!(set.contains(base + n), model.contains(&(base + n)));
                }
                let ends: Vec<_> = set.ranges.iter().collect();
                prop_assert!(ends.windows(2).all(|w| w[0].1 + 1 < *w[1].0), "not maximal: {:?}", ends);
            }
            let expected = model.range(base + from..).next().or_else(|| model.first()).copied();
            prop_assert_eq!(set.next_cyclic(base + from), expected);
        }
    }
}
