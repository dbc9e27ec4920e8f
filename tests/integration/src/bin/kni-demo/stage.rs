//! Prepares the machine, runs the agent, and restores the machine.

use std::{
    fs::{self, File},
    os::unix::{net::UnixStream, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use kni_integration::{
    Manifest, Namespaces, NodeSnapshot, Pod,
    agent::{KUBELET_SOCKET, SOCKET, cleanup},
};
use nix::{
    mount::{MsFlags, mount, umount},
    sys::{
        signal::{Signal, kill},
        statfs::{BPF_FS_MAGIC, statfs},
    },
    unistd::Pid,
};
use tempfile::TempDir;

use crate::progress::{part, print_line};

const BPFFS: &str = "/sys/fs/bpf";
/// The port of the servers in the pods.
pub(crate) const PORT: u16 = 8080;
const START_TIMEOUT: Duration = Duration::from_secs(20);
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
const REST_TIMEOUT: Duration = Duration::from_secs(15);

/// The machine, with its state before the demo.
pub(crate) struct Stage {
    /// The machine's own namespaces.
    pub(crate) node: Namespaces,
    agent: PathBuf,
    knictl: PathBuf,
    /// Manifests and log.
    folder: TempDir,
    child: Option<Child>,
    before: NodeSnapshot,
    mounted_bpffs: bool,
}

impl Stage {
    /// Fails if an agent is running; removes leftovers of an earlier demo, then records the state of the machine.
    pub(crate) fn prepare(agent: &Path, knictl: &Path) -> Result<Self> {
        part("Preparing");
        let node = Namespaces::current("this machine")?;
        for socket in [SOCKET, KUBELET_SOCKET] {
            let served = UnixStream::connect(socket).is_ok();
            ensure!(
                !served,
                "an agent already runs and serves {socket}; stop it first, the demo needs the node for itself"
            );
        }
        let agent = fs::canonicalize(agent).with_context(|| agent.display().to_string())?;
        let knictl = fs::canonicalize(knictl).with_context(|| knictl.display().to_string())?;
        if Path::new("/run/kni").exists() || Path::new(BPFFS).join("kni").exists() {
            print_line("removing what an earlier agent left");
            succeed(&cleanup(&node, &agent)?, "kni-agent cleanup")?;
        }
        let before = NodeSnapshot::take(&node)?;
        let folder = tempfile::Builder::new().prefix("kni-demo-").tempdir()?;
        let mut stage = Self {
            node,
            agent,
            knictl,
            folder,
            child: None,
            before,
            mounted_bpffs: false,
        };
        Manifest::write_all(&Manifest::overlapping(), &stage.node, &stage.manifests())?;
        // Last, so that no failure before leaves it mounted.
        stage.mount_bpffs()?;
        print_line("networks: default 10.244.0.0/16 fd00:244::/64; blue and red, both 10.10.0.0/16 fd10::/64");
        Ok(stage)
    }

    fn mount_bpffs(&mut self) -> Result<()> {
        if statfs(BPFFS).is_ok_and(|fs| fs.filesystem_type() == BPF_FS_MAGIC) {
            return Ok(());
        }
        print_line(format!("no bpffs on {BPFFS}: mounting one for the time of the demo"));
        mount(Some("bpf"), BPFFS, Some("bpf"), MsFlags::empty(), None::<&str>).context("mount bpffs")?;
        self.mounted_bpffs = true;
        Ok(())
    }

    fn manifests(&self) -> PathBuf {
        self.folder.path().join("manifests")
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("kni-agent.log")
    }

    /// Starts the agent and waits until it is ready.
    pub(crate) fn start_agent(&mut self) -> Result<()> {
        part("Starting the agent");
        let log = File::create(self.log())?;
        let mut command = Command::new(&self.agent);
        command.arg("--standalone").arg("--manifests").arg(self.manifests());
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // Ctrl-C is for the demo, which then stops the agent gracefully.
        command.process_group(0);
        let began = Instant::now();
        let child = self
            .child
            .insert(command.spawn().with_context(|| self.agent.display().to_string())?);
        let pid = child.id();
        while began.elapsed() < START_TIMEOUT {
            if let Some(status) = self.child.as_mut().map(Child::try_wait).transpose()?.flatten() {
                bail!("the agent ended at once: {status}");
            }
            let log = fs::read_to_string(self.log())?;
            if let Some(line) = log.lines().find(|line| line.starts_with("kni-agent: serving on")) {
                print_line(format!("{line} (pid {pid}, after {} ms)", began.elapsed().as_millis()));
                return Ok(());
            }
            thread::sleep(Duration::from_millis(10));
        }
        bail!("the agent does not serve after {START_TIMEOUT:?}")
    }

    /// Runs knictl and shows its output.
    pub(crate) fn knictl(&self, args: &[&str]) -> Result<()> {
        print_line(format!("$ knictl {}", args.join(" ")));
        let out = Command::new(&self.knictl).args(args).output()?;
        print_line(String::from_utf8_lossy(&out.stdout));
        succeed(&out, &format!("knictl {}", args.join(" ")))
    }

    /// Prints the end of the agent's log.
    pub(crate) fn print_log(&self) {
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        let skipped = log.lines().count().saturating_sub(40);
        print_line("the end of the agent's log:");
        print_line(log.lines().skip(skipped).collect::<Vec<_>>().join("\n"));
    }

    /// Stops the agent, removes everything it created, and compares the machine with its initial state. Continues after
    /// failures.
    pub(crate) fn remove(mut self) -> Result<()> {
        part("Removing everything");
        let stopped = self.stop_agent();
        let cleaned = cleanup(&self.node, &self.agent).and_then(|out| {
            print_line(String::from_utf8_lossy(&out.stdout));
            succeed(&out, "kni-agent cleanup")
        });
        let unmounted = if self.mounted_bpffs {
            umount(BPFFS).context("unmount bpffs")
        } else {
            Ok(())
        };
        let differences = self.before.differences_within(&self.node, REST_TIMEOUT)?;
        if differences.is_empty() {
            print_line(
                "node is as before: links, addresses, routes, rules, neighbours, namespaces, mounts, files, pins,",
            );
            print_line("programs, nftables rules and sysctls are equal");
        } else {
            print_line("node is NOT as before (- was there, + is new):");
            print_line(differences.join("\n"));
        }
        stopped.and(cleaned).and(unmounted)?;
        ensure!(
            differences.is_empty(),
            "the node is not as before: {} differences",
            differences.len()
        );
        Ok(())
    }

    fn stop_agent(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else {
            return Ok(());
        };
        // The signal fails if it has already exited; the wait below reports that.
        kill(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGTERM).unwrap_or_default();
        let began = Instant::now();
        while began.elapsed() < STOP_TIMEOUT {
            if let Some(status) = child.try_wait()? {
                print_line(format!("the agent stopped: {status}"));
                ensure!(status.success(), "the agent ended with {status}");
                return Ok(());
            }
            thread::sleep(Duration::from_millis(10));
        }
        child.kill()?;
        child.wait()?;
        bail!("the agent did not stop within {STOP_TIMEOUT:?} and was killed")
    }

    /// Leaves everything as it is, and prints how to use it.
    pub(crate) fn leave(self, pods: &[Pod]) {
        let pid = self.child.as_ref().map_or(0, Child::id);
        let (agent, knictl) = (self.agent.display(), self.knictl.display());
        let log = self.log();
        let unmount = if self.mounted_bpffs {
            format!("; umount {BPFFS}")
        } else {
            String::new()
        };
        let folder = self.folder.keep();
        part("Left running; try this");
        for command in [
            "status",
            "networks",
            "interfaces -o wide",
            "interfaces -o yaml",
            "drops --follow",
            "maps",
        ] {
            print_line(format!("{knictl} {command}"));
        }
        for pod in pods.iter().filter(|pod| pod.name.ends_with("-1")) {
            let name = pod.netns.file_name().unwrap_or_default().to_string_lossy();
            print_line(format!(
                "ip netns exec {name} ping -c 3 10.10.0.12      # inside {}",
                pod.name
            ));
        }
        print_line("bpftool net");
        print_line(format!(
            "for map in {BPFFS}/kni/v*/*; do echo $map; bpftool map dump pinned $map; done"
        ));
        print_line(format!("tail -f {}", log.display()));
        print_line(format!("edit or add a network: {}", folder.join("manifests").display()));
        part("Remove it with");
        print_line(format!(
            "kill {pid}; sleep 1; {agent} cleanup{unmount}; rm -r {}",
            folder.display()
        ));
    }
}

fn succeed(out: &std::process::Output, what: &str) -> Result<()> {
    let stderr = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "{what}: {}: {}", out.status, stderr.trim());
    Ok(())
}
