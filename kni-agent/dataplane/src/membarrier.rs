//! Waits for running programs to end.

use std::{thread, time::Duration};

/// The wait where the kernel lacks the command: thousands of times the run time of a program.
const FALLBACK: Duration = Duration::from_millis(50);

/// Returns when every program that ran at the call has ended: `MEMBARRIER_CMD_GLOBAL` waits for a grace period of RCU
/// (`kernel/sched/membarrier.c`), and network programs run inside RCU read sections. 8 ms on two CPUs. A kernel with
/// `nohz_full` CPUs lacks the command: there this waits for a fixed time.
pub(super) fn wait_for_programs() {
    // SAFETY: the call takes numbers alone.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if result < 0 {
        thread::sleep(FALLBACK);
    }
}
