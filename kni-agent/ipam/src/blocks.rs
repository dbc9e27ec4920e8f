//! Chooses the next address block of a network's subnets for a node.

use ipnet::IpNet;

/// Prefix length of IPv4 blocks by default: 64 addresses.
const DEFAULT_V4: u8 = 26;
/// Prefix length of IPv6 blocks by default: 64 addresses.
const DEFAULT_V6: u8 = 122;
/// A subnet that is smaller than a block is divided among four nodes: two more prefix bits.
const SHARE: u8 = 2;
/// The search starts among this many blocks: enough to make conflicts rare, and few enough to keep addresses short.
const SPREAD: u128 = 1 << 12;
/// Maximum number of blocks of a subnet that one search examines.
const MOST_TRIES: u128 = 1 << 17;

/// The next free block of one family; `None` if none is left.
///
/// `taken` holds the blocks of all nodes and the ranges that are never leased. The search starts at a position that
/// derives from `seed`, so that concurrent searches of nodes rarely choose the same block, and wraps around.
pub fn next_block(subnets: &[IpNet], taken: &[IpNet], ipv4: bool, prefix: Option<u8>, seed: u64) -> Option<IpNet> {
    let mut of_family = subnets.iter().filter(|subnet| subnet.addr().is_ipv4() == ipv4);
    of_family.find_map(|subnet| free_in(subnet, taken, block_prefix(subnet, prefix), seed))
}

/// The prefix length of the blocks of a subnet.
pub fn block_prefix(subnet: &IpNet, asked: Option<u8>) -> u8 {
    let default = if subnet.addr().is_ipv4() {
        DEFAULT_V4
    } else {
        DEFAULT_V6
    };
    match asked {
        Some(asked) => asked.clamp(subnet.prefix_len(), subnet.max_prefix_len()),
        None => default
            .max(subnet.prefix_len().saturating_add(SHARE))
            .min(subnet.max_prefix_len()),
    }
}

fn free_in(subnet: &IpNet, taken: &[IpNet], prefix: u8, seed: u64) -> Option<IpNet> {
    let bits = u32::from(prefix.saturating_sub(subnet.prefix_len()));
    let count = 1_u128.checked_shl(bits)?;
    let size = 1_u128.checked_shl(u32::from(subnet.max_prefix_len().saturating_sub(prefix)))?;
    let first = u128::from(seed) % count.min(SPREAD);
    (0..count.min(MOST_TRIES))
        .filter_map(|step| block_at(subnet, (first + step) % count, size, prefix))
        .find(|block| !is_useless(subnet, block) && !taken.iter().any(|other| overlap(block, other)))
}

fn block_at(subnet: &IpNet, index: u128, size: u128, prefix: u8) -> Option<IpNet> {
    let offset = index.checked_mul(size)?;
    match subnet {
        IpNet::V4(net) => {
            let address = u32::from(net.network()).checked_add(u32::try_from(offset).ok()?)?;
            Some(ipnet::Ipv4Net::new(address.into(), prefix).ok()?.into())
        }
        IpNet::V6(net) => {
            let address = u128::from(net.network()).checked_add(offset)?;
            Some(ipnet::Ipv6Net::new(address.into(), prefix).ok()?.into())
        }
    }
}

/// Whether no address of the block can be leased: they are the subnet's network, gateway or broadcast address.
fn is_useless(subnet: &IpNet, block: &IpNet) -> bool {
    let hosts = block.max_prefix_len() - block.prefix_len();
    let at_start = block.network() == subnet.network();
    let at_end = block.addr().is_ipv4() && block.broadcast() == subnet.broadcast();
    (hosts <= 1 && at_start) || (hosts == 0 && at_end)
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn sizes_follow_from_the_subnet_unless_asked_for() {
        for (subnet, asked, prefix) in [
            ("10.0.0.0/16", None, 26),
            ("10.0.0.0/16", Some(24), 24),
            ("10.0.0.0/28", None, 30),
            ("10.0.0.0/30", None, 32),
            ("10.0.0.0/28", Some(24), 28),
            ("fd00::/64", None, 122),
            ("fd00::/124", None, 126),
        ] {
            assert_eq!(
                block_prefix(&subnet.parse().unwrap(), asked),
                prefix,
                "{subnet} {asked:?}"
            );
        }
    }

    #[test]
    fn a_network_is_used_up_to_its_last_address() {
        let subnets = nets(&["10.0.0.0/29"]);
        let mut taken = Vec::new();
        while let Some(block) = next_block(&subnets, &taken, true, None, 7) {
            taken.push(block);
        }
        taken.sort();
        // The first two addresses are the network's and the gateway's.
        let wanted = nets(&["10.0.0.2/31", "10.0.0.4/31", "10.0.0.6/31"]);
        assert_eq!(taken, wanted);
        assert_eq!(next_block(&subnets, &[], false, None, 7), None, "no IPv6");
    }

    proptest! {
        /// Nodes that take blocks one after the other never get the same block, whatever their start position.
        #[test]
        fn no_address_is_in_two_blocks(
            subnet in 8_u8..=30, asked in proptest::option::of(8_u8..=32), seeds in proptest::collection::vec(any::<u64>(), 1..40),
            excluded in 0_u8..4,
        ) {
            let subnet: IpNet = ipnet::Ipv4Net::new([10, 0, 0, 0].into(), subnet).unwrap().trunc().into();
            let excludes: Vec<IpNet> = (0..excluded).filter_map(|n| block_at(&subnet, n.into(), 2, 31)).collect();
            let mut taken = excludes.clone();
            for seed in seeds {
                let Some(block) = next_block(&[subnet], &taken, true, asked, seed) else { break };
                prop_assert!(subnet.contains(&block));
                prop_assert!(taken.iter().all(|other| !overlap(other, &block)));
                taken.push(block);
            }
        }
    }
}
