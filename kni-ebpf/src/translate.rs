//! Rewrites addresses and ports of a packet, and the checksums that cover them.
//!
//! A packet of a local sender has no transport checksum yet, only the sum over its addresses (`CHECKSUM_PARTIAL`), and
//! nothing in the packet indicates this. The kernel's helper knows, and handles a difference over the addresses and
//! another one over the ports correctly.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR},
    programs::TcContext,
};
use kni_common::{Verdict, crc32c, flow::FlowValue};

use crate::{
    flow,
    packet::{ICMP, ICMPV6, Packet, SCTP, TCP, UDP},
    skb::{self, ETH_LEN},
};

const IPV4_CHECKSUM: usize = 10;
const IPV4_SOURCE: usize = 12;
const IPV6_SOURCE: usize = 8;
/// Offset of the checksum in the transport header.
const TCP_CHECKSUM: usize = 16;
const UDP_CHECKSUM: usize = 6;
const ICMP_CHECKSUM: usize = 2;

/// The source and the destination of an IPv4 header, in its layout.
#[repr(C)]
#[derive(Clone, Copy)]
struct Pair4 {
    source: u32,
    destination: u32,
}

/// A sum of 16-bit words in one's complement, not yet folded (RFC 1071).
#[derive(Clone, Copy)]
pub struct Sum(u64);

impl Sum {
    /// Nothing.
    pub const ZERO: Self = Self(0);

    /// Adds the difference of replacing `from` by `to`.
    #[inline(always)]
    #[must_use]
    pub const fn replacing(self, from: u32, to: u32) -> Self {
        Self(self.0 + (!from) as u64 + to as u64)
    }

    /// Adds a word.
    #[inline(always)]
    #[must_use]
    pub const fn plus(self, word: u32) -> Self {
        Self(self.0 + word as u64)
    }

    /// Adds an IPv6 address.
    #[inline(always)]
    #[must_use]
    pub const fn address(self, words: [u32; 4]) -> Self {
        let [a, b, c, d] = words;
        self.plus(a).plus(b).plus(c).plus(d)
    }

    /// As the kernel's `__wsum`.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "folded before")]
    pub const fn word(self) -> u32 {
        let folded = (self.0 & 0xffff_ffff) + (self.0 >> 32);
        ((folded & 0xffff_ffff) + (folded >> 32)) as u32
    }

    /// As a checksum field that covers exactly these words.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "folded before")]
    pub const fn checksum(self) -> u16 {
        let word = self.word();
        let half = (word & 0xffff) + (word >> 16);
        !(((half & 0xffff) + (half >> 16)) as u16)
    }
}

/// Applies the translation of its flow's row to a packet.
#[inline(always)]
pub fn follow(ctx: &TcContext, packet: &Packet, row: &FlowValue) -> Result<(), Verdict> {
    if translate_follow(ctx.skb.skb, packet, row) == 0 {
        Ok(())
    } else {
        Err(Verdict::Truncated)
    }
}

/// [`follow`]; 0 on success.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn translate_follow(skb: *mut __sk_buff, packet: *const Packet, row: *const FlowValue) -> u32 {
    // SAFETY: the caller's own memory, or a row that stays mapped; nothing else touches it meanwhile.
    let packet = unsafe { packet.as_ref() };
    // SAFETY: as above.
    let row = unsafe { row.as_ref() };
    let (Some(packet), Some(row)) = (packet, row) else {
        return 1;
    };
    let mut to = *packet;
    flow::translate(&mut to, row);
    u32::from(rewrite(&TcContext::new(skb), packet, &to).is_err())
}

/// Rewrites the packet into `to`, which differs from it in addresses and ports only.
#[inline(never)]
pub fn apply(ctx: &TcContext, packet: &Packet, to: &Packet) -> Result<(), Verdict> {
    rewrite(ctx, packet, to)
}

/// [`apply`], for the path of every translated packet without another call.
#[inline(always)]
fn rewrite(ctx: &TcContext, packet: &Packet, to: &Packet) -> Result<(), Verdict> {
    let addresses = if packet.v4 {
        addresses4(ctx, packet, to)?
    } else {
        addresses6(ctx, ETH_LEN, packet, to)?
    };
    // A later fragment has neither ports nor a checksum.
    if packet.is_later() {
        if !packet.v4 {
            skb::change_sum(ctx, addresses.word());
        }
        return Ok(());
    }
    let (field, mangled) = match packet.protocol {
        TCP => (TCP_CHECKSUM, 0),
        UDP => (UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0)),
        ICMP | ICMPV6 => (ICMP_CHECKSUM, 0),
        _ => (0, 0),
    };
    let at = packet.transport() + field;
    // ICMP's checksum does not cover the addresses, unlike all others.
    if field != 0 && packet.protocol != ICMP {
        skb::replace_checksum(ctx, at, addresses.word(), mangled | u64::from(BPF_F_PSEUDO_HDR))?;
        if !packet.v4 {
            // The helper takes it that a header's checksum compensates the addresses in the sum over the packet, which
            // IPv6 has not. Kernels from 2025 on have a flag instead (`BPF_F_IPV6`), which older ones refuse.
            skb::change_sum(ctx, addresses.word());
        }
    } else if !packet.v4 {
        skb::change_sum(ctx, addresses.word());
    }
    if packet.ports == to.ports {
        return Ok(());
    }
    match packet.protocol {
        TCP | UDP | SCTP => {
            skb::store(ctx, packet.transport(), packet.plain, packet.v4, to.ports)?;
            if packet.protocol == SCTP {
                return sctp(ctx, packet, packet.ports ^ to.ports);
            }
            let difference = Sum::ZERO.replacing(packet.ports, to.ports);
            skb::replace_checksum(ctx, at, difference.word(), mangled)
        }
        ICMP | ICMPV6 => identifier(ctx, packet.transport(), at, packet, to),
        _ => Ok(()),
    }
}

/// SCTP's checksum is a CRC over the whole packet without addresses. If the sender left it to the device it is not
/// computed yet, and the value written in its place does not matter.
#[inline(always)]
fn sctp(ctx: &TcContext, packet: &Packet, difference: u32) -> Result<(), Verdict> {
    const SCTP_CHECKSUM: usize = 8;
    let at = packet.transport() + SCTP_CHECKSUM;
    let checksum: u32 = skb::load(ctx, at)?;
    #[expect(clippy::cast_possible_truncation, reason = "at most 64 KiB")]
    let length = packet.end().saturating_sub(packet.transport()) as u32;
    let changed = checksum ^ sctp_change(u32::from_le(difference), length).to_le();
    skb::store_bytes(ctx, at, &changed)
}

/// [`crc32c::delta`].
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn sctp_change(difference: u32, length: u32) -> u32 {
    crc32c::delta(difference, length)
}

/// The identifier of an ICMP echo, which represents both ports. A quoted echo's own checksum is left as quoted, so that
/// the checksum at `field`, the error's, covers one change.
#[inline(always)]
fn identifier(ctx: &TcContext, transport: usize, field: usize, packet: &Packet, to: &Packet) -> Result<(), Verdict> {
    const IDENTIFIER: usize = 4;
    const HALF: u32 = u32::from_ne_bytes([0xff, 0xff, 0, 0]);
    // It is in one half of the word, the other is zero.
    let from = packet.ports | packet.ports.rotate_left(16);
    let into = to.ports | to.ports.rotate_left(16);
    let [high, low, ..] = into.to_ne_bytes();
    skb::store_bytes(ctx, transport + IDENTIFIER, &[high, low])?;
    let (from, into) = (from & HALF, into & HALF);
    skb::replace_checksum(ctx, field, Sum::ZERO.replacing(from, into).word(), 0)
}

#[inline(always)]
fn addresses4(ctx: &TcContext, packet: &Packet, to: &Packet) -> Result<Sum, Verdict> {
    let ([.., source], [.., destination]) = (packet.source, packet.destination);
    let ([.., to_source], [.., to_destination]) = (to.source, to.destination);
    let difference = Sum::ZERO
        .replacing(source, to_source)
        .replacing(destination, to_destination);
    let pair = Pair4 {
        source: to_source,
        destination: to_destination,
    };
    let checksum: u16 = skb::read(ctx, ETH_LEN + IPV4_CHECKSUM)?;
    // The header's checksum is always complete, and the difference over it the same.
    let sum = Sum(u64::from(!checksum)).plus(difference.word()).checksum();
    skb::write(ctx, ETH_LEN + IPV4_CHECKSUM, sum)?;
    skb::write(ctx, ETH_LEN + IPV4_SOURCE, pair)?;
    Ok(difference)
}

/// Writes the addresses of an IPv6 header at `start` and returns their difference to a sum.
///
/// VERIFIER: written straight from the packet, and summed in a function of its own: both on this function's stack would
/// exceed the limit of the call chain.
#[inline(always)]
fn addresses6(ctx: &TcContext, start: usize, packet: &Packet, to: &Packet) -> Result<Sum, Verdict> {
    skb::store_bytes(ctx, start + IPV6_SOURCE, to.addresses())?;
    let source = difference(&packet.source, &to.source);
    let destination = difference(&packet.destination, &to.destination);
    Ok(Sum(source + destination))
}

/// The difference to a sum of replacing an address by another.
#[inline(never)]
fn difference(from: &[u32; 4], to: &[u32; 4]) -> u64 {
    let [a, b, c, d] = *from;
    u64::from(Sum::ZERO.address(*to).address([!a, !b, !c, !d]).word())
}

/// Rewrites the packet that an ICMP error quotes from `inner` into `to`, and the outer packet from `outer` into
/// `outer_to`.
#[inline(never)]
pub fn apply_quoted(
    ctx: &TcContext,
    outer: &Packet,
    outer_to: &Packet,
    inner: &Packet,
    to: &Packet,
) -> Result<(), Verdict> {
    const ICMP_LEN: usize = 8;
    let start = outer.transport() + ICMP_LEN;
    let field = outer.transport() + ICMP_CHECKSUM;
    if outer.v4 {
        let ([.., source], [.., destination]) = (inner.source, inner.destination);
        let ([.., to_source], [.., to_destination]) = (to.source, to.destination);
        let pair = Pair4 {
            source: to_source,
            destination: to_destination,
        };
        let difference = Sum::ZERO
            .replacing(source, to_source)
            .replacing(destination, to_destination);
        let checksum: u16 = skb::load(ctx, start + IPV4_CHECKSUM)?;
        let changed = Sum(u64::from(!checksum)).plus(difference.word()).checksum();
        skb::store_bytes(ctx, start + IPV4_CHECKSUM, &changed)?;
        skb::store_bytes(ctx, start + IPV4_SOURCE, &pair)?;
        // The change of the quoted header's checksum cancels out the change of the addresses in the error's checksum.
    } else {
        let difference = addresses6(ctx, start, inner, to)?;
        skb::replace_checksum(ctx, field, difference.word(), 0)?;
    }
    if inner.ports != to.ports {
        match inner.protocol {
            TCP | UDP | SCTP => {
                skb::store_bytes(ctx, inner.transport(), &to.ports)?;
                skb::replace_checksum(ctx, field, Sum::ZERO.replacing(inner.ports, to.ports).word(), 0)?;
            }
            ICMP | ICMPV6 => identifier(ctx, inner.transport(), field, inner, to)?,
            _ => {}
        }
    }
    // Last: it reads the outer packet as it was.
    apply(ctx, outer, outer_to)
}

/// Decrements the time to live, as every router does, but never to zero: such a packet stays as it is.
#[inline(never)]
pub fn hop(ctx: &TcContext, v4: bool) -> Result<(), Verdict> {
    hop_inline(ctx, v4)
}

/// [`hop`], for the straight path.
#[inline(always)]
pub fn hop_inline(ctx: &TcContext, v4: bool) -> Result<(), Verdict> {
    const IPV4_TTL: usize = ETH_LEN + 8;
    const IPV6_NEXT: usize = ETH_LEN + 6;
    const IPV6_HOPS: usize = ETH_LEN + 7;
    if !v4 {
        let [next, hops]: [u8; 2] = skb::read(ctx, IPV6_NEXT)?;
        if hops <= 1 {
            return Err(Verdict::TimeExceeded);
        }
        skb::write(ctx, IPV6_HOPS, hops - 1)?;
        let from = u32::from(u16::from_ne_bytes([next, hops]));
        let into = u32::from(u16::from_ne_bytes([next, hops - 1]));
        skb::change_sum(ctx, Sum::ZERO.replacing(from, into).word());
        return Ok(());
    }
    let [ttl, protocol]: [u8; 2] = skb::read(ctx, IPV4_TTL)?;
    if ttl <= 1 {
        return Err(Verdict::TimeExceeded);
    }
    let from = u32::from(u16::from_ne_bytes([ttl, protocol]));
    let into = u32::from(u16::from_ne_bytes([ttl - 1, protocol]));
    let checksum: u16 = skb::read(ctx, ETH_LEN + IPV4_CHECKSUM)?;
    let sum = Sum(u64::from(!checksum)).replacing(from, into).checksum();
    skb::write(ctx, ETH_LEN + IPV4_CHECKSUM, sum)?;
    skb::write(ctx, IPV4_TTL, ttl - 1)
}

/// Whether packets of the protocol can be given other ports.
#[inline(always)]
pub const fn has_ports(protocol: u8) -> bool {
    matches!(protocol, TCP | UDP | SCTP | ICMP | ICMPV6)
}
