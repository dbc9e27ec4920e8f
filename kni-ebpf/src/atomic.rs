//! Atomic operations that return the old value (Linux 5.12), which rustc does not offer for this target.

/// Sets bits of a word and returns the word before. Ordered after everything before it and before everything after it.
///
/// # Safety
///
/// `word` is aligned to eight bytes and stays mapped.
#[inline(always)]
pub(crate) unsafe fn fetch_or(word: *mut u64, bits: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    {
        let mut value = bits;
        // SAFETY: by the caller. The instruction names the registers that it uses.
        unsafe {
            core::arch::asm!(
                "{value} = atomic_fetch_or((u64 *)({word} + 0), {value})",
                value = inout(reg) value,
                word = in(reg) word,
            );
        }
        value
    }
    #[cfg(not(target_arch = "bpf"))]
    // SAFETY: by the caller.
    unsafe {
        core::sync::atomic::AtomicU64::from_ptr(word).fetch_or(bits, core::sync::atomic::Ordering::SeqCst)
    }
}

/// Keeps the bits of `mask` in a word and returns the word before. Ordered like [`fetch_or`].
///
/// # Safety
///
/// As [`fetch_or`].
#[inline(always)]
pub(crate) unsafe fn fetch_and(word: *mut u64, mask: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    {
        let mut value = mask;
        // SAFETY: as in `fetch_or`.
        unsafe {
            core::arch::asm!(
                "{value} = atomic_fetch_and((u64 *)({word} + 0), {value})",
                value = inout(reg) value,
                word = in(reg) word,
            );
        }
        value
    }
    #[cfg(not(target_arch = "bpf"))]
    // SAFETY: by the caller.
    unsafe {
        core::sync::atomic::AtomicU64::from_ptr(word).fetch_and(mask, core::sync::atomic::Ordering::SeqCst)
    }
}

/// Writes `new` to a word that is `expected`, and returns the word before: `expected` where it was written. Ordered
/// like [`fetch_or`].
///
/// # Safety
///
/// As [`fetch_or`].
#[inline(always)]
pub(crate) unsafe fn compare_exchange(word: *mut u64, expected: u64, new: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    {
        let mut value = expected;
        // SAFETY: as in `fetch_or`.
        unsafe {
            core::arch::asm!(
                "r0 = cmpxchg_64({word} + 0, r0, {new})",
                word = in(reg) word,
                new = in(reg) new,
                inout("r0") value,
            );
        }
        value
    }
    #[cfg(not(target_arch = "bpf"))]
    {
        use core::sync::atomic::{AtomicU64, Ordering};
        // SAFETY: by the caller.
        let word = unsafe { AtomicU64::from_ptr(word) };
        match word.compare_exchange(expected, new, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(before) | Err(before) => before,
        }
    }
}
