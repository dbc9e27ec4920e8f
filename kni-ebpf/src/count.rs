//! Counts forwarded and dropped packets.

use aya_ebpf::programs::TcContext;
use kni_common::{
    Direction, Verdict,
    counter::{Counter, DropKey, counter_index},
    event::FlowEvent,
};

use crate::{
    action::DROP,
    config, event, explanation,
    maps::{COUNTERS, DROPS},
};

/// Counts a forwarded packet.
#[inline(always)]
pub fn forwarded(endpoint: u32, direction: Direction, verdict: Verdict, length: u32) {
    if !config::is_dry_run() {
        add(endpoint, direction, verdict, length);
    }
}

/// [`forwarded`], except in a dry run.
#[inline(always)]
pub fn add(endpoint: u32, direction: Direction, verdict: Verdict, length: u32) {
    if let Some(counter) = COUNTERS.get_ptr_mut(counter_index(endpoint, direction, verdict)) {
        // SAFETY: a per-CPU row; the program is not preempted by itself on the same CPU.
        let counter = unsafe { &mut *counter };
        counter.packets += 1;
        counter.bytes += u64::from(length);
    }
}

/// Counts a dropped packet and reports it, unless the endpoint has reported too many; `verdict` is the code of the
/// reason. Returns the action of the program.
///
/// VERIFIER: without a result the function would return the content of its first register, and a pointer into the stack
/// is refused.
#[inline(never)]
pub fn dropped(ctx: &TcContext, event: &mut FlowEvent, verdict: u16) -> i32 {
    let length = ctx.len();
    if config::is_dry_run() {
        explanation::record(event, verdict, length);
        return DROP;
    }
    #[cfg(feature = "trace")]
    aya_log_ebpf::debug!(
        ctx,
        "drop {} endpoint {} network {}",
        verdict,
        event.endpoint,
        event.network
    );
    let key = DropKey {
        endpoint: event.endpoint,
        verdict,
        direction: event.direction,
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
    event::dropped(event, verdict, length);
    DROP
}
