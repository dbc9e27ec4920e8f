//! Reports the kernel's time to the agent, in the unit of the rows of flows.
//!
//! - Hook: none. The agent runs it with `BPF_PROG_TEST_RUN` on a frame that it throws away.
//! - Writes jiffies into the first eight bytes of the frame, in the byte order of the node.

use aya_ebpf::{
    bindings::{TC_ACT_OK, TC_ACT_SHOT},
    programs::TcContext,
};

use crate::time;

/// [`TC_ACT_SHOT`] if the frame has no room for the time.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    match ctx.store(0, &time::jiffies(), 0) {
        Ok(()) => TC_ACT_OK,
        Err(_) => TC_ACT_SHOT,
    }
}
