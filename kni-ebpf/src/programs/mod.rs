//! One module per program.

pub mod from_pod;
pub mod from_uplink;
pub mod to_pod;
pub mod to_uplink;
pub mod xdp_pod;
pub mod xdp_uplink;

use aya_ebpf::bindings::{TC_ACT_OK, TC_ACT_SHOT, TC_ACT_UNSPEC};
use kni_common::endpoint::FLAG_HANDOVER;

use crate::endpoint;

/// Drop.
pub(crate) const DROP: i32 = TC_ACT_SHOT;

/// Go on: to the next program of the hook (other tools' programs keep working), then to the stack. The same number is
/// `TCX_NEXT`.
pub(crate) const NEXT: i32 = TC_ACT_UNSPEC;

/// What lets a packet of an endpoint go on to the stack, or out of it: past the programs that others have attached, except
/// for the moment in which ours stands among them a second time.
#[inline(always)]
pub(crate) fn onward(endpoint: u32) -> i32 {
    match endpoint::row(endpoint) {
        Some(row) if row.flags & FLAG_HANDOVER != 0 => TC_ACT_OK,
        _ => NEXT,
    }
}

/// `EtherType` numbers, network byte order.
pub(crate) const ETHERTYPE_IPV4: u16 = u16::from_be(0x0800);
pub(crate) const ETHERTYPE_IPV6: u16 = u16::from_be(0x86dd);
pub(crate) const ETHERTYPE_ARP: u16 = u16::from_be(0x0806);
pub(crate) const ETHERTYPE_VLAN: u16 = u16::from_be(0x8100);
pub(crate) const ETHERTYPE_QINQ: u16 = u16::from_be(0x88a8);
