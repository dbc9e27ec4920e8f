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
    use std::thread;

    use super::{
        super::bpf::slow::{Progress, SlowProgram},
        *,
    };

    /// Calls `work` while the program runs, and returns the program's progress after it.
    fn progress_after(program: &SlowProgram, work: impl FnOnce()) -> Progress {
        program.reset().unwrap();
        thread::scope(|scope| {
            let run = scope.spawn(|| program.run().unwrap());
            while program.progress().unwrap() == Progress::NotBegun && !run.is_finished() {
                thread::yield_now();
            }
            work();
            let progress = program.progress().unwrap();
            run.join().unwrap();
            progress
        })
    }

    fn outlasts_programs(wait: impl Fn()) {
        let program = SlowProgram::load().unwrap();
        for attempt in 0..20 {
            let progress = progress_after(&program, &wait);
            assert_eq!(progress, Progress::Ended, "attempt {attempt}");
        }
    }

    #[test]
    fn the_wait_outlasts_running_programs() {
        outlasts_programs(wait_for_programs);
    }

    #[test]
    fn the_replacement_outlasts_running_programs_too() {
        outlasts_programs(|| wait_by_map().unwrap());
    }

    /// Without it the two tests above would prove nothing. On a single CPU a program is rarely seen before its end.
    #[test]
    fn no_wait_meets_the_program_while_it_runs() {
        let program = SlowProgram::load().unwrap();
        let meets = || progress_after(&program, || ()) == Progress::Runs;
        let several = thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1);
        assert!(!several || (0..1000).any(|_| meets()));
    }
}
