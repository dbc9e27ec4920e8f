//! Compares the tables and counters of programs and model, row by row.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use kni_common::flow::{
    FLOW_CLOSED, FLOW_CONFIRMED, FLOW_FIN, FLOW_FROM, FLOW_HAIRPIN, FLOW_NODE, FLOW_REPLY, FLOW_TO, FlowValue,
    KIND_FROM_STACK, KIND_LOCAL, KIND_TO_STACK,
};

use super::{Lockstep, counters::counted};
use crate::model::{Counts, Entry, Flow, Kind, Opener, Version};

/// A row of a flow table without the time of its last packet.
#[derive(Debug, PartialEq, Eq)]
struct Fields {
    kind: u16,
    generations: [u32; 2],
    destination: u32,
    flags: u16,
    lifetime: u32,
    /// With a translation: address and ports.
    translation: Option<(std::net::IpAddr, [u16; 2])>,
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
            expected.insert(*flow, self.row_of(flow, entry));
        }
        same("flows", &expected, &kernel)?;
        let fragments = self.tables.fragments()?;
        ensure!(
            fragments == self.model.fragments,
            "fragments: kernel {fragments:?}, model {:?}",
            self.model.fragments
        );
        Ok(())
    }

    fn row_of(&self, flow: &Flow, entry: &Entry) -> Fields {
        let generation = |version: Option<Version>| version.map_or(0, |version| self.generations[&version]);
        let (becomes, to) = (&entry.becomes, entry.becomes.destination != flow.destination);
        let from = becomes.source != flow.source;
        let mut flags = 0;
        for (bit, set) in [
            (FLOW_REPLY, entry.answer),
            (FLOW_CONFIRMED, entry.confirmed),
            (FLOW_FIN, entry.finished),
            (FLOW_CLOSED, entry.closed),
            (FLOW_HAIRPIN, entry.opener == Opener::Itself),
            (FLOW_NODE, entry.opener == Opener::Node),
            (FLOW_TO, to),
            (FLOW_FROM, from),
        ] {
            flags |= if set { bit } else { 0 };
        }
        let address = if to { becomes.destination.0 } else { becomes.source.0 };
        let ports = [becomes.source.1, becomes.destination.1];
        Fields {
            kind: match entry.kind {
                Kind::Local => KIND_LOCAL,
                Kind::ToStack => KIND_TO_STACK,
                Kind::FromStack => KIND_FROM_STACK,
            },
            generations: [generation(entry.sender), generation(entry.receiver)],
            destination: entry.to.unwrap_or(0),
            flags,
            lifetime: u32::try_from(entry.lifetime).expect("a lifetime of the configuration"),
            translation: (to || from).then_some((address, ports)),
        }
    }
}

fn fields(row: &FlowValue) -> Fields {
    let translated = row.flags & (FLOW_TO | FLOW_FROM) != 0;
    let ports = [row.ports.source, row.ports.destination].map(u16::from_be_bytes);
    let address = kni_common::address::to_ip(row.address);
    Fields {
        kind: row.kind,
        generations: [row.source_generation, row.destination_generation],
        destination: row.destination,
        flags: row.flags,
        lifetime: row.lifetime,
        translation: translated.then_some((address, ports)),
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
