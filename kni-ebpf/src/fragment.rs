//! Assigns the protocol and ports of the first fragment to later fragments of a datagram.

use kni_common::{
    Direction, Verdict,
    address::bytes,
    flow::{FRAGMENT_SECONDS, FragmentKey, FragmentValue, Ports},
};

use crate::{
    config,
    maps::{FRAGMENTS, FRAGMENTS_OUTSIDE},
    packet::{self, Class, Packet},
    time, translate,
};

/// Gives a later fragment the protocol and ports of its first. Protocols without ports have no need of it, unless
/// extension headers hide the protocol.
#[inline(never)]
pub fn lookup(network: u32, direction: Direction, packet: &mut Packet) -> Result<(), Verdict> {
    if !translate::has_ports(packet.protocol) && !packet::is_extension(packet.protocol) {
        return Ok(());
    }
    let key = key(network, direction, packet);
    let found = match direction {
        Direction::FromPod => FRAGMENTS.get_ptr(key),
        Direction::ToPod
        | Direction::FromUplink
        | Direction::ToUplink
        | Direction::FromOverlay
        | Direction::ToOverlay => FRAGMENTS_OUTSIDE.get_ptr(key),
    };
    let found = found.ok_or(Verdict::FragmentWithoutFirst)?;
    // SAFETY: memory of the table. A row that is reused meanwhile vouches with another datagram's words, and the
    // policies apply to those.
    let FragmentValue { seen, ports, protocol } = unsafe { found.read_volatile() };
    let hz = config::get().map_or(0, |config| config.hz);
    if time::jiffies().saturating_sub(seen) > u64::from(hz) * u64::from(FRAGMENT_SECONDS) {
        return Err(Verdict::FragmentWithoutFirst);
    }
    packet.ports = ports.word();
    #[expect(clippy::cast_possible_truncation, reason = "a protocol number")]
    let protocol = protocol as u8;
    packet.protocol = protocol;
    Ok(())
}

/// Records a first fragment that is let through, so that its later ones follow it. A table without room costs the
/// datagram its later fragments, which are dropped and counted.
///
/// VERIFIER: returns a number for the same reason as `count::dropped`.
#[inline(never)]
pub fn record(network: u32, direction: Direction, packet: &Packet) -> i32 {
    let is_of_use = translate::has_ports(packet.protocol) || !packet.v4;
    if !is_of_use || packet.class == Class::LinkControl || config::is_dry_run() {
        return 0;
    }
    let key = key(network, direction, packet);
    let value = FragmentValue {
        seen: time::jiffies(),
        ports: Ports::from_word(packet.ports),
        protocol: u32::from(packet.protocol),
    };
    let _full = match direction {
        Direction::FromPod => FRAGMENTS.insert(key, value, 0),
        Direction::ToPod
        | Direction::FromUplink
        | Direction::ToUplink
        | Direction::FromOverlay
        | Direction::ToOverlay => FRAGMENTS_OUTSIDE.insert(key, value, 0),
    };
    0
}

#[inline(always)]
fn key(network: u32, direction: Direction, packet: &Packet) -> FragmentKey {
    FragmentKey {
        network,
        identification: packet.identification.to_ne_bytes(),
        source: bytes(packet.source),
        destination: bytes(packet.destination),
        protocol: if packet.v4 { u16::from(packet.protocol) } else { 0 },
        direction: direction as u16 + 1,
    }
}
