//! Takes the time of calls that come one by one or all at once.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};

use super::Pattern;

/// Milliseconds.
#[derive(Debug, Default)]
pub(crate) struct Timings {
    /// The part of each attach in which the namespace is made, where there is one.
    pub(crate) create: Vec<f64>,
    /// Each attach.
    pub(crate) attach: Vec<f64>,
    /// From the first one's start to the last one's end.
    pub(crate) all_attached: f64,
    /// Each detach.
    pub(crate) detach: Vec<f64>,
    /// As for attach.
    pub(crate) all_detached: f64,
}

/// Milliseconds of a duration.
pub(crate) fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Calls `work` for every item in the given pattern: what each returned, how long each took, how long all took.
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
