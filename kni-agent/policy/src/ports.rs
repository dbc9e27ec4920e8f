//! Converts ports of protocols into port sets: the prefixes that the dataplane looks up.

use std::{collections::BTreeMap, sync::Arc};

use kni_common::policy::{PREFIX_ANY_PORT, PREFIX_ANY_PROTOCOL, PortData, PortKey, PortValue};
use kni_model::policy::RuleRef;

/// Ports of one protocol, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PortRange {
    pub(super) protocol: u8,
    pub(super) first: u16,
    pub(super) last: u16,
}

/// A block of ports that share their first bits; 0 bits match all ports of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PortPrefix {
    pub(super) bits: u8,
    pub(super) port: u16,
}

/// One row of a port set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PortEntry {
    /// Protocol and ports; `None` matches everything that no other entry matches.
    pub(super) what: Option<(u8, PortPrefix)>,
    pub(super) ordinal: u16,
    pub(super) allow: bool,
}

/// The rows of a port set, independent of the rules: rules with the same ports share one set.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct PortSet(pub(super) Vec<PortEntry>);

impl PortSet {
    /// The rows under this number.
    pub(super) fn rows(&self, number: u32) -> impl Iterator<Item = (PortKey, PortValue)> + '_ {
        self.0.iter().map(move |entry| (entry.key(number), entry.value()))
    }
}

impl PortEntry {
    fn key(&self, number: u32) -> PortKey {
        let (protocol, port, prefix_length) = match self.what {
            None => (0, 0, PREFIX_ANY_PROTOCOL),
            Some((protocol, prefix)) => (protocol, prefix.port, PREFIX_ANY_PORT + u32::from(prefix.bits)),
        };
        PortKey {
            prefix_length,
            data: PortData {
                ports: number.to_be_bytes(),
                protocol,
                zero: 0,
                port: port.to_be_bytes(),
            },
        }
    }

    fn value(&self) -> PortValue {
        PortValue {
            ordinal: self.ordinal,
            allow: u16::from(self.allow),
        }
    }
}

/// The smallest list of prefixes that covers exactly the ports from `first` to `last`.
pub(super) fn prefixes(first: u16, last: u16) -> Vec<PortPrefix> {
    let (mut next, end) = (u32::from(first), u32::from(last) + 1);
    let mut found = Vec::new();
    while next < end {
        let aligned = if next == 0 { 16 } else { next.trailing_zeros().min(16) };
        let fits = (end - next).ilog2();
        let free = aligned.min(fits);
        found.push(PortPrefix {
            bits: u8::try_from(16 - free).unwrap_or(16),
            port: u16::try_from(next).unwrap_or(u16::MAX),
        });
        next += 1 << free;
    }
    found
}

/// The rules behind a port set, in the order in which its entries name them.
#[derive(Debug, Default)]
pub(super) struct Ordinals {
    rules: Vec<Arc<RuleRef>>,
    known: BTreeMap<Arc<RuleRef>, u16>,
}

impl Ordinals {
    /// The position of the rule, which is added if it is new. Rules over the 16-bit limit share the last position.
    pub(super) fn of(&mut self, rule: &Arc<RuleRef>) -> u16 {
        if let Some(ordinal) = self.known.get(rule) {
            return *ordinal;
        }
        let Ok(ordinal) = u16::try_from(self.rules.len()) else {
            return u16::MAX - 1;
        };
        if ordinal == u16::MAX {
            return u16::MAX - 1;
        }
        self.rules.push(Arc::clone(rule));
        self.known.insert(Arc::clone(rule), ordinal);
        ordinal
    }

    /// The rules by position.
    pub(super) fn into_rules(self) -> Vec<Arc<RuleRef>> {
        self.rules
    }
}

/// The port set that allows the ports of any of the rules; of rules with the same prefix the first one is named.
pub(super) fn allowing<'a>(
    rules: impl IntoIterator<Item = (&'a Arc<RuleRef>, Vec<PortRange>)>,
) -> (PortSet, Vec<Arc<RuleRef>>) {
    let mut by_prefix: BTreeMap<(u8, PortPrefix), &Arc<RuleRef>> = BTreeMap::new();
    for (rule, ranges) in rules {
        for range in ranges {
            for prefix in prefixes(range.first, range.last) {
                by_prefix.entry((range.protocol, prefix)).or_insert(rule);
            }
        }
    }
    let mut ordinals = Ordinals::default();
    let entries = by_prefix.into_iter().map(|(what, rule)| PortEntry {
        what: Some(what),
        ordinal: ordinals.of(rule),
        allow: true,
    });
    let set = PortSet(entries.collect());
    (set, ordinals.into_rules())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(first: u16, last: u16) -> Vec<String> {
        prefixes(first, last)
            .iter()
            .map(|p| format!("{}/{}", p.port, p.bits))
            .collect()
    }

    #[test]
    fn ranges_become_few_prefixes() {
        assert_eq!(text(80, 80), ["80/16"]);
        assert_eq!(text(80, 81), ["80/15"]);
        assert_eq!(text(81, 82), ["81/16", "82/16"]);
        assert_eq!(text(0, 65535), ["0/0"]);
        assert_eq!(text(32768, 65535), ["32768/1"]);
        assert_eq!(text(65535, 65535), ["65535/16"]);
        assert_eq!(text(1, 65534).len(), 30, "the worst case");
    }

    proptest! {
        #[test]
        fn prefixes_cover_the_range_and_nothing_else(a: u16, b: u16) {
            let (first, last) = (a.min(b), a.max(b));
            let mut next = u32::from(first);
            for prefix in prefixes(first, last) {
                prop_assert_eq!(u32::from(prefix.port), next);
                let size = 1_u32 << (16 - prefix.bits);
                prop_assert_eq!(next % size, 0);
                next += size;
            }
            prop_assert_eq!(next, u32::from(last) + 1);
        }
    }
}
