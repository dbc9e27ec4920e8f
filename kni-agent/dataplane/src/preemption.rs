//! Refuses kernels on which programs interrupt each other on one CPU.

use std::fs;

use super::DataplaneError;

/// The file that contains `1` in a kernel with `CONFIG_PREEMPT_RT`.
const REALTIME: &str = "/sys/kernel/realtime";
/// The kernel's version with its options.
const VERSION: &str = "/proc/sys/kernel/version";

/// Fails on a kernel with `PREEMPT_RT`. The programs keep what they know about a packet in one row per CPU, which is
/// right because softirqs of one CPU never interrupt each other; with `PREEMPT_RT` they may (Linux 6.18, without
/// `CONFIG_PREEMPT_RT_NEEDS_BH_LOCK`), and a packet would be evaluated by another one's addresses.
pub(super) fn check() -> Result<(), DataplaneError> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    if is_realtime(&read(REALTIME), &read(VERSION)) {
        return Err(DataplaneError::Kernel(
            "PREEMPT_RT is not supported: packets on one CPU could interrupt each other inside the programs; boot a kernel \
             without CONFIG_PREEMPT_RT"
                .into(),
        ));
    }
    Ok(())
}

fn is_realtime(realtime: &str, version: &str) -> bool {
    realtime.trim() == "1" || version.split_whitespace().any(|word| word == "PREEMPT_RT")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_for_real_time_is_recognised() {
        assert!(is_realtime("1\n", ""));
        assert!(is_realtime("", "#1 SMP PREEMPT_RT Debian 6.12.48-1 (2025-09-20)"));
        assert!(!is_realtime(
            "0\n",
            "#1 SMP PREEMPT_DYNAMIC Debian 6.12.48-1 (2025-09-20)"
        ));
        assert!(!is_realtime("", ""));
        assert!(check().is_ok(), "the kernel of the tests");
    }
}
