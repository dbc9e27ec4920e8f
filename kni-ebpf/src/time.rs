//! Reads the kernel's coarse time.

use aya_ebpf::helpers::bpf_jiffies64;

/// jiffies: inlined by the kernel, 2 ns.
#[inline(always)]
pub fn jiffies() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_jiffies64() }
}

/// The low 32 bits of [`jiffies`], which is what rows of flows hold.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the low 32 bits")]
pub fn now() -> u32 {
    jiffies() as u32
}
