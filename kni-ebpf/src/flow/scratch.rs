//! Scratch memory for rows under construction and for keys.

use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};
use kni_common::flow::{FlowKey6, FlowValue};

/// The rows of a translated flow, or the row of another one.
///
/// VERIFIER: in a per-CPU row instead of the stack, which has 512 bytes for the whole call chain.
#[repr(C)]
pub struct Rows {
    /// Of the packet's own direction.
    pub own: FlowValue,
    /// Of the opposite direction.
    pub reply: FlowValue,
    /// The key of the next access to `FLOWS6`.
    pub(super) key6: FlowKey6,
}

/// One row per CPU. Not pinned: only the programs use it.
#[btf_map]
static ROWS: PerCpuArray<Rows, 1> = PerCpuArray::new();

/// This CPU's rows, with the content of their last use.
#[inline(always)]
pub fn rows() -> Option<&'static mut Rows> {
    let rows = ROWS.get_ptr_mut(0)?;
    // SAFETY: this CPU's row, and none of our programs interrupts another one on the same CPU.
    Some(unsafe { &mut *rows })
}
