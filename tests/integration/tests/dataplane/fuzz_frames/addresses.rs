//! Generates addresses of the endpoints of a run.

use std::net::{Ipv4Addr, Ipv6Addr};

use kni_integration::frames::Mac;

/// Host parts of the addresses of endpoints.
pub(super) const HOSTS: u32 = 3;

pub(super) fn low(value: u32) -> u8 {
    u8::try_from(value & 0xff).expect("a byte")
}

pub(super) fn mac(id: u32) -> Mac {
    [2, 0, 0, 0, 0, low(id)]
}

pub(super) fn host_mac(id: u32) -> Mac {
    [2, 0, 0, 0, 1, low(id)]
}

pub(super) fn address4(host: u32) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, low(host))
}

pub(super) fn address6(host: u32) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, low(host).into())
}
