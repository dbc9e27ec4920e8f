//! What a node looks like, so that a test can show that nothing was left behind.

mod collect;

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;

use crate::namespaces::Namespaces;

/// Everything an agent could leave behind on a node, as sorted lines by kind: links, addresses, routes of all tables,
/// rules, permanent neighbours, queueing disciplines, named namespaces, mounts, files, the bpffs tree, programs on
/// links, nftables rules and sysctls. Without what changes by itself: indexes, counters, lifetimes, link state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSnapshot {
    sections: BTreeMap<&'static str, Vec<String>>,
    all_bpf: bool,
}

impl NodeSnapshot {
    /// Looks at the node now.
    pub fn take(ns: &Namespaces) -> Result<Self> {
        Ok(Self {
            sections: collect::node(ns)?,
            all_bpf: false,
        })
    }

    /// [`Self::take`] and all eBPF programs, maps and links of the kernel. These are not of one node: fit for the
    /// machine itself, or for a test that no other runs beside.
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

    /// A line per difference: `+ link kni0 ...` for what came, `- route ...` for what went.
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

    /// Waits until the node looks like this again; the differences that are left at the end. Devices and namespaces
    /// go asynchronously.
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

    /// Panics unless the node looks like this again within `timeout`.
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

/// The lines of `these` that are more often there than in `others`; both sorted.
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
