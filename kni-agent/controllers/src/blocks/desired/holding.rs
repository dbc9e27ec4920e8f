//! Decides how many blocks of a network and family the node claims, and which ones it does not need. Pure.

use ipnet::IpNet;
use kni_ipam::blocks::{Prefixes, unit_prefix};
use kni_model::view::NetworkView;

use crate::blocks::MOST_AT_ONCE;

/// Free addresses that a node holds for pods to come: one for this many that it uses.
const SHARE: u128 = 3;
/// The most of them where blocks are small. Where they are large, the addresses of one block.
const MOST_SPARE: u128 = 4;

/// What the pods of the node need of a network.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Need {
    /// Whether it has, or will have, pods here, or is the default network.
    pub(super) in_use: bool,
    /// Interfaces without addresses of pods on the node.
    pub(super) coming: u128,
}

/// The blocks and the addresses of one family of a network on the node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Holding {
    pub(super) blocks: usize,
    pub(super) used: u128,
    pub(super) free: u128,
    /// Addresses of a block.
    pub(super) size: u128,
}

/// How much of a network is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Supply {
    Plenty,
    Moderate,
    Scarce,
}

impl Holding {
    /// `None` if the network does not have the family. `has` are the blocks of the network.
    pub(super) fn of(view: &NetworkView, has: &[IpNet], ipv4: bool, asked: Prefixes) -> Option<Self> {
        let of_family = |net: &&IpNet| net.addr().is_ipv4() == ipv4;
        let subnet = view.network.spec.subnets.iter().find(of_family)?;
        let usage = if ipv4 { &view.ipv4 } else { &view.ipv6 };
        let unit = IpNet::new(subnet.addr(), unit_prefix(subnet, asked.of(ipv4))).ok()?;
        Some(Self {
            blocks: has.iter().filter(of_family).count(),
            used: usage.used,
            free: usage.free,
            size: size_of(&unit),
        })
    }

    /// Free addresses that the node holds for pods to come.
    fn spare(&self) -> u128 {
        (self.used / SHARE).clamp(1, self.size.max(MOST_SPARE))
    }

    /// How many blocks are claimed. `supply` costs as much as the whole network, and is asked only where it makes a
    /// difference.
    pub(super) fn short_of(&self, need: Need, supply: impl FnOnce() -> Supply) -> usize {
        let wanted = need.coming.saturating_add(self.spare());
        if !need.in_use || self.free >= wanted {
            return 0;
        }
        // A network in use has a block.
        let least = usize::from(self.blocks == 0);
        let blocks = |wanted: u128| {
            let missing = wanted.saturating_sub(self.free).div_ceil(self.size);
            usize::try_from(missing)
                .unwrap_or(usize::MAX)
                .clamp(least, MOST_AT_ONCE)
        };
        let (with_spare, without) = (blocks(wanted), blocks(need.coming));
        if with_spare == without || supply() == Supply::Plenty {
            with_spare
        } else {
            without
        }
    }

    /// Which of these idle blocks the node does not need, the last ones first. `supply` is asked only where it makes a
    /// difference.
    pub(super) fn unneeded(&self, idle: &[IpNet], need: Need, supply: impl FnOnce() -> Supply) -> Vec<IpNet> {
        let (keep_free, keep_blocks) = if need.in_use { (need.coming, 1) } else { (0, 0) };
        let unneeded = self.dispensable(idle, keep_free, keep_blocks);
        if !need.in_use || unneeded.is_empty() {
            return unneeded;
        }
        let with_spare = self.dispensable(idle, keep_free.saturating_add(self.spare()), keep_blocks);
        if with_spare == unneeded || supply() == Supply::Scarce {
            unneeded
        } else {
            with_spare
        }
    }

    /// The last ones of these blocks, as long as so many free addresses and blocks remain without them, the last one
    /// first.
    fn dispensable(&self, idle: &[IpNet], keep_free: u128, keep_blocks: usize) -> Vec<IpNet> {
        let (mut free, mut blocks) = (self.free, self.blocks);
        let mut found = Vec::new();
        for block in idle.iter().rev() {
            let left = free.saturating_sub(size_of(block));
            if blocks <= keep_blocks || left < keep_free {
                break;
            }
            (free, blocks) = (left, blocks - 1);
            found.push(*block);
        }
        found
    }
}

/// The number of addresses of a range.
pub(super) fn size_of(range: &IpNet) -> u128 {
    let bits = u32::from(range.max_prefix_len().saturating_sub(range.prefix_len()));
    1_u128.checked_shl(bits).unwrap_or(u128::MAX)
}
