//! Counts what was decided and reports drops; the only writer of counters and events.

use aya_ebpf::{helpers::bpf_ktime_get_ns, programs::TcContext};
use kni_common::{
    Direction, Verdict,
    address::bytes,
    counter::{Counter, DropKey, EVENT_WINDOW_SHIFT, EVENTS_PER_WINDOW, counter_index},
    event::{DropEvent, EVENT_VERSION},
    flow::Ports,
};

use crate::{
    flow,
    maps::{COUNTERS, DROPS, EVENT_GATES, EVENTS},
    packet::Packet,
    programs::DROP,
};

/// Who and where, for counters and events.
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

/// Counts a packet that goes on.
#[inline(always)]
pub fn forwarded(endpoint: u32, direction: Direction, verdict: Verdict, length: u32) {
    if let Some(counter) = COUNTERS.get_ptr_mut(counter_index(endpoint, direction, verdict)) {
        // SAFETY: a per-CPU row; the program is not preempted by itself on the same CPU.
        let counter = unsafe { &mut *counter };
        counter.packets += 1;
        counter.bytes += u64::from(length);
    }
}

/// Counts a dropped packet (`verdict` is the reason's code), and reports it unless the endpoint has reported too many.
/// Returns what the program returns then.
///
/// VERIFIER: without a result it would return what its first register holds, and a pointer into the stack is refused.
#[inline(never)]
pub fn dropped(ctx: &TcContext, place: &Place, packet: &Packet, verdict: u16) -> i32 {
    let length = ctx.len();
    #[cfg(feature = "trace")]
    aya_log_ebpf::debug!(
        ctx,
        "drop {} endpoint {} network {}",
        verdict,
        place.endpoint,
        place.network
    );
    let key = DropKey {
        endpoint: place.endpoint,
        verdict,
        direction: place.direction as u16,
    };
    match DROPS.get_ptr_mut(key) {
        Some(counter) => {
            // SAFETY: a per-CPU row, as in `forwarded`.
            let counter = unsafe { &mut *counter };
            counter.packets += 1;
            counter.bytes += u64::from(length);
        }
        None => {
            // A full table loses the count of a rare reason, never the drop.
            let _lost_when_full = DROPS.insert(
                key,
                Counter {
                    packets: 1,
                    bytes: u64::from(length),
                },
                0,
            );
        }
    }
    if may_report(place.endpoint) {
        report(place, packet, verdict, length);
    }
    DROP
}

#[inline(always)]
fn may_report(endpoint: u32) -> bool {
    let Some(gate) = EVENT_GATES.get_ptr_mut(endpoint) else {
        return false;
    };
    #[expect(clippy::cast_possible_truncation, reason = "the low bits tell windows apart")]
    let window = (flow::now() >> EVENT_WINDOW_SHIFT) as u32;
    // SAFETY: a per-CPU row, as in `forwarded`.
    let gate = unsafe { &mut *gate };
    if gate.window != window {
        gate.window = window;
        gate.events = 0;
    }
    if gate.events >= EVENTS_PER_WINDOW {
        return false;
    }
    gate.events += 1;
    true
}

#[inline(always)]
fn report(place: &Place, packet: &Packet, verdict: u16, length: u32) {
    // A full ring loses the event; the counters stay exact.
    let Some(mut entry) = EVENTS.reserve(0) else { return };
    entry.write(DropEvent {
        // SAFETY: a helper without arguments.
        time_ns: unsafe { bpf_ktime_get_ns() },
        version: EVENT_VERSION,
        verdict,
        direction: place.direction as u16,
        ethertype: place.ethertype,
        endpoint: place.endpoint,
        network: place.network,
        generation: place.generation,
        length,
        source: bytes(packet.source),
        destination: bytes(packet.destination),
        ports: Ports::from_word(packet.ports),
        protocol: u32::from(packet.protocol),
    });
    entry.submit(0);
}
