//! Scratch memory for a packet without a current flow: the event under construction and the rewritten packets.

use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};
use kni_common::{
    Direction,
    address::bytes,
    event::{EVENT_VERSION, FlowEvent, PolicyTrail},
    flow::Ports,
};

use crate::packet::Packet;

/// One row per CPU, too large for the stack. Not pinned: only the programs use it.
#[btf_map]
static WORK: PerCpuArray<Work, 1> = PerCpuArray::new();

const NO_POLICY: PolicyTrail = PolicyTrail {
    set: 0,
    identity: 0,
    rule: 0,
    ordinal: 0,
};

/// Endpoint, network and direction of a packet, for counters and events.
#[derive(Clone, Copy)]
pub struct Place {
    /// Endpoint id, 0 for none.
    pub endpoint: u32,
    /// Network id, 0 for none.
    pub network: u32,
    /// Generation of the endpoint's row.
    pub generation: u32,
    /// Direction.
    pub direction: Direction,
    /// EtherType, host byte order.
    pub ethertype: u16,
}

impl Place {
    /// Only the direction is known.
    #[inline(always)]
    pub const fn unknown(direction: Direction) -> Self {
        Self {
            endpoint: 0,
            network: 0,
            generation: 0,
            direction,
            ethertype: 0,
        }
    }
}

/// State of a packet without a current flow.
///
/// VERIFIER: in a per-CPU row instead of the stack, which has 512 bytes for the whole call chain.
#[repr(C)]
pub struct Work {
    /// The event under construction.
    pub event: FlowEvent,
    /// The packet after translation.
    pub to: Packet,
    /// The packet that an ICMP error quotes.
    pub inner: Packet,
    /// An ICMP error after translation.
    pub outer: Packet,
}

impl Work {
    /// Copies the translated addresses and ports into the event.
    #[inline(always)]
    pub fn record_translation(&mut self) {
        self.event.translated_source = bytes(self.to.source);
        self.event.translated_destination = bytes(self.to.destination);
        self.event.translated_ports = Ports::from_word(self.to.ports);
    }
}

/// Resets this CPU's row for a packet: nothing decided, nothing translated.
#[inline(always)]
pub fn begin(place: &Place, packet: &Packet) -> Option<&'static mut Work> {
    let row = WORK.get_ptr_mut(0)?;
    // SAFETY: this CPU's row, and none of our programs interrupts another one on the same CPU. The zeroes that it holds
    // before first use are a valid packet.
    let work = unsafe { &mut *row };
    work.to = *packet;
    // VERIFIER: field by field; a struct literal would be assembled on the stack first.
    let event = &mut work.event;
    event.time_ns = 0;
    event.version = EVENT_VERSION;
    event.verdict = 0;
    event.direction = place.direction as u16;
    event.ethertype = place.ethertype;
    event.endpoint = place.endpoint;
    event.network = place.network;
    event.generation = place.generation;
    event.length = 0;
    event.source = bytes(packet.source);
    event.destination = bytes(packet.destination);
    event.ports = Ports::from_word(packet.ports);
    event.protocol = u32::from(packet.protocol);
    event.peer = 0;
    event.service = 0;
    event.translated_source = bytes(packet.source);
    event.translated_destination = bytes(packet.destination);
    event.translated_ports = Ports::from_word(packet.ports);
    event.reserved = 0;
    event.egress = NO_POLICY;
    event.ingress = NO_POLICY;
    event.beyond = NO_POLICY;
    Some(work)
}
