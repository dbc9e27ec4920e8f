//! Accesses packet memory and the fields of `__sk_buff`; no other module of the TC programs does.

use core::mem::size_of;

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use kni_common::Verdict;

/// Bytes of an Ethernet header.
pub const ETH_LEN: usize = 14;

/// Ethernet header as two-byte words, which is how it is aligned in a packet.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EthHeader {
    /// Destination MAC address.
    pub destination: [u16; 3],
    /// Source MAC address.
    pub source: [u16; 3],
    /// EtherType, network byte order.
    pub ethertype: u16,
}

/// EtherType of IPv4, in network byte order like the others.
pub const ETHERTYPE_IPV4: u16 = u16::from_be(0x0800);
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = u16::from_be(0x86dd);
/// EtherType of ARP.
pub const ETHERTYPE_ARP: u16 = u16::from_be(0x0806);
/// EtherType of an 802.1Q VLAN tag.
pub const ETHERTYPE_VLAN: u16 = u16::from_be(0x8100);
/// EtherType of an 802.1ad service tag.
pub const ETHERTYPE_QINQ: u16 = u16::from_be(0x88a8);

#[inline(always)]
fn raw(ctx: &TcContext) -> *const __sk_buff {
    ctx.skb.skb.cast_const()
}

/// Index of the interface whose hook runs.
#[inline(always)]
pub fn ifindex(ctx: &TcContext) -> u32 {
    // SAFETY: the context pointer that the kernel hands to the program is valid while it runs.
    unsafe { (*raw(ctx)).ifindex }
}

/// Index of the interface through which the packet entered the node, 0 when the node sent it. No peer can change it.
#[inline(always)]
pub fn ingress_ifindex(ctx: &TcContext) -> u32 {
    // SAFETY: as in `ifindex`.
    unsafe { (*raw(ctx)).ingress_ifindex }
}

/// The packet's mark.
#[inline(always)]
pub fn mark(ctx: &TcContext) -> u32 {
    // SAFETY: as in `ifindex`.
    unsafe { (*raw(ctx)).mark }
}

/// Writes the packet's mark.
#[inline(always)]
pub fn set_mark(ctx: &TcContext, mark: u32) {
    // SAFETY: as in `ifindex`; programs of this type may write the field.
    unsafe { (*ctx.skb.skb).mark = mark };
}

/// Whether the packet has a VLAN tag outside its bytes.
#[inline(always)]
pub fn has_vlan_tag(ctx: &TcContext) -> bool {
    // SAFETY: as in `ifindex`.
    unsafe { (*raw(ctx)).vlan_present != 0 }
}

/// Whether the packet stands for several segments (its length fields then describe all of them or nothing).
#[inline(always)]
pub fn is_gso(ctx: &TcContext) -> bool {
    // SAFETY: as in `ifindex`.
    unsafe { (*raw(ctx)).gso_size != 0 }
}

/// A pointer to `T` at a constant offset of the linear part, `None` where the packet is shorter there.
#[inline(always)]
pub fn at<T>(ctx: &TcContext, offset: usize) -> Option<*mut T> {
    let start = ctx.data() + offset;
    // VERIFIER: this comparison gives the pointer its range; it must come right before the use.
    if start + size_of::<T>() > ctx.data_end() {
        None
    } else {
        Some(start as *mut T)
    }
}

/// Copies `T` from an offset known at compile time. The types read this way consist of 16- and 32-bit words: packet
/// data is aligned so that the IP header starts at a 4-byte boundary (`NET_IP_ALIGN`), and eBPF on x86-64 and arm64 may
/// read unaligned words anyway.
#[inline(always)]
pub fn read<T: Copy>(ctx: &TcContext, offset: usize) -> Result<T, Verdict> {
    match at::<T>(ctx, offset) {
        // SAFETY: `at` proved that all of `T` lies in the packet, and any bytes are a valid `T` here.
        Some(header) => Ok(unsafe { *header }),
        None => load(ctx, offset),
    }
}

/// Copies `T` from any offset, also from the non-linear part (22 ns: for packets of unusual shape).
#[inline(always)]
pub fn load<T: Copy>(ctx: &TcContext, offset: usize) -> Result<T, Verdict> {
    ctx.load::<T>(offset).map_err(|_errno| Verdict::Truncated)
}

/// Writes `T` at an offset known at compile time.
#[inline(always)]
pub fn write<T: Copy>(ctx: &TcContext, offset: usize, value: T) -> Result<(), Verdict> {
    match at::<T>(ctx, offset) {
        Some(place) => {
            // SAFETY: `at` proved that all of `T` lies in the packet.
            unsafe { *place = value };
            Ok(())
        }
        None => store_bytes(ctx, offset, &value),
    }
}

/// Writes `T` at any offset, also into the non-linear part (32 ns).
#[inline(always)]
pub fn store_bytes<T>(ctx: &TcContext, offset: usize, value: &T) -> Result<(), Verdict> {
    ctx.store(offset, value, 0).map_err(|_errno| Verdict::Truncated)
}

/// Writes the ports of a packet: through a pointer where they follow a header of usual length.
#[inline(always)]
pub fn store(ctx: &TcContext, offset: usize, plain: bool, v4: bool, ports: u32) -> Result<(), Verdict> {
    const V4: usize = ETH_LEN + 20;
    const V6: usize = ETH_LEN + 40;
    match (plain, v4) {
        (true, true) => write(ctx, V4, ports),
        (true, false) => write(ctx, V6, ports),
        (false, _) => store_bytes(ctx, offset, &ports),
    }
}

/// Adds a difference to the checksum at an offset (`bpf_l4_csum_replace`); invalidates pointers into the packet.
#[inline(always)]
pub fn replace_checksum(ctx: &TcContext, offset: usize, difference: u32, flags: u64) -> Result<(), Verdict> {
    ctx.l4_csum_replace(offset, 0, u64::from(difference), flags)
        .map_err(|_errno| Verdict::Truncated)
}
