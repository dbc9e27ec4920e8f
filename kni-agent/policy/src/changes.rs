//! Collects what changed, so that only that is compiled again.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// What changed of the pods.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Policies: everything may have changed.
    pub(super) all: bool,
    /// Pods of this node, or the namespaces whose policies are enforced without rules.
    pub(super) local: bool,
    /// By network, the addresses whose pods on other nodes are others, or have another identity.
    pub(super) addresses: BTreeMap<u32, BTreeSet<IpAddr>>,
}

impl Changes {
    /// Changes of this node's pods.
    pub(super) fn of_local() -> Self {
        Self {
            local: true,
            ..Self::default()
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.all && !self.local && self.addresses.is_empty()
    }

    /// Adds addresses, each with its network.
    pub(super) fn add(&mut self, addresses: impl IntoIterator<Item = (u32, IpAddr)>) {
        for (network, address) in addresses {
            self.addresses.entry(network).or_default().insert(address);
        }
    }
}

/// How often each identity of a network is used.
#[derive(Debug, Default)]
pub(super) struct Uses {
    counts: BTreeMap<u32, usize>,
    /// The identities whose first use began, or whose last use ended, since [`Self::note_processed`]; and whether they
    /// were in use before.
    changed: BTreeMap<u32, bool>,
}

impl Uses {
    /// Adds a use. 0 is no identity.
    pub(super) fn acquire(&mut self, identity: u32) {
        if identity == 0 {
            return;
        }
        let count = self.counts.entry(identity).or_default();
        if *count == 0 {
            self.changed.entry(identity).or_insert(false);
        }
        *count += 1;
    }

    /// Removes a use.
    pub(super) fn release(&mut self, identity: u32) {
        let Some(count) = self.counts.get_mut(&identity) else {
            return;
        };
        *count -= 1;
        if *count == 0 {
            self.counts.remove(&identity);
            self.changed.entry(identity).or_insert(true);
        }
    }

    /// Whether an identity is in use.
    pub(super) fn has(&self, identity: u32) -> bool {
        self.counts.contains_key(&identity)
    }

    /// Whether an identity was in use at the last [`Self::note_processed`].
    pub(super) fn had(&self, identity: u32) -> bool {
        let changed = self.changed.get(&identity).copied();
        changed.unwrap_or_else(|| self.has(identity))
    }

    /// The identities in use.
    pub(super) fn all(&self) -> impl Iterator<Item = u32> {
        self.counts.keys().copied()
    }

    /// The identities that are in use since the last [`Self::note_processed`].
    pub(super) fn come(&self) -> impl Iterator<Item = u32> {
        let changed = self.changed.iter();
        let come = changed.filter(|(identity, had)| !**had && self.has(**identity));
        come.map(|(identity, _)| *identity)
    }

    /// The identities that are not in use any more.
    pub(super) fn gone(&self) -> impl Iterator<Item = u32> {
        let changed = self.changed.iter();
        let gone = changed.filter(|(identity, had)| **had && !self.has(**identity));
        gone.map(|(identity, _)| *identity)
    }

    /// Whether the identities in use are those of the last [`Self::note_processed`].
    pub(super) fn is_unchanged(&self) -> bool {
        self.changed.is_empty()
    }

    /// Counts the changes as processed.
    pub(super) fn note_processed(&mut self) {
        self.changed.clear();
    }
}
