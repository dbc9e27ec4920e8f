//! Makes the machine slower for repeated tests: busy loops on its CPUs, and a control group with a share of them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{self, Child, Command, Stdio},
    thread,
};

use anyhow::{Context, Result};

/// A loop that ends by itself soon after this process has ended.
const LOOP: &str = "while kill -0 \"$1\" 2>/dev/null; do i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; done";
/// The period in which a group gets its share: short, so that it is slow and does not stand still.
const PERIOD_MICROSECONDS: u64 = 10_000;

/// Busy loops, which end when it is dropped.
pub(super) struct Load {
    loops: Vec<Child>,
}

impl Load {
    /// Starts `count` busy loops, each on the next CPU.
    pub(super) fn start(count: usize) -> Result<Self> {
        let cpus = cpus();
        let mut load = Self { loops: Vec::new() };
        for number in 0..count {
            let busy = Command::new("taskset")
                .args(["--cpu-list", &(number % cpus).to_string(), "sh", "-c", LOOP, "sh"])
                .arg(process::id().to_string())
                .stdin(Stdio::null())
                .spawn()
                .context("cannot run taskset")?;
            load.loops.push(busy);
        }
        Ok(load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for busy in &mut self.loops {
            // One that has ended already needs no end.
            busy.kill().unwrap_or_default();
            drop(busy.wait());
        }
    }
}

/// A control group in which this process and all that it starts have a part of the CPUs, until it is dropped.
///
/// Processes that tests move into groups of their own, such as the pods of a kubelet, leave it.
pub(super) struct Speed {
    group: PathBuf,
    before: PathBuf,
}

impl Speed {
    /// Restricts this process to `percent` of all CPUs.
    pub(super) fn restrict(percent: u8) -> Result<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").context("cannot read the own control group")?;
        let root = Path::new("/sys/fs/cgroup");
        let is_unified = root.join("cgroup.controllers").is_file();
        let root = if is_unified { root.to_owned() } else { root.join("cpu") };
        let before = root.join(own_group(&own, is_unified).context("this process has no control group")?);
        let group = root.join(format!("kni-test-speed-{}", process::id()));
        if is_unified {
            set(&root, "cgroup.subtree_control", "+cpu")?;
        }
        fs::create_dir_all(&group).with_context(|| format!("cannot create {}", group.display()))?;
        let speed = Self { group, before };
        let cpus = u64::try_from(cpus()).unwrap_or(1);
        let quota = PERIOD_MICROSECONDS * cpus * u64::from(percent) / 100;
        if is_unified {
            set(&speed.group, "cpu.max", &format!("{quota} {PERIOD_MICROSECONDS}"))?;
        } else {
            set(&speed.group, "cpu.cfs_period_us", &PERIOD_MICROSECONDS.to_string())?;
            set(&speed.group, "cpu.cfs_quota_us", &quota.to_string())?;
        }
        set(&speed.group, "cgroup.procs", &process::id().to_string())?;
        Ok(speed)
    }
}

impl Drop for Speed {
    fn drop(&mut self) {
        // The group remains if something that a test left is still in it.
        set(&self.before, "cgroup.procs", &process::id().to_string()).unwrap_or_default();
        fs::remove_dir(&self.group).unwrap_or_default();
    }
}

/// The own group below the root, from the text of `/proc/self/cgroup`.
fn own_group(text: &str, is_unified: bool) -> Option<&str> {
    text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, fields.next()?);
        let is_it = if is_unified {
            controllers.is_empty()
        } else {
            controllers.split(',').any(|controller| controller == "cpu")
        };
        is_it.then(|| group.trim_start_matches('/'))
    })
}

fn set(group: &Path, file: &str, value: &str) -> Result<()> {
    let path = group.join(file);
    fs::write(&path, value).with_context(|| format!("cannot write {value:?} into {}", path.display()))
}

fn cpus() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_group_is_found() {
        assert_eq!(own_group("0::/user/a\n", true), Some("user/a"));
        let old = "5:memory:/x\n4:cpu,cpuacct:/y/z\n0::/\n";
        assert_eq!(own_group(old, false), Some("y/z"));
        assert_eq!(own_group(old, true), Some(""));
        assert_eq!(own_group("5:cpuset:/x\n", false), None);
    }

    #[test]
    fn loops_end_with_their_owner() {
        let load = Load::start(1).unwrap();
        let id = load.loops.first().unwrap().id();
        assert!(Path::new(&format!("/proc/{id}")).exists());
        drop(load);
        assert!(!Path::new(&format!("/proc/{id}")).exists());
    }
}
