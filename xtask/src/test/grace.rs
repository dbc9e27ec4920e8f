//! Shortens the grace periods of the kernel's RCU while tests run.
//!
//! All nodes of the tests share the kernel's RTNL mutex. The kernel attaches and removes each TCX program with a grace
//! period inside it (`tcx_entry_sync`, include/net/tcx.h): 7 to 17 ms, which a node pays for each pod and twenty nodes
//! on one machine pay together. Expedited grace periods (`rcupdate.rcu_expedited` of
//! Documentation/admin-guide/kernel-parameters.txt) take 0.04 ms and change nothing else; with them the kernel works a
//! quarter less in the same tests.

use std::{
    fs,
    os::unix::process::CommandExt as _,
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result};

const SETTING: &str = "/sys/kernel/rcu_expedited";
/// Restores the setting, its argument, when its stdin ends: with the process that holds the other end, whatever ends
/// that.
const RESTORE: &str = "read line; echo 0 > \"$0\"";

/// Expedited grace periods, until it is dropped or the process ends.
pub(super) struct Expedited {
    /// `None` if it was set before, or cannot be set.
    restore: Option<Child>,
}

impl Expedited {
    /// Sets it. Without the privilege, or in a kernel without the setting, grace periods stay as they are.
    pub(super) fn begin() -> Result<Self> {
        let is_set = fs::read_to_string(SETTING).is_ok_and(|value| value.trim() != "0");
        if is_set || fs::write(SETTING, "1").is_err() {
            return Ok(Self { restore: None });
        }
        let mut command = Command::new("sh");
        // An interrupt from the keyboard must not end it.
        command
            .args(["-c", RESTORE, SETTING])
            .stdin(Stdio::piped())
            .process_group(0);
        let restore = command.spawn().context("cannot run sh")?;
        Ok(Self { restore: Some(restore) })
    }
}

impl Drop for Expedited {
    fn drop(&mut self) {
        if let Some(restore) = &mut self.restore {
            drop(restore.stdin.take());
            drop(restore.wait());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_is_as_before_afterwards() {
        let value = || fs::read_to_string(SETTING).ok();
        let before = value();
        drop(Expedited::begin().unwrap());
        assert_eq!(value(), before);
    }
}
