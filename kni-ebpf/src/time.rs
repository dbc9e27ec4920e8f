//! Reads the kernel's coarse time.

use aya_ebpf::helpers::bpf_jiffies64;

/// jiffies: inlined by the kernel, 2 ns.
#[inline(always)]
pub fn jiffies() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_jiffies64() }
}
