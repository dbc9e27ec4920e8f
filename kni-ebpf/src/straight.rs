//! The parts that the straight paths share: headers of usual form, and keys of flows from words of the packet.
//!
//! VERIFIER: no structs on the stack but the key, and each field is read once, into a register.

use core::{mem::MaybeUninit, ptr::read_volatile};

use aya_ebpf::programs::TcContext;
use kni_common::flow::{EndPorts, FlowEnd, FlowKey4, FlowKey6, FlowValue, scope};

use crate::{
    maps::{FLOWS4, FLOWS6},
    packet::{ACK, FIN, RST, SYN, TCP, UDP},
    skb::{self, ETH_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6},
};

/// Bytes of an IPv4 header without options.
pub(crate) const IPV4_LEN: usize = 20;
/// Bytes of an IPv6 header.
pub(crate) const IPV6_LEN: usize = 40;
/// Bytes of a TCP header without options.
pub(crate) const TCP_LEN: usize = 20;
/// Bytes of a UDP header.
pub(crate) const UDP_LEN: usize = 8;
/// Offset of the flags in a TCP header.
pub(crate) const TCP_FLAGS: usize = 13;

/// A packet of a flow.
pub(crate) struct Followed {
    /// The row of its flow.
    pub(crate) found: &'static mut FlowValue,
    /// Transport protocol number.
    pub(crate) protocol: u8,
    /// Those of the flags of TCP that may change the flow's state.
    pub(crate) tcp_flags: u8,
    /// The sender is the second end of the flow.
    pub(crate) second: bool,
}

/// The ends of a flow and their kinds, the sender's first. Each is read once: another flow may take over the row at any
/// moment, so that all checks have to be of the same copies.
#[inline(always)]
pub(crate) fn ends(found: &FlowValue, second: bool) -> [(u8, FlowEnd); 2] {
    let copy = |kind: *const u8, end: *const FlowEnd| {
        // SAFETY: a field of the row.
        let kind = unsafe { read_volatile(kind) };
        // SAFETY: a field of the row.
        let end = unsafe { read_volatile(end) };
        (kind, end)
    };
    if second {
        [
            copy(&raw const found.second_kind, &raw const found.second),
            copy(&raw const found.first_kind, &raw const found.first),
        ]
    } else {
        [
            copy(&raw const found.first_kind, &raw const found.first),
            copy(&raw const found.second_kind, &raw const found.second),
        ]
    }
}

/// Finds the flow of a packet of the network: of TCP and UDP, without options, extension headers, fragments and tags.
/// Not of a SYN that opens a connection, which is always evaluated.
#[inline(always)]
pub(crate) fn find(ctx: &TcContext, network: u32) -> Option<Followed> {
    if skb::has_vlan_tag(ctx) || !skb::holds(ctx, ETH_LEN + IPV4_LEN + UDP_LEN) {
        return None;
    }
    match skb::peek::<u16>(ctx, ETH_LEN - 2) {
        ETHERTYPE_IPV4 => find4(ctx, network),
        ETHERTYPE_IPV6 => find6(ctx, network),
        _ => None,
    }
}

#[inline(always)]
fn find4(ctx: &TcContext, network: u32) -> Option<Followed> {
    let protocol = skb::peek::<u8>(ctx, ETH_LEN + 9);
    if !is_plain4(ctx) {
        return None;
    }
    let (transport, tcp_flags) = transport::<{ ETH_LEN + IPV4_LEN }>(ctx, protocol)?;
    let total = usize::from(u16::from_be(skb::peek(ctx, ETH_LEN + 2)));
    if !fits(ctx, total, IPV4_LEN + transport, ETH_LEN + total) {
        return None;
    }
    let (source, destination) = (skb::peek::<u32>(ctx, ETH_LEN + 12), skb::peek::<u32>(ctx, ETH_LEN + 16));
    let second = source > destination;
    let ends = if second {
        [destination, source]
    } else {
        [source, destination]
    };
    let found = FLOWS4.get_ptr_mut(key4(ctx, network, protocol, ends, second))?;
    Some(Followed {
        // SAFETY: as in `flow::find`.
        found: unsafe { &mut *found },
        protocol,
        tcp_flags,
        second,
    })
}

#[inline(always)]
fn find6(ctx: &TcContext, network: u32) -> Option<Followed> {
    if !skb::holds(ctx, ETH_LEN + IPV6_LEN + UDP_LEN) || skb::peek::<u8>(ctx, ETH_LEN) >> 4 != 6 {
        return None;
    }
    let protocol = skb::peek::<u8>(ctx, ETH_LEN + 6);
    let (transport, tcp_flags) = transport::<{ ETH_LEN + IPV6_LEN }>(ctx, protocol)?;
    let payload = usize::from(u16::from_be(skb::peek(ctx, ETH_LEN + 4)));
    if !fits(ctx, payload, transport, ETH_LEN + IPV6_LEN + payload) {
        return None;
    }
    let [source, destination] = halves6(ctx);
    let second = is_second_by_halves([source, destination]);
    let ends = if second {
        [destination, source]
    } else {
        [source, destination]
    };
    let found = FLOWS6.get_ptr_mut(key6(ctx, network, protocol, ends, second).key())?;
    Some(Followed {
        // SAFETY: as in `flow::find`.
        found: unsafe { &mut *found },
        protocol,
        tcp_flags,
        second,
    })
}

/// Whether the IPv4 header has no options and the packet is no fragment. The linear part holds the header.
#[inline(always)]
pub(crate) fn is_plain4(ctx: &TcContext) -> bool {
    /// Version 4, five words.
    const NO_OPTIONS: u8 = 0x45;
    /// More fragments, and the offset, without "don't fragment".
    const FRAGMENT: u16 = u16::from_be(0x3fff);
    skb::peek::<u8>(ctx, ETH_LEN) == NO_OPTIONS && skb::peek::<u16>(ctx, ETH_LEN + 6) & FRAGMENT == 0
}

/// Bytes of the transport header at an offset, and the flags that may change the state of a TCP connection. `None` for
/// other protocols, and for a SYN that opens a connection, which is always evaluated.
#[inline(always)]
fn transport<const OFFSET: usize>(ctx: &TcContext, protocol: u8) -> Option<(usize, u8)> {
    if protocol == UDP {
        return Some((UDP_LEN, 0));
    }
    if protocol != TCP || !skb::holds(ctx, OFFSET + TCP_LEN) {
        return None;
    }
    let flags = skb::peek::<u8>(ctx, OFFSET + TCP_FLAGS);
    (flags & (SYN | ACK) != SYN).then_some((TCP_LEN, flags & (SYN | FIN | RST)))
}

/// Whether a length in a header covers at least `least` bytes and the packet ends at or after `end`. The length of a
/// packet that stands for several segments describes all of them or nothing.
#[inline(always)]
pub(crate) fn fits(ctx: &TcContext, length: usize, least: usize, end: usize) -> bool {
    skb::is_gso(ctx) || length >= least && end <= ctx.len() as usize
}

/// The key of a flow whose first and second end have these addresses; `second`: the packet's sender is the second end.
/// The linear part holds the ports.
#[inline(always)]
pub(crate) fn key4(ctx: &TcContext, network: u32, protocol: u8, [first, last]: [u32; 2], second: bool) -> FlowKey4 {
    FlowKey4 {
        scope: scope(network, protocol),
        first: first.to_ne_bytes(),
        second: last.to_ne_bytes(),
        ports: EndPorts::from_word(skb::peek(ctx, ETH_LEN + IPV4_LEN), second),
    }
}

/// [`key4`] of IPv6.
#[inline(always)]
pub(crate) fn key6(
    ctx: &TcContext,
    network: u32,
    protocol: u8,
    [first, second_end]: [[u64; 2]; 2],
    second: bool,
) -> AlignedKey6 {
    AlignedKey6 {
        padding: MaybeUninit::uninit(),
        scope: scope(network, protocol),
        first,
        second: second_end,
        ports: EndPorts::from_word(skb::peek(ctx, ETH_LEN + IPV6_LEN), second),
    }
}

/// A [`FlowKey6`] at an address that aligns its addresses to eight bytes, so that each takes two stores.
#[repr(C)]
pub(crate) struct AlignedKey6 {
    padding: MaybeUninit<u32>,
    scope: u32,
    first: [u64; 2],
    second: [u64; 2],
    ports: EndPorts,
}

impl AlignedKey6 {
    /// The key itself.
    #[inline(always)]
    pub(crate) const fn key(&self) -> &FlowKey6 {
        const {
            use core::mem::offset_of;
            assert!(
                offset_of!(Self, first) == 4 + offset_of!(FlowKey6, first)
                    && offset_of!(Self, second) == 4 + offset_of!(FlowKey6, second)
                    && offset_of!(Self, ports) == 4 + offset_of!(FlowKey6, ports)
                    && offset_of!(Self, scope) == 4 + offset_of!(FlowKey6, scope)
                    && size_of::<FlowKey6>() == 40
            );
        }
        // SAFETY: a key lies there, field by field; its own fields are aligned to four bytes.
        unsafe { &*(&raw const self.scope).cast() }
    }
}

/// The source and the destination of an IPv6 header as halves in memory order. The linear part holds the header.
#[inline(always)]
pub(crate) fn halves6(ctx: &TcContext) -> [[u64; 2]; 2] {
    let half = |offset: usize| skb::peek::<u64>(ctx, ETH_LEN + 8 + offset);
    [[half(0), half(8)], [half(16), half(24)]]
}

/// `kni_common::flow::is_second` of addresses as halves in memory order.
#[inline(always)]
pub(crate) const fn is_second_by_halves([[a0, a1], [b0, b1]]: [[u64; 2]; 2]) -> bool {
    #[cfg(not(target_endian = "little"))]
    compile_error!("the halves would compare the words in another order");
    if a1 == b1 { a0 > b0 } else { a1 > b1 }
}
