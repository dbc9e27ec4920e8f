//! Maps each part of the address space to the address blocks that contain it.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use super::{
    peer::{Matcher, Peer},
    prefix::Prefix,
};

/// Overlapping blocks of addresses.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// The boundaries of the blocks: addresses whose longest prefix here is the same are in the same blocks.
    regions: BTreeMap<Prefix, Region>,
    /// Number of regions by prefix length.
    lengths: BTreeMap<u8, usize>,
}

/// The addresses of a prefix that are in no longer prefix.
#[derive(Debug, Default)]
pub(super) struct Region {
    /// The blocks, sorted.
    peers: Vec<Arc<Peer>>,
    /// Number of blocks that have a boundary here.
    edges: usize,
    /// The identity of the region's addresses; computed on first use.
    identity: Option<u32>,
}

/// The prefixes at the boundaries of a peer; none if it matches no address. Exactly one of each prefix and the prefix
/// around it belongs to the peer, so each has a row of its own.
pub(super) fn edges(peer: &Peer) -> Vec<Prefix> {
    Shape::of(peer).map_or_else(Vec::new, |shape| shape.edges().collect())
}

/// The range of a peer, without its exceptions; `None`: it matches no address.
pub(super) fn whole(peer: &Peer) -> Option<Prefix> {
    Shape::of(peer).map(|shape| shape.whole)
}

/// A block as a list of prefixes.
struct Shape {
    whole: Prefix,
    /// None contains another.
    holes: Vec<Prefix>,
}

impl Shape {
    /// `None`: the peer is not a block, or the block is empty.
    fn of(peer: &Peer) -> Option<Self> {
        let Matcher::Block(cidr, except) = &peer.what else {
            return None;
        };
        let whole = Prefix::of(cidr);
        if whole.is_v4() != cidr.addr().is_ipv4() {
            // IPv4 written as IPv6: no packet has such addresses.
            return None;
        }
        let same_family = except
            .iter()
            .filter(|except| except.addr().is_ipv4() == cidr.addr().is_ipv4());
        let mut holes: Vec<Prefix> = same_family.map(Prefix::of).collect();
        if holes.iter().any(|hole| hole.contains(&whole)) {
            return None;
        }
        if !whole.is_v4() {
            // An IPv6 range that contains the IPv4-mapped range does not match IPv4.
            holes.push(Prefix::v4());
        }
        holes.retain(|hole| whole.contains(hole));
        // A prefix sorts before everything that it contains.
        holes.sort_unstable();
        holes.dedup_by(|inner, outer| outer.contains(inner));
        Some(Self { whole, holes })
    }

    /// The prefixes at the boundaries of the block.
    fn edges(&self) -> impl Iterator<Item = Prefix> {
        [self.whole].into_iter().chain(self.holes.iter().copied())
    }

    /// Whether a region inside the whole range belongs to the block.
    fn has(&self, region: &Prefix) -> bool {
        !self.holes.iter().any(|hole| hole.contains(region))
    }
}

impl Blocks {
    /// Adds a block that has not been added yet; other peers are ignored.
    pub(super) fn add(&mut self, peer: &Arc<Peer>) {
        let Some(shape) = Shape::of(peer) else { return };
        for edge in shape.edges() {
            if !self.regions.contains_key(&edge) {
                let region = Region {
                    peers: self.around(edge).to_vec(),
                    ..Region::default()
                };
                self.regions.insert(edge, region);
                *self.lengths.entry(edge.length()).or_default() += 1;
            }
            if let Some(region) = self.regions.get_mut(&edge) {
                region.edges += 1;
            }
        }
        self.change(&shape, |peers| {
            let at = peers.partition_point(|known| known < peer);
            peers.insert(at, Arc::clone(peer));
        });
    }

    /// Removes a block that has been added.
    pub(super) fn remove(&mut self, peer: &Arc<Peer>) {
        let Some(shape) = Shape::of(peer) else { return };
        self.change(&shape, |peers| peers.retain(|known| known != peer));
        for edge in shape.edges() {
            let Some(region) = self.regions.get_mut(&edge) else {
                continue;
            };
            region.edges -= 1;
            if region.edges == 0 {
                self.regions.remove(&edge);
                if let Some(count) = self.lengths.get_mut(&edge.length()) {
                    *count -= 1;
                }
                self.lengths.retain(|_, count| *count > 0);
            }
        }
    }

    fn change(&mut self, shape: &Shape, change: impl Fn(&mut Vec<Arc<Peer>>)) {
        let inside = self.regions.range_mut(shape.whole..);
        let inside = inside.take_while(|(prefix, _)| shape.whole.contains(prefix));
        for (_, region) in inside.filter(|(prefix, _)| shape.has(prefix)) {
            change(&mut region.peers);
            region.identity = None;
        }
    }

    /// The blocks that contain all addresses of the prefix, except where a longer region overrides it.
    fn around(&self, prefix: Prefix) -> &[Arc<Peer>] {
        let mut shorter = self
            .lengths
            .range(..=prefix.length())
            .rev()
            .map(|(length, _)| prefix.shortened(*length));
        let found = shorter.find_map(|outer| Some((outer, self.regions.get(&outer)?)));
        let same_family = found.filter(|(outer, _)| outer.is_v4() == prefix.is_v4());
        same_family.map_or(&[], |(_, region)| &region.peers)
    }

    /// The blocks that contain the address, sorted.
    pub(super) fn of_address(&self, address: IpAddr) -> &[Arc<Peer>] {
        self.around(Prefix::host(address))
    }

    /// Whether a block has a boundary at this prefix.
    pub(super) fn has(&self, prefix: &Prefix) -> bool {
        self.regions.contains_key(prefix)
    }

    /// The identity of the region around a prefix, as of the last [`Self::identities`]; 0 without one.
    pub(super) fn identity_around(&self, prefix: &Prefix) -> u32 {
        let lengths = self.lengths.range(..prefix.length()).rev();
        let mut regions = lengths.filter_map(|(length, _)| self.regions.get(&prefix.shortened(*length)));
        regions.next().and_then(|region| region.identity).unwrap_or(0)
    }

    /// Every region that is not `hidden`, outer regions first, with its identity. `name` computes the identity from the
    /// blocks. A hidden region loses its identity, because no address has it any longer.
    pub(super) fn identities(
        &mut self,
        hidden: impl Fn(&Prefix) -> bool,
        mut name: impl FnMut(&[Arc<Peer>]) -> u32,
    ) -> Vec<(Prefix, u32)> {
        let regions = self.regions.iter_mut().filter_map(|(prefix, region)| {
            if hidden(prefix) {
                region.identity = None;
                return None;
            }
            let identity = *region.identity.get_or_insert_with(|| name(&region.peers));
            Some((*prefix, identity))
        });
        regions.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{peer::Peers, tests::world::block};

    fn names(blocks: &Blocks, address: &str) -> Vec<String> {
        let found = blocks
            .of_address(address.parse().unwrap())
            .iter()
            .map(|peer| match &peer.what {
                Matcher::Block(cidr, _) => cidr.to_string(),
                Matcher::PodsOf(..) | Matcher::Pods(..) => unreachable!("only blocks were added"),
            });
        let mut found: Vec<String> = found.collect();
        found.sort();
        found
    }

    #[test]
    fn blocks_can_be_added_and_removed_in_any_order() {
        let mut peers = Peers::default();
        let texts = [
            "10.0.0.0/8 10.1.0.0/16",
            "10.1.0.0/16",
            "0.0.0.0/0 10.1.2.0/24",
            "::/0",
            "10.1.2.3/32",
        ];
        let all: Vec<Arc<Peer>> = texts.iter().map(|text| peers.intern(&block(text), "x")).collect();
        let expected = [
            ("10.2.0.1", vec!["0.0.0.0/0", "10.0.0.0/8"]),
            ("10.1.0.1", vec!["0.0.0.0/0", "10.1.0.0/16"]),
            ("10.1.2.1", vec!["10.1.0.0/16"]),
            ("10.1.2.3", vec!["10.1.0.0/16", "10.1.2.3/32"]),
            ("192.0.2.1", vec!["0.0.0.0/0"]),
            ("2001:db8::1", vec!["::/0"]),
        ];
        for turn in 0..all.len() {
            let mut blocks = Blocks::default();
            let order = || all.iter().cycle().skip(turn).take(all.len());
            for peer in order() {
                blocks.add(peer);
            }
            for (address, names_) in &expected {
                assert_eq!(names(&blocks, address), *names_, "{address}, from {turn} on");
            }
            for peer in order().skip(1) {
                blocks.remove(peer);
            }
            let only = order().next().unwrap();
            let mut alone = Blocks::default();
            alone.add(only);
            for (address, _) in &expected {
                assert_eq!(
                    names(&blocks, address),
                    names(&alone, address),
                    "{address}, {turn} left"
                );
            }
            assert_eq!(
                blocks.regions.keys().collect::<Vec<_>>(),
                alone.regions.keys().collect::<Vec<_>>()
            );
            blocks.remove(only);
            assert!(blocks.regions.is_empty() && blocks.lengths.is_empty());
        }
    }
}
