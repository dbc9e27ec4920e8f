//! Publishes the outcome of a dry run in the map `EXPLANATION`.

use kni_common::event::FlowEvent;

use crate::{event_fields, flow, maps::EXPLANATION, packet::Packet, time, work::Work};

/// Adds the translation of a packet that follows its flow, which reports no event otherwise.
///
/// VERIFIER: returns a number for the same reason as `count::dropped`.
#[inline(never)]
pub fn follow(network: u32, packet: &Packet, work: &mut Work) -> i32 {
    if let Some(found) = flow::lookup(network, packet) {
        flow::translate_out_of_line(&mut work.to, found);
        work.record_translation();
    }
    0
}

/// Stores the event as the outcome of a dry run. A later call in the same run replaces an earlier one.
///
/// VERIFIER: returns a number for the same reason as `count::dropped`.
#[inline(never)]
pub fn record(event: &mut FlowEvent, verdict: u16, length: u32) -> i32 {
    event_fields::complete(event);
    event.verdict = verdict;
    event.length = length;
    event.time_ns = 0;
    if let Some(row) = EXPLANATION.get_ptr_mut(0) {
        // SAFETY: the agent runs one dry run at a time.
        let row = unsafe { &mut *row };
        row.event = *event;
        event.reserved = event_fields::COMPLETE;
        row.jiffies = time::jiffies();
    }
    0
}
