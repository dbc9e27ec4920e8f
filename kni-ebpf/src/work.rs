//! Scratch memory for a packet without a current flow: the event under construction and the rewritten packets.

use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};
use kni_common::{
    Direction,
    address::bytes,
    event::{EVENT_VERSION, FlowEvent},
    flow::Ports,
    route::RouteValue,
    service::{BackendValue, ServiceValue},
};

use crate::{event_fields, flow::NewFlow, packet::Packet};

/// One row per CPU, too large for the stack. Not pinned: only the programs use it.
#[btf_map]
static WORK: PerCpuArray<Work, 1> = PerCpuArray::new();

/// Endpoint, network and direction of a packet, for counters and events.
#[derive(Clone, Copy)]
pub struct Place {
    /// Endpoint id, 0 for none.
    pub endpoint: u32,
    /// Network id, 0 for none.
    pub network: u32,
    /// Generation of the endpoint's row.
    pub generation: u32,
    /// Epoch of the endpoint's row.
    pub epoch: u32,
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
            epoch: 0,
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
    /// Epoch of the event's endpoint.
    pub epoch: u32,
    /// The route of `to`'s destination, without an action where none was looked up or there is none.
    pub route: RouteValue,
    /// The packet after translation.
    pub to: Packet,
    /// The packet that an ICMP error quotes.
    pub inner: Packet,
    /// An ICMP error after translation.
    pub outer: Packet,
    /// The service port that the packet is for.
    pub service: ServiceValue,
    /// The backend chosen from it.
    pub backend: BackendValue,
    /// The flow that the packet opens.
    pub new: NewFlow,
}

impl Work {
    /// Copies the translated addresses and ports into the event.
    #[inline(always)]
    pub fn record_translation(&mut self) {
        self.event.reserved |= event_fields::TRANSLATION;
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
    work.epoch = place.epoch;
    work.route.action = 0;
    // VERIFIER: field by field; a struct literal would be assembled on the stack first.
    let event = &mut work.event;
    event.version = EVENT_VERSION;
    event.direction = place.direction as u16;
    event.ethertype = place.ethertype;
    event.endpoint = place.endpoint;
    event.network = place.network;
    event.generation = place.generation;
    event.source = bytes(packet.source);
    event.destination = bytes(packet.destination);
    event.ports = Ports::from_word(packet.ports);
    event.protocol = u32::from(packet.protocol);
    event.peer = 0;
    event.service = 0;
    // The fields that `event_fields::complete` fills where nothing else does.
    event.reserved = 0;
    Some(work)
}
