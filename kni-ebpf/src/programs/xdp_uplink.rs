//! Drops malformed packets and denied sources before the node's stack spends anything on them.
//!
//! - Hook: XDP of the uplink.
//! - Reads `SOURCES`; counts.
//! - Order: Ethernet header, priority tag, IP header, source.
//! - Falls through to: the node's stack. Packets that it cannot parse pass, and those of VLANs, which are other
//!   networks.

use core::mem::size_of;

use aya_ebpf::{
    bindings::xdp_action::{XDP_DROP, XDP_PASS},
    btf_maps::lpm_trie::Key,
    programs::XdpContext,
};
use kni_common::{
    Direction, Verdict,
    address::{bytes, mapped},
    counter::{Counter, DropKey},
    uplink::SourceData,
};

use crate::{
    maps::{DROPS, SOURCES},
    skb::{ETH_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_QINQ, ETHERTYPE_VLAN, EthHeader},
    xdp,
};

#[repr(C)]
#[derive(Clone, Copy)]
struct Ipv4 {
    version_length: u8,
    tos: u8,
    total_length: u16,
    between: [u16; 4],
    source: u32,
    destination: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Ipv6 {
    version_class_flow: u32,
    payload_length: u16,
    next_header_hops: u16,
    source: [u32; 4],
    destination: [u32; 4],
}

/// What follows the EtherType of a tag.
#[repr(C)]
#[derive(Clone, Copy)]
struct Tag {
    /// Priority and VLAN, network byte order.
    control: u16,
    ethertype: u16,
}

/// The bits of a tag's control information that name the VLAN; 0 is none.
const VLAN_ID: u16 = 0x0fff;

/// Bits of a full match.
const FULL: u32 = 128;

/// Passes the packet, or counts and drops it.
#[inline(always)]
pub fn run(ctx: &XdpContext) -> u32 {
    match check(ctx) {
        Ok(()) => XDP_PASS,
        Err(reason) => {
            count(reason, (ctx.data_end() - ctx.data()) as u64);
            XDP_DROP
        }
    }
}

#[inline(always)]
fn check(ctx: &XdpContext) -> Result<(), Verdict> {
    let Some(eth) = xdp::read::<EthHeader>(ctx, 0) else {
        return Err(Verdict::Truncated);
    };
    if is_tag(eth.ethertype) {
        return tagged(ctx);
    }
    packet(ctx, eth.ethertype, ETH_LEN)
}

/// The stack removes a tag without a VLAN and takes the packet as one without a tag, so its source counts. It would
/// also remove further ones, which no sender has a reason for.
#[inline(always)]
fn tagged(ctx: &XdpContext) -> Result<(), Verdict> {
    let tag: Tag = xdp::read(ctx, ETH_LEN).ok_or(Verdict::Truncated)?;
    if names_vlan(tag) {
        return Ok(());
    }
    let behind = ETH_LEN + size_of::<Tag>();
    if is_tag(tag.ethertype) {
        let second: Tag = xdp::read(ctx, behind).ok_or(Verdict::Truncated)?;
        return if names_vlan(second) {
            Ok(())
        } else {
            Err(Verdict::Malformed)
        };
    }
    packet(ctx, tag.ethertype, behind)
}

#[inline(always)]
fn is_tag(ethertype: u16) -> bool {
    ethertype == ETHERTYPE_VLAN || ethertype == ETHERTYPE_QINQ
}

#[inline(always)]
fn names_vlan(tag: Tag) -> bool {
    u16::from_be(tag.control) & VLAN_ID != 0
}

/// Evaluates the packet that begins at the offset.
#[inline(always)]
fn packet(ctx: &XdpContext, ethertype: u16, start: usize) -> Result<(), Verdict> {
    let length = ctx.data_end() - ctx.data() - start;
    match ethertype {
        ETHERTYPE_IPV4 => {
            let ip: Ipv4 = xdp::read(ctx, start).ok_or(Verdict::Truncated)?;
            let header = usize::from(ip.version_length & 0xf) * 4;
            let total = usize::from(u16::from_be(ip.total_length));
            if ip.version_length >> 4 != 4 || header < size_of::<Ipv4>() || total < header {
                return Err(Verdict::Malformed);
            }
            if total > length {
                return Err(Verdict::Truncated);
            }
            source(mapped(ip.source))
        }
        ETHERTYPE_IPV6 => {
            let ip: Ipv6 = xdp::read(ctx, start).ok_or(Verdict::Truncated)?;
            if u32::from_be(ip.version_class_flow) >> 28 != 6 {
                return Err(Verdict::Malformed);
            }
            if usize::from(u16::from_be(ip.payload_length)) + size_of::<Ipv6>() > length {
                return Err(Verdict::Truncated);
            }
            source(ip.source)
        }
        _ => Ok(()),
    }
}

#[inline(always)]
fn source(address: [u32; 4]) -> Result<(), Verdict> {
    let key = Key::new(
        FULL,
        SourceData {
            address: bytes(address),
        },
    );
    match SOURCES.get(&key) {
        Some(found) if found.verdict == Verdict::BogonSource as u32 => Err(Verdict::BogonSource),
        Some(found) if found.verdict == Verdict::DenyListed as u32 => Err(Verdict::DenyListed),
        _ => Ok(()),
    }
}

#[inline(always)]
fn count(reason: Verdict, length: u64) {
    let key = DropKey {
        endpoint: 0,
        verdict: reason as u16,
        direction: Direction::FromUplink as u16,
    };
    if let Some(counter) = DROPS.get_ptr_mut(key) {
        // SAFETY: a per-CPU row; XDP runs in softirq context, and no other program runs on this CPU meanwhile.
        let counter = unsafe { &mut *counter };
        counter.packets += 1;
        counter.bytes += length;
        return;
    }
    // A full table loses the count of a rare reason, never the drop.
    let _lost_when_full = DROPS.insert(
        key,
        Counter {
            packets: 1,
            bytes: length,
        },
        0,
    );
}
