//! Collects what is told about a decision: the event that is sent, or the answer to a question.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use kni_common::{
    address::bytes,
    event::{EVENT_VERSION, FlowEvent, PolicyTrail},
    flow::Ports,
};

use crate::{
    count::Place,
    flow,
    maps::{EVENTS, EXPLANATION, WORK},
    packet::Packet,
};

/// `BPF_RB_NO_WAKEUP`: the agent looks every 50 ms anyway, and waking it costs the pod more than the event.
const NO_WAKEUP: u64 = 1;

const NOTHING: PolicyTrail = PolicyTrail {
    set: 0,
    identity: 0,
    rule: 0,
    ordinal: 0,
};

/// What a packet of no current flow needs besides itself.
///
/// VERIFIER: in a per-CPU row instead of the stack, which has 512 bytes for everything.
#[repr(C)]
pub struct Work {
    /// What is told of it.
    pub story: FlowEvent,
    /// The packet behind its translation.
    pub to: Packet,
    /// The packet that an ICMP error quotes.
    pub inner: Packet,
    /// An ICMP error behind its translation.
    pub outer: Packet,
}

/// Begins with nothing decided and nothing translated.
#[inline(always)]
pub fn begin(place: &Place, packet: &Packet) -> Option<&'static mut Work> {
    let row = WORK.get_ptr_mut(0)?;
    // SAFETY: this CPU's row, and no program of ours interrupts another on the same CPU. Zeroes, which it holds before
    // the first use, are a packet too.
    let work = unsafe { &mut *row };
    work.to = *packet;
    // VERIFIER: field by field; a whole one would be put together on the stack first.
    let story = &mut work.story;
    story.time_ns = 0;
    story.version = EVENT_VERSION;
    story.verdict = 0;
    story.direction = place.direction as u16;
    story.ethertype = place.ethertype;
    story.endpoint = place.endpoint;
    story.network = place.network;
    story.generation = place.generation;
    story.length = 0;
    story.source = bytes(packet.source);
    story.destination = bytes(packet.destination);
    story.ports = Ports::from_word(packet.ports);
    story.protocol = u32::from(packet.protocol);
    story.peer = 0;
    story.service = 0;
    story.translated_source = bytes(packet.source);
    story.translated_destination = bytes(packet.destination);
    story.translated_ports = Ports::from_word(packet.ports);
    story.reserved = 0;
    story.egress = NOTHING;
    story.ingress = NOTHING;
    story.beyond = NOTHING;
    Some(work)
}

/// Tells what the packet becomes.
#[inline(always)]
pub fn translated(work: &mut Work) {
    work.story.translated_source = bytes(work.to.source);
    work.story.translated_destination = bytes(work.to.destination);
    work.story.translated_ports = Ports::from_word(work.to.ports);
}

/// Sends the story as an event. False when the ring is full.
#[inline(always)]
#[expect(
    clippy::needless_borrows_for_generic_args,
    reason = "by value it would be copied to the stack"
)]
pub fn send(story: &mut FlowEvent, verdict: u16, length: u32) -> bool {
    story.verdict = verdict;
    story.length = length;
    // SAFETY: a helper without arguments.
    story.time_ns = unsafe { bpf_ktime_get_ns() };
    EVENTS.output(&*story, NO_WAKEUP).is_ok()
}

/// Leaves the story as the answer of a dry run. Later calls of the same run replace what earlier ones said.
///
/// VERIFIER: returns a number for the reason of `count::dropped`.
#[inline(never)]
pub fn answer(story: &mut FlowEvent, verdict: u16, length: u32) -> i32 {
    story.verdict = verdict;
    story.length = length;
    if let Some(row) = EXPLANATION.get_ptr_mut(0) {
        // SAFETY: the agent runs one dry run at a time.
        let row = unsafe { &mut *row };
        row.event = *story;
        row.jiffies = flow::now();
    }
    0
}
