//! Runs the virtual machine until it powers off or times out.

use std::{
    fs::File,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// A machine that still runs after this time hangs. Several share the CPUs.
const TIMEOUT: Duration = Duration::from_mins(8);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Boots `kernel` with `initrd` and waits until it exits; the serial console is written to the file `log`.
pub(super) fn boot(kernel: &Path, initrd: &Path, log: &Path) -> Result<()> {
    let console = File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
    let errors = console.try_clone().context("cannot share the log")?;
    let mut qemu = Command::new("qemu-system-x86_64");
    // Software emulation, explicitly: kernels may hang with /dev/kvm inside another virtual machine.
    qemu.args([
        "-accel",
        "tcg",
        // Emulated, this instruction sometimes leaves wrong flags behind, and the kernel's allocator uses it
        // everywhere.
        "-cpu",
        "qemu64,-cx16",
        "-m",
        "1024",
        "-nographic",
        "-no-reboot",
        "-nic",
        "none",
    ])
    .arg("-kernel")
    .arg(kernel)
    .arg("-initrd")
    .arg(initrd)
    .args(["-append", "console=ttyS0 panic=-1"])
    .stdin(Stdio::null())
    .stdout(console)
    .stderr(errors);
    let machine = Machine(
        qemu.spawn()
            .context("cannot run qemu-system-x86_64 (package qemu-system-x86)")?,
    );
    machine.wait()
}

/// A running machine; killed on drop.
struct Machine(Child);

impl Machine {
    fn wait(mut self) -> Result<()> {
        let start = Instant::now();
        while start.elapsed() < TIMEOUT {
            if let Some(status) = self.0.try_wait().context("cannot wait for the machine")? {
                if status.success() {
                    return Ok(());
                }
                bail!("qemu failed ({status})");
            }
            thread::sleep(POLL_INTERVAL);
        }
        bail!("the machine did not power off within {} s", TIMEOUT.as_secs())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Both fail only if it has already exited.
        self.0.kill().unwrap_or_default();
        drop(self.0.wait());
    }
}
