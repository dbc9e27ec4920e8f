//! Compares the tables and counters of programs and model, row by row.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Result, ensure};
use kni_common::flow::{
    END_LOCAL, END_STACK, FLOW_AGED, FLOW_CLOSED, FLOW_CONFIRMED, FLOW_FIN_FIRST, FLOW_FIN_SECOND, FLOW_FROM_SECOND,
    FLOW_HAIRPIN, FLOW_NODE, FLOW_OPENED_BY_SECOND, FLOW_REPLIED, FLOW_RESET, FLOW_SERVICE, FLOW_TRANSLATED, FlowEnd,
    FlowValue,
};

use super::{Lockstep, counters::counted};
use crate::model::{Counts, End, Entry, Opener};

/// A row of a flow table without the time of its last packet.
#[derive(Debug, PartialEq, Eq)]
struct Fields {
    /// Kind, id and generation.
    ends: [(u8, u32, u32); 2],
    flags: u16,
    lifetime: u32,
    /// With a translation: source and destination.
    translation: Option<[(std::net::IpAddr, u16); 2]>,
}

impl Lockstep {
    /// Compares all counters and returns the kernel's.
    pub fn compare_counters(&self) -> Result<Counts> {
        let kernel = counted(self.programs())?;
        same("counters", &self.model.counts, &kernel)?;
        Ok(kernel)
    }

    /// Compares the policy hits of allowing rules and denials.
    pub fn compare_hits(&self) -> Result<()> {
        same("hits", &self.model.hits, &self.programs().dataplane().hits()?)
    }

    /// Compares both flow tables and the fragment table, row by row.
    pub fn compare_tables(&self) -> Result<()> {
        let mut kernel = BTreeMap::new();
        for (flow, row) in self.tables.flows()? {
            kernel.insert(flow, fields(&row));
        }
        let mut expected = BTreeMap::new();
        for (flow, entry) in &self.model.flows {
            expected.insert(*flow, self.row_of(entry));
        }
        same("flows", &expected, &kernel)?;
        let fragments = self.tables.fragments()?;
        let known = self.model.fragments.iter();
        let expected: HashMap<_, _> = known
            .map(|(datagram, first)| (*datagram, (first.protocol, first.ports)))
            .collect();
        ensure!(
            fragments == expected,
            "fragments: kernel {fragments:?}, model {expected:?}"
        );
        Ok(())
    }

    fn row_of(&self, entry: &Entry) -> Fields {
        let mut flags = 0;
        for (bit, set) in [
            (FLOW_OPENED_BY_SECOND, entry.opened_by == 1),
            (FLOW_REPLIED, entry.replied),
            (FLOW_CONFIRMED, entry.confirmed),
            (FLOW_AGED, entry.aged),
            (FLOW_FIN_FIRST, entry.finished[0]),
            (FLOW_FIN_SECOND, entry.finished[1]),
            (FLOW_CLOSED, entry.closed),
            (FLOW_RESET, entry.reset),
            (FLOW_TRANSLATED, entry.only_from.is_some()),
            (FLOW_FROM_SECOND, entry.only_from == Some(1)),
            (FLOW_SERVICE, entry.service),
            (FLOW_HAIRPIN, entry.opener == Opener::Itself),
            (FLOW_NODE, entry.opener == Opener::Node),
        ] {
            flags |= if set { bit } else { 0 };
        }
        Fields {
            ends: [
                self.end(entry.ends[0], entry.ends[1]),
                self.end(entry.ends[1], entry.ends[0]),
            ],
            flags,
            lifetime: u32::try_from(entry.lifetime).expect("a lifetime of the configuration"),
            translation: entry
                .only_from
                .map(|_| [entry.becomes.source, entry.becomes.destination]),
        }
    }

    /// An end, opposite to another one.
    fn end(&self, end: End, opposite: End) -> (u8, u32, u32) {
        match (end, opposite) {
            (End::Local(id, version), _) => (END_LOCAL, id, self.generations[&version]),
            (End::Stack(epoch), End::Local(id, _)) => (END_STACK, 0, self.epochs[&(id, epoch)]),
            (End::Stack(_), End::Stack(_)) => panic!("a flow without an endpoint"),
        }
    }
}

fn fields(row: &FlowValue) -> Fields {
    let [from, to] = [row.ports.source, row.ports.destination].map(u16::from_be_bytes);
    let [source, destination] = [row.source, row.destination].map(kni_common::address::to_ip);
    let end = |kind, end: FlowEnd| (kind, end.id, end.generation);
    Fields {
        ends: [end(row.first_kind, row.first), end(row.second_kind, row.second)],
        flags: row.flags,
        lifetime: row.lifetime,
        translation: (row.flags & FLOW_TRANSLATED != 0).then_some([(source, from), (destination, to)]),
    }
}

fn same<K: Ord + std::fmt::Debug, V: PartialEq + std::fmt::Debug>(
    what: &str,
    model: &BTreeMap<K, V>,
    kernel: &BTreeMap<K, V>,
) -> Result<()> {
    let mut differences = Vec::new();
    for (key, value) in model {
        let found = kernel.get(key);
        if found != Some(value) {
            differences.push(format!("{key:?}: model {value:?}, kernel {found:?}"));
        }
    }
    for (key, value) in kernel {
        if !model.contains_key(key) {
            differences.push(format!("{key:?}: model has none, kernel {value:?}"));
        }
    }
    ensure!(
        differences.is_empty(),
        "{what} differ:\n{}",
        differences[..differences.len().min(20)].join("\n")
    );
    Ok(())
}
