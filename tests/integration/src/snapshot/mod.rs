//! Captures the state of a node, so that a test can prove that there are no leftovers.

mod collect;

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;

use crate::namespaces::Namespaces;

/// All possible leftovers of an agent on a node, as sorted lines by kind: links, addresses, routes of all tables,
/// rules, permanent neighbours, queueing disciplines, named namespaces, mounts, files, the bpffs tree, programs on
/// links, nftables rules and sysctls. Excludes values that change by themselves: indexes, counters, lifetimes, link
/// state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSnapshot {
    sections: BTreeMap<&'static str, Vec<String>>,
    all_bpf: bool,
}

impl NodeSnapshot {
    /// Captures the current state of the node.
    pub fn take(ns: &Namespaces) -> Result<Self> {
        Ok(Self {
            sections: collect::node(ns)?,
            all_bpf: false,
        })
    }

    /// [`Self::take`] and all eBPF programs, maps and links of the kernel. These are not specific to a node: suitable
    /// for the machine itself, or for an exclusive test.
    pub fn take_with_all_bpf(ns: &Namespaces) -> Result<Self> {
        let mut sections = collect::node(ns)?;
        sections.insert("bpf object", collect::bpf_objects(ns)?);
        Ok(Self {
            sections,
            all_bpf: true,
        })
    }

    /// The lines of one kind, for example `link` or `route`.
    pub fn section(&self, kind: &str) -> &[String] {
        self.sections.get(kind).map_or(&[], Vec::as_slice)
    }

    /// One line per difference: `+ link kni0 ...` for additions, `- route ...` for removals.
    pub fn diff(before: &Self, after: &Self) -> Vec<String> {
        let kinds: BTreeSet<_> = before.sections.keys().chain(after.sections.keys()).collect();
        let mut lines = Vec::new();
        for kind in kinds {
            let (old, new) = (before.section(kind), after.section(kind));
            lines.extend(surplus(old, new).map(|line| format!("- {kind} {line}")));
            lines.extend(surplus(new, old).map(|line| format!("+ {kind} {line}")));
        }
        lines
    }

    /// Waits until the state is restored; returns the differences that remain at the end. Devices and namespaces are
    /// removed asynchronously.
    pub fn differences_within(&self, ns: &Namespaces, timeout: Duration) -> Result<Vec<String>> {
        let deadline = Instant::now() + timeout;
        loop {
            let now = if self.all_bpf {
                Self::take_with_all_bpf(ns)?
            } else {
                Self::take(ns)?
            };
            let differences = Self::diff(self, &now);
            if differences.is_empty() || Instant::now() >= deadline {
                return Ok(differences);
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Panics unless the state is restored within `timeout`.
    #[track_caller]
    pub fn assert_unchanged(&self, ns: &Namespaces, timeout: Duration) {
        let differences = self.differences_within(ns, timeout).expect("a node can be looked at");
        assert!(
            differences.is_empty(),
            "{} is not as before:\n{}",
            ns.name(),
            differences.join("\n")
        );
    }
}

/// The lines that occur more often in `these` than in `others`; both sorted.
fn surplus<'a>(these: &'a [String], others: &[String]) -> impl Iterator<Item = &'a String> {
    let mut left: BTreeMap<String, usize> = BTreeMap::new();
    for line in others {
        *left.entry(line.clone()).or_default() += 1;
    }
    these.iter().filter(move |line| match left.get_mut(*line) {
        Some(count) if *count > 0 => {
            *count -= 1;
            false
        }
        _ => true,
    })
}
