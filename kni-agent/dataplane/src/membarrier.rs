//! Waits for running programs to end.

use std::io;

use super::bpf::nested::NestedMap;

/// Returns when every program that ran at the call has ended: `MEMBARRIER_CMD_GLOBAL` waits for a grace period of RCU
/// (`kernel/sched/membarrier.c`), and network programs run inside RCU read sections. 8 ms on two CPUs.
///
/// A kernel with `nohz_full` CPUs lacks the command. There this replaces an entry of a map of maps, for which the
/// kernel waits in the same way (`maybe_wait_bpf_programs`, Linux 4.20).
pub(super) fn wait_for_programs() {
    // SAFETY: the call takes numbers alone.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if result < 0
        && let Err(error) = wait_by_map()
    {
        tracing::error!(%error, "cannot wait for running programs: rows that they use are removed meanwhile");
    }
}

fn wait_by_map() -> io::Result<()> {
    NestedMap::new()?.replace()
}

#[cfg(test)]
mod tests {
    use std::{
        thread,
        time::{Duration, Instant},
    };

    use super::*;

    fn best_of(mut work: impl FnMut()) -> Duration {
        let once = |_| {
            let begun = Instant::now();
            work();
            begun.elapsed()
        };
        (0..20).map(once).min().unwrap()
    }

    /// A grace period takes at least a context switch of every CPU, an update of any other map takes a microsecond.
    #[test]
    fn the_replacement_waits_for_a_grace_period_too() {
        let nested = NestedMap::new().unwrap();
        let others = thread::available_parallelism().map_or(1, usize::from) > 1;
        let waited = best_of(|| nested.replace().unwrap());
        let written = best_of(|| nested.write_inner().unwrap());
        println!("map of maps: {waited:?}, plain map: {written:?}");
        assert!(!others || waited > 20 * written, "{waited:?} beside {written:?}");
    }
}
