//! Counts what was decided and reports drops and new flows; the only writer of counters and events.

use aya_ebpf::programs::TcContext;
use kni_common::{
    Direction, Verdict,
    config::Config,
    counter::{Counter, DropKey, EVENT_WINDOW_SHIFT, EVENTS_PER_WINDOW, EventGate, counter_index},
    event::FlowEvent,
};

use crate::{
    config, flow,
    maps::{COUNTERS, DROPS, EVENT_GATES},
    programs::DROP,
    story,
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

impl Place {
    /// Nothing known yet.
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

/// Counts a packet that goes on.
#[inline(always)]
pub fn forwarded(endpoint: u32, direction: Direction, verdict: Verdict, length: u32) {
    if config::is_dry_run() {
        return;
    }
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
pub fn dropped(ctx: &TcContext, story: &mut FlowEvent, verdict: u16) -> i32 {
    let length = ctx.len();
    if config::is_dry_run() {
        story::answer(story, verdict, length);
        return DROP;
    }
    #[cfg(feature = "trace")]
    aya_log_ebpf::debug!(
        ctx,
        "drop {} endpoint {} network {}",
        verdict,
        story.endpoint,
        story.network
    );
    let key = DropKey {
        endpoint: story.endpoint,
        verdict,
        direction: story.direction,
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
    let Some(gate) = gate(story.endpoint) else {
        return DROP;
    };
    gate.drops += 1;
    if gate.drops > EVENTS_PER_WINDOW || !story::send(story, verdict, length) {
        gate.lost += 1;
    }
    DROP
}

/// Reports a flow that was judged and let through, where somebody wants to know.
#[inline(always)]
pub fn new_flow(ctx: &TcContext, story: &mut FlowEvent, verdict: Verdict) {
    if config::is_dry_run() {
        story::answer(story, verdict as u16, ctx.len());
        return;
    }
    let Some(config) = config::get() else { return };
    if config.flow_events != 0 {
        report_flow(ctx, story, verdict as u16, config);
    }
}

#[inline(never)]
fn report_flow(ctx: &TcContext, story: &mut FlowEvent, verdict: u16, config: &Config) -> i32 {
    let Some(gate) = gate(story.endpoint) else {
        return 0;
    };
    gate.flows += 1;
    if gate.flows > config.flow_events || !story::send(story, verdict, ctx.len()) {
        gate.lost += 1;
    }
    0
}

/// The endpoint's gate, opened anew in each window.
#[inline(always)]
fn gate(endpoint: u32) -> Option<&'static mut EventGate> {
    let gate = EVENT_GATES.get_ptr_mut(endpoint)?;
    #[expect(clippy::cast_possible_truncation, reason = "the low bits tell windows apart")]
    let window = (flow::now() >> EVENT_WINDOW_SHIFT) as u32;
    // SAFETY: a per-CPU row, as in `forwarded`.
    let gate = unsafe { &mut *gate };
    if gate.window != window {
        gate.window = window;
        gate.drops = 0;
        gate.flows = 0;
    }
    Some(gate)
}
