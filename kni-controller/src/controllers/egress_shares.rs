//! Decides which unit of the ports of an egress address each node has whose pods leave with it. Pure.
//!
//! A unit that a node no longer needs rests before another node gets it: packets of the former one may be on the way,
//! and peers may remember its connections.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kni_api::egress_address_claim::{EgressShare, UNITS};
use tokio::time::Instant;

/// How long a unit rests.
pub(super) const REST: Duration = Duration::from_mins(1);
/// A time that is later than now by more than this is not true: the clock was stepped back.
const LATER: Duration = Duration::from_mins(1);

/// When this term first saw a unit unused, by address, unit and UID of the node. The clock may be stepped; this time is
/// not.
pub(super) type Unused = BTreeMap<(String, u8, String), Instant>;

/// What the shares of an address are derived from.
pub(super) struct Shares<'a> {
    /// The address.
    pub(super) address: &'a str,
    /// The present shares.
    pub(super) present: &'a [EgressShare],
    /// The nodes that need a unit, by name, with their UIDs.
    pub(super) nodes: &'a BTreeMap<String, String>,
}

impl Shares<'_> {
    /// The shares as they should be. `seen` are the unused units as of the round before, `unused` collects the present
    /// ones.
    pub(super) fn next(
        &self,
        seen: &Unused,
        unused: &mut Unused,
        (clock, now): (Timestamp, Instant),
    ) -> Vec<EgressShare> {
        let mut served = BTreeSet::new();
        let mut shares: BTreeMap<u8, EgressShare> = BTreeMap::new();
        for share in self.present.iter().filter(|share| UNITS.contains(&share.unit)) {
            let is_needed = self.nodes.get(&share.node_name) == Some(&share.node_uid);
            if is_needed && served.insert(&share.node_name) {
                let used = EgressShare {
                    unused_since: None,
                    ..share.clone()
                };
                shares.insert(share.unit, used);
                continue;
            }
            let id = (self.address.to_owned(), share.unit, share.node_uid.clone());
            let first = *seen.get(&id).unwrap_or(&now);
            let rests_for = now.saturating_duration_since(first);
            let since = share.unused_since.as_ref().map(|since| since.0);
            let since = match since.map(|since| (since, Duration::try_from(clock.duration_since(since)))) {
                Some((_, Ok(by_clock))) if by_clock >= REST && rests_for >= REST => continue,
                Some((since, Ok(_))) => since,
                Some((since, Err(_))) if since.duration_since(clock).unsigned_abs() <= LATER => since,
                Some((_, Err(_))) | None => clock,
            };
            unused.insert(id, first);
            let resting = EgressShare {
                unused_since: Some(Time(since)),
                ..share.clone()
            };
            shares.insert(share.unit, resting);
        }
        for (node, uid) in self.nodes.iter().filter(|(node, _)| !served.contains(node)) {
            let Some(unit) = UNITS.clone().find(|unit| !shares.contains_key(unit)) else {
                break;
            };
            let share = EgressShare {
                node_name: node.clone(),
                node_uid: uid.clone(),
                unit,
                unused_since: None,
            };
            shares.insert(unit, share);
        }
        shares.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Term {
        clock: Timestamp,
        now: Instant,
        unused: Unused,
    }

    impl Term {
        fn new() -> Self {
            Self {
                clock: Timestamp::from_second(1_800_000_000).unwrap(),
                now: Instant::now(),
                unused: Unused::new(),
            }
        }

        fn pass(&mut self, seconds: u64) {
            self.clock += Duration::from_secs(seconds);
            self.now += Duration::from_secs(seconds);
        }

        fn next(&mut self, present: &[EgressShare], nodes: &[(&str, &str)]) -> Vec<EgressShare> {
            let nodes = nodes
                .iter()
                .map(|(name, uid)| ((*name).to_owned(), (*uid).to_owned()))
                .collect();
            let mut unused = Unused::new();
            let shares = Shares {
                address: "192.0.2.25",
                present,
                nodes: &nodes,
            };
            let next = shares.next(&self.unused, &mut unused, (self.clock, self.now));
            self.unused = unused;
            next
        }
    }

    /// Unit, node, and whether it rests.
    fn shown(shares: &[EgressShare]) -> Vec<(u8, &str, bool)> {
        shares
            .iter()
            .map(|share| (share.unit, share.node_uid.as_str(), share.unused_since.is_some()))
            .collect()
    }

    #[test]
    fn a_node_keeps_its_unit_and_gets_it_again_while_it_rests() {
        let mut term = Term::new();
        let both = term.next(&[], &[("n1", "u1"), ("n2", "u2")]);
        assert_eq!(shown(&both), [(1, "u1", false), (2, "u2", false)]);
        let one = term.next(&both, &[("n2", "u2")]);
        assert_eq!(shown(&one), [(1, "u1", true), (2, "u2", false)]);
        term.pass(59);
        let other = term.next(&one, &[("n2", "u2"), ("n3", "u3")]);
        assert_eq!(shown(&other), [(1, "u1", true), (2, "u2", false), (3, "u3", false)]);
        assert_eq!(other[0].unused_since, one[0].unused_since);
        let again = term.next(&other, &[("n1", "u1"), ("n2", "u2")]);
        assert_eq!(shown(&again), [(1, "u1", false), (2, "u2", false), (3, "u3", true)]);
    }

    #[test]
    fn a_unit_has_another_node_a_minute_later() {
        let mut term = Term::new();
        let one = term.next(&[], &[("n1", "u1")]);
        // The node was made again under its name.
        let two = term.next(&one, &[("n1", "u9")]);
        assert_eq!(shown(&two), [(1, "u1", true), (2, "u9", false)]);
        term.pass(60);
        let three = term.next(&two, &[("n1", "u9"), ("n2", "u2")]);
        assert_eq!(shown(&three), [(1, "u2", false), (2, "u9", false)]);
    }

    #[test]
    fn neither_a_new_term_nor_a_step_of_the_clock_shortens_the_rest() {
        let mut term = Term::new();
        let one = term.next(&[], &[("n1", "u1")]);
        let resting = term.next(&one, &[]);
        // Forward by an hour: this term has seen it for no time.
        term.clock += Duration::from_hours(1);
        term.now += Duration::from_secs(1);
        let stepped = term.next(&resting, &[]);
        assert_eq!(stepped, resting);
        // Back by two hours: the time that is written is still to come.
        term.clock -= Duration::from_hours(2);
        let anew = term.next(&stepped, &[]);
        assert_eq!(anew[0].unused_since, Some(Time(term.clock)));
        term.unused.clear();
        term.clock += Duration::from_mins(2);
        assert_eq!(shown(&term.next(&anew, &[])), [(1, "u1", true)], "a new term");
        term.pass(60);
        assert_eq!(shown(&term.next(&anew, &[])), []);
    }

    #[test]
    fn the_node_after_the_last_unit_has_none() {
        let mut term = Term::new();
        let names: Vec<String> = (0..70).map(|number| format!("n{number:02}")).collect();
        let nodes: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), name.as_str())).collect();
        let shares = term.next(&[], &nodes);
        assert_eq!(shares.len(), 63);
        assert_eq!((shares[0].unit, shares[62].unit), (1, 63));
        assert_eq!(term.next(&shares, &nodes), shares);
    }
}
