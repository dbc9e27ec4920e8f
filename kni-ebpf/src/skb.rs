//! Accesses packet memory and the fields of `__sk_buff`; no other module of the TC programs does.

use core::mem::size_of;

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::{bpf_csum_update, generated::bpf_skb_vlan_pop},
    programs::TcContext,
};
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

/// Clears the class that the sender has chosen for queueing disciplines (`SO_PRIORITY`): it survives the pod's
/// namespace.
#[inline(always)]
pub fn clear_priority(ctx: &TcContext) {
    // SAFETY: as in `set_mark`.
    unsafe { (*ctx.skb.skb).priority = 0 };
}

/// Whether the packet has a VLAN tag outside its bytes.
#[inline(always)]
pub fn has_vlan_tag(ctx: &TcContext) -> bool {
    // SAFETY: as in `ifindex`.
    unsafe { (*raw(ctx)).vlan_present != 0 }
}

/// The VLAN of the tag outside the packet's bytes, 0 for none.
#[inline(always)]
pub fn vlan(ctx: &TcContext) -> u32 {
    const ID: u32 = 0x0fff;
    // SAFETY: as in `ifindex`.
    unsafe { (*raw(ctx)).vlan_tci & ID }
}

/// Removes the tag outside the packet's bytes; a further one in its bytes takes that place. False if there is none.
#[inline(always)]
pub fn remove_vlan_tag(ctx: &TcContext) -> bool {
    // SAFETY: a helper on the program's own context.
    unsafe { bpf_skb_vlan_pop(ctx.skb.skb) == 0 }
}

/// Whether the packet stands for several segments (its length fields then describe all of them or nothing).
#[inline(always)]
pub fn is_gso(ctx: &TcContext) -> bool {
    // SAFETY: as in `ifindex`.
    unsafe { (*raw(ctx)).gso_size != 0 }
}

/// Payload bytes of each segment that the packet stands for, 0 for one that stands for itself.
#[inline(always)]
pub fn gso_size(ctx: &TcContext) -> u32 {
    // SAFETY: as in `ifindex`.
    unsafe { (*raw(ctx)).gso_size }
}

/// Keeps the MTU that the packet exceeds, for its rejection.
#[inline(always)]
pub fn set_exceeded_mtu(ctx: &TcContext, mtu: u32) {
    // SAFETY: as in `set_mark`.
    let [first, ..] = unsafe { &mut (*ctx.skb.skb).cb };
    *first = mtu;
}

/// The MTU of [`set_exceeded_mtu`].
#[inline(always)]
pub fn exceeded_mtu(ctx: &TcContext) -> u32 {
    // SAFETY: as in `ifindex`.
    let [first, ..] = unsafe { (*raw(ctx)).cb };
    first
}

/// The number of the virtual network and the sender of the tunnel that the packet of a dry run came through: such a
/// packet has no metadata of tunnels.
#[inline(always)]
pub fn supposed_tunnel(ctx: &TcContext) -> (u32, [u32; 4]) {
    // SAFETY: as in `ifindex`.
    let [number, a, b, c, d] = unsafe { (*raw(ctx)).cb };
    (number, [a, b, c, d])
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

/// Whether the linear part has at least this many bytes.
#[inline(always)]
pub fn holds(ctx: &TcContext, bytes: usize) -> bool {
    ctx.data() + bytes <= ctx.data_end()
}

/// Copies a word at an offset known at compile time that [`holds`] has proved to lie in the linear part. Unaligned
/// words as in [`read`].
#[inline(always)]
pub fn peek<T: Copy>(ctx: &TcContext, offset: usize) -> T {
    // SAFETY: by the caller, and the verifier refuses a program that did not prove it.
    unsafe { *((ctx.data() + offset) as *const T) }
}

/// The EtherType, in network byte order; `None` where the linear part is shorter.
#[inline(always)]
pub fn peek_ethertype(ctx: &TcContext) -> Option<u16> {
    holds(ctx, ETH_LEN).then(|| peek(ctx, ETH_LEN - 2))
}

/// Writes the first four and the next eight bytes; `None` where the linear part is shorter.
#[inline(always)]
#[expect(clippy::cast_ptr_alignment, reason = "unaligned words as in `read`")]
pub fn poke_words(ctx: &TcContext, first: u32, rest: u64) -> Option<()> {
    #[repr(C, packed)]
    struct Words {
        first: u32,
        rest: u64,
    }
    let place = at::<Words>(ctx, 0)?;
    let start = place.cast::<u32>();
    // SAFETY: `at` proved that all of `Words` lies in the packet, and this is its first word.
    unsafe { start.write(first) };
    // SAFETY: as above.
    let behind = unsafe { start.add(1) };
    // SAFETY: as above, the rest of it.
    unsafe { behind.cast::<u64>().write(rest) };
    Some(())
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

/// Adds a difference to the sum over the whole packet, where a device has computed one (`CHECKSUM_COMPLETE`): for
/// changes that no checksum in the packet compensates.
#[inline(always)]
pub fn change_sum(ctx: &TcContext, difference: u32) {
    // SAFETY: a helper on the program's own context.
    let _no_such_sum = unsafe { bpf_csum_update(ctx.skb.skb, difference) };
}

/// Adds a difference to the checksum at an offset (`bpf_l4_csum_replace`); invalidates pointers into the packet.
#[inline(always)]
pub fn replace_checksum(ctx: &TcContext, offset: usize, difference: u32, flags: u64) -> Result<(), Verdict> {
    ctx.l4_csum_replace(offset, 0, u64::from(difference), flags)
        .map_err(|_errno| Verdict::Truncated)
}

/// The same context, of which the compiler knows nothing.
///
/// VERIFIER: what was read from it before is read again. Otherwise values of one path would live on in another one, and
/// each way that leads to the latter would be a state of its own.
#[inline(always)]
pub fn reread(ctx: &TcContext) -> TcContext {
    let skb = ctx.skb.skb;
    #[cfg(target_arch = "bpf")]
    let skb = {
        let mut same = skb;
        // SAFETY: an instruction without an effect.
        unsafe {
            core::arch::asm!("{same} = {same}", same = inout(reg) same);
        }
        same
    };
    TcContext::new(skb)
}
