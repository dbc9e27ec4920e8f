//! Describes what was measured during an operation: the traffic by class, the denied packets, the objects.

use std::{collections::BTreeMap, time::Duration};

use kni_integration::traffic::StreamReport;

use super::objects::Difference;

/// The traffic that runs during each operation, by what is between its ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    /// Pods of node1.
    Beside,
    /// A pod of node1 and one of node2.
    Across,
    /// A pod of node1, and a Service whose backend is on node2.
    Service,
    /// A pod of node1 and one of node3.
    Third,
    /// Connections that are opened one after the other, at the Service.
    Opened,
}

impl Class {
    pub(super) const ALL: [Self; 5] = [Self::Beside, Self::Across, Self::Service, Self::Third, Self::Opened];
}

/// The reason for which packets of the denied pairs are dropped.
pub(super) const DENIED: &str = "policy_ingress";

/// The packets of the denied pairs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) sent: u64,
    /// Those that a node has dropped, by reason.
    pub(super) dropped: BTreeMap<String, u64>,
    /// Those that a server received.
    pub(super) received: u64,
}

impl Refused {
    /// Each packet is counted as dropped once, for the policy or one of these reasons.
    pub(super) fn is_complete(&self, reasons: &[&str]) -> bool {
        let reasons = [DENIED].into_iter().chain(reasons.iter().copied());
        let counts = reasons.filter_map(|reason| self.dropped.get(reason));
        counts.sum::<u64>() == self.sent
    }
}

/// What happened in a row.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub(super) took: Duration,
    /// The server that each stream asks, and its report.
    pub(super) streams: Vec<(Class, String, StreamReport)>,
    /// Streams of the operation itself, which lose nothing.
    pub(super) own: Vec<(String, StreamReport)>,
    pub(super) refused: Refused,
    /// Between the objects before and after.
    pub(super) differences: Vec<Difference>,
    /// From the end of the operation until the objects were as expected.
    pub(super) objects_after: Duration,
}

impl Measured {
    pub(super) fn of(&self, class: Class) -> Totals {
        let mut totals = Totals::default();
        for (_, _, report) in self.streams.iter().filter(|(of, ..)| *of == class) {
            totals.sent += report.sent;
            totals.lost += report.lost();
            totals.broken += usize::from(report.broken.is_some());
            totals.gap = totals.gap.max(report.longest_silence);
        }
        totals
    }
}

/// The sums of a class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) sent: u64,
    pub(super) lost: u64,
    pub(super) broken: usize,
    pub(super) gap: Duration,
}

impl Totals {
    pub(super) const fn is_whole(&self) -> bool {
        self.sent > 0 && self.lost == 0 && self.broken == 0
    }
}
