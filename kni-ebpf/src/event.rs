//! Sends flow and drop events to the agent, rate-limited per endpoint.

use aya_ebpf::{helpers::bpf_ktime_get_ns, programs::TcContext};
use kni_common::{
    Verdict,
    config::Config,
    counter::{EVENT_WINDOW_SHIFT, EVENTS_PER_WINDOW, EventGate},
    event::FlowEvent,
};

use crate::{
    config, event_fields, explanation,
    maps::{DROP_EVENTS, EVENT_GATES, FLOW_EVENTS, Ring},
    time,
};

/// `BPF_RB_NO_WAKEUP`: the agent polls every 50 ms anyway, and a wake-up costs the pod more than the event.
const NO_WAKEUP: u64 = 1;

/// Reports a dropped packet, unless the endpoint has reported too many in this window.
#[inline(always)]
pub fn dropped(event: &mut FlowEvent, verdict: u16, length: u32) {
    let Some(gate) = gate(event.endpoint) else {
        return;
    };
    gate.drops += 1;
    if gate.drops > EVENTS_PER_WINDOW || !send(&DROP_EVENTS, event, verdict, length) {
        gate.lost += 1;
    }
}

/// Reports a flow that passed policy, where flow events are enabled.
#[inline(always)]
pub fn new_flow(ctx: &TcContext, config: &Config, event: &mut FlowEvent, verdict: Verdict) {
    if config::is_dry_run() {
        explanation::record(event, verdict as u16, ctx.len());
        return;
    }
    if config.flow_events != 0 {
        send_flow(ctx, event, verdict as u16, config);
    }
}

#[inline(never)]
fn send_flow(ctx: &TcContext, event: &mut FlowEvent, verdict: u16, config: &Config) -> i32 {
    let Some(gate) = gate(event.endpoint) else {
        return 0;
    };
    gate.flows += 1;
    if gate.flows > config.flow_events || !send(&FLOW_EVENTS, event, verdict, ctx.len()) {
        gate.lost += 1;
    }
    0
}

/// The endpoint's rate limit, reset in each window.
#[inline(always)]
fn gate(endpoint: u32) -> Option<&'static mut EventGate> {
    let gate = EVENT_GATES.get_ptr_mut(endpoint)?;
    #[expect(clippy::cast_possible_truncation, reason = "the low bits distinguish windows")]
    let window = (time::jiffies() >> EVENT_WINDOW_SHIFT) as u32;
    // SAFETY: a per-CPU row; the program is not preempted by itself on the same CPU.
    let gate = unsafe { &mut *gate };
    if gate.window != window {
        gate.window = window;
        gate.drops = 0;
        gate.flows = 0;
    }
    Some(gate)
}

/// Writes the event to the ring buffer. False when the ring is full.
#[inline(always)]
#[expect(
    clippy::needless_borrows_for_generic_args,
    reason = "by value it would be copied to the stack"
)]
fn send(ring: &Ring, event: &mut FlowEvent, verdict: u16, length: u32) -> bool {
    event_fields::complete(event);
    event.verdict = verdict;
    event.length = length;
    // SAFETY: a helper without arguments.
    event.time_ns = unsafe { bpf_ktime_get_ns() };
    let sent = ring.output(&*event, NO_WAKEUP).is_ok();
    event.reserved = event_fields::COMPLETE;
    sent
}
