//! One module per program.

pub mod from_pod;
pub mod to_pod;

use aya_ebpf::bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC};

/// Drop.
pub(crate) const DROP: i32 = TC_ACT_SHOT;

/// Go on: to the next program of the hook (other tools' programs keep working), then to the stack. The same number is
/// `TCX_NEXT`.
pub(crate) const NEXT: i32 = TC_ACT_UNSPEC;

/// `EtherType` numbers, network byte order.
pub(crate) const ETHERTYPE_IPV4: u16 = u16::from_be(0x0800);
pub(crate) const ETHERTYPE_IPV6: u16 = u16::from_be(0x86dd);
pub(crate) const ETHERTYPE_ARP: u16 = u16::from_be(0x0806);
pub(crate) const ETHERTYPE_VLAN: u16 = u16::from_be(0x8100);
pub(crate) const ETHERTYPE_QINQ: u16 = u16::from_be(0x88a8);
