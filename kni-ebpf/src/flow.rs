//! The flow table: lookup, creation and refresh of both directions' rows.

use aya_ebpf::helpers::bpf_jiffies64;
use kni_common::{
    Verdict,
    address::bytes,
    flow::{FlowKey4, FlowKey6, FlowValue, Ports, swapped},
};

use crate::{
    maps::{FLOWS4, FLOWS6},
    packet::Packet,
};

#[inline(always)]
fn key4(network: u32, packet: &Packet) -> FlowKey4 {
    let [.., source] = packet.source;
    let [.., destination] = packet.destination;
    FlowKey4 {
        network,
        source: source.to_ne_bytes(),
        destination: destination.to_ne_bytes(),
        ports: Ports::from_word(packet.ports),
        protocol: u32::from(packet.protocol),
    }
}

#[inline(always)]
fn key6(network: u32, packet: &Packet) -> FlowKey6 {
    FlowKey6 {
        network,
        source: bytes(packet.source),
        destination: bytes(packet.destination),
        ports: Ports::from_word(packet.ports),
        protocol: u32::from(packet.protocol),
    }
}

/// The row of the packet's own direction.
#[inline(always)]
pub fn find(network: u32, packet: &Packet) -> Option<&'static mut FlowValue> {
    let value = if packet.v4 {
        FLOWS4.get_ptr_mut(key4(network, packet))
    } else {
        FLOWS6.get_ptr_mut(key6(network, packet))
    };
    // SAFETY: an LRU row's memory stays mapped while the program runs (RCU); a row that is reused meanwhile is told by
    // its generations, and a lost refresh does no harm.
    value.map(|row| unsafe { &mut *row })
}

/// The packet as its answer would be.
#[inline(always)]
pub fn reversed(packet: &Packet) -> Packet {
    Packet {
        source: packet.destination,
        destination: packet.source,
        ports: swapped(packet.ports),
        ..*packet
    }
}

#[inline(always)]
fn put(network: u32, packet: &Packet, value: &FlowValue) -> Result<(), Verdict> {
    let written = if packet.v4 {
        FLOWS4.insert(key4(network, packet), value, 0)
    } else {
        FLOWS6.insert(key6(network, packet), value, 0)
    };
    written.map_err(|_errno| Verdict::FlowTableFull)
}

/// What is written for a new flow, in the terms of its first packet.
pub struct NewFlow {
    /// Kind of the packet's own direction.
    pub kind: u32,
    /// Kind of the answer's direction.
    pub answer_kind: u32,
    /// The sender, 0 for none.
    pub source: u32,
    /// Its generation.
    pub source_generation: u32,
    /// The receiver, 0 for none.
    pub destination: u32,
    /// Its generation.
    pub destination_generation: u32,
}

/// Writes both rows, replacing what an earlier flow with the same tuple left.
#[inline(always)]
pub fn create(network: u32, packet: &Packet, new: &NewFlow) -> Result<(), Verdict> {
    let last_seen = now();
    // The answer's row first: an answer can only follow the packet that the other row lets through.
    let answer = FlowValue {
        last_seen,
        source_generation: new.destination_generation,
        destination_generation: new.source_generation,
        destination: new.source,
        kind: new.answer_kind,
    };
    put(network, &reversed(packet), &answer)?;
    let own = FlowValue {
        last_seen,
        source_generation: new.source_generation,
        destination_generation: new.destination_generation,
        destination: new.destination,
        kind: new.kind,
    };
    put(network, packet, &own)
}

/// Remembers that the flow lives; writes at most once per jiffy, so that two CPUs rarely share the cache line.
#[inline(always)]
pub fn refresh(row: &mut FlowValue) {
    let now = now();
    if row.last_seen != now {
        row.last_seen = now;
    }
}

/// jiffies: inlined by the kernel, 2 ns.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_jiffies64() }
}
