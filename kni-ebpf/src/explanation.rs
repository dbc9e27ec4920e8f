//! Publishes the outcome of a dry run in the map `EXPLANATION`.

use kni_common::event::FlowEvent;

use crate::{maps::EXPLANATION, time};

/// Stores the event as the outcome of a dry run. A later call in the same run replaces an earlier one.
///
/// VERIFIER: returns a number for the same reason as `count::dropped`.
#[inline(never)]
pub fn record(event: &mut FlowEvent, verdict: u16, length: u32) -> i32 {
    event.verdict = verdict;
    event.length = length;
    if let Some(row) = EXPLANATION.get_ptr_mut(0) {
        // SAFETY: the agent runs one dry run at a time.
        let row = unsafe { &mut *row };
        row.event = *event;
        row.jiffies = time::jiffies();
    }
    0
}
