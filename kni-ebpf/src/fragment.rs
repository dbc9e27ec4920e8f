//! Assigns the ports of the first fragment to later fragments of a datagram.

use kni_common::{
    Direction, Verdict,
    address::bytes,
    flow::{FragmentKey, FragmentValue, Ports},
};

use crate::{
    config,
    maps::FRAGMENTS,
    packet::{Fragment, ICMP, ICMPV6, Packet, SCTP, TCP, UDP},
};

/// Records a first fragment's ports, or looks them up for a later one. Not for whole packets; protocols without ports
/// need neither.
#[inline(never)]
pub fn resolve(network: u32, direction: Direction, packet: &mut Packet) -> Result<(), Verdict> {
    if !matches!(packet.protocol, TCP | UDP | SCTP | ICMP | ICMPV6) {
        return Ok(());
    }
    let key = FragmentKey {
        network,
        identification: packet.identification.to_ne_bytes(),
        source: bytes(packet.source),
        destination: bytes(packet.destination),
        protocol: u16::from(packet.protocol),
        direction: direction as u16 + 1,
    };
    if matches!(packet.fragment, Fragment::First) {
        if config::is_dry_run() {
            return Ok(());
        }
        // A full table evicts the oldest datagram; its later fragments are then dropped and counted.
        return FRAGMENTS
            .insert(
                key,
                FragmentValue {
                    ports: Ports::from_word(packet.ports),
                },
                0,
            )
            .map_err(|_errno| Verdict::FragmentWithoutFirst);
    }
    // SAFETY: a copy of one word; a row replaced meanwhile gives the old or the new ports.
    let found = unsafe { FRAGMENTS.get(key) }.ok_or(Verdict::FragmentWithoutFirst)?;
    packet.ports = found.ports.word();
    Ok(())
}
