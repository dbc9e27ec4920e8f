//! Measures the duration of sequential and concurrent calls.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};

use super::Pattern;

/// Durations in milliseconds.
#[derive(Debug, Default)]
pub(crate) struct Timings {
    /// The time for creating the namespace within each attachment, if it is created.
    pub(crate) create: Vec<f64>,
    /// Each attachment.
    pub(crate) attach: Vec<f64>,
    /// From the start of the first to the end of the last attachment.
    pub(crate) all_attached: f64,
    /// The time for removing the namespace within each detachment, if it is removed.
    pub(crate) delete: Vec<f64>,
    /// Each detachment.
    pub(crate) detach: Vec<f64>,
    /// From the start of the first to the end of the last detachment.
    pub(crate) all_detached: f64,
    /// A call each about a pod that the server does not know, at the same intervals: what client, connection and server
    /// need for a call that does nothing. Attaching and detaching take two calls each.
    pub(crate) idle_call: Vec<f64>,
}

/// Converts a duration to milliseconds.
pub(crate) fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Calls `work` for every item in the given pattern; returns the results, the duration of each call and the total.
pub(crate) fn timed<T: Send, R: Send>(
    pattern: Pattern,
    items: Vec<T>,
    work: impl Fn(T) -> Result<R> + Sync,
) -> Result<(Vec<R>, Vec<f64>, f64)> {
    let start = Instant::now();
    let one = |item| -> Result<(R, f64)> {
        let start = Instant::now();
        let result = work(item)?;
        Ok((result, milliseconds(start.elapsed())))
    };
    let done: Vec<(R, f64)> = match pattern {
        Pattern::Burst(_) => thread::scope(|scope| {
            let one = &one;
            let calls: Vec<_> = items.into_iter().map(|item| scope.spawn(move || one(item))).collect();
            let join = |call: thread::ScopedJoinHandle<'_, Result<(R, f64)>>| {
                call.join().map_err(|_panic| anyhow!("a call panicked"))?
            };
            calls.into_iter().map(join).collect::<Result<_>>()
        })?,
        Pattern::Sequence(_) => items.into_iter().map(one).collect::<Result<_>>()?,
        Pattern::Spaced(_, pause) => items
            .into_iter()
            .map(|item| {
                thread::sleep(pause);
                one(item)
            })
            .collect::<Result<_>>()?,
    };
    let all = milliseconds(start.elapsed());
    let (results, times) = done.into_iter().unzip();
    Ok((results, times, all))
}
