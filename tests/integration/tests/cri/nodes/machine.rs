//! Captures the state of the machine, so that a test can prove that a cluster left nothing.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Namespaces, NodeSnapshot};

/// Settings of the whole machine that kubelets and kube-proxies like to change.
const SYSCTLS: [&str; 8] = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "net/netfilter/nf_conntrack_max",
    "net/core/somaxconn",
];

/// What a cluster could leave on the machine, by kind.
pub(crate) struct MachineState {
    /// Links, addresses, routes, rules, nftables rules, bpffs, sysctls of the network, and all eBPF objects.
    network: NodeSnapshot,
    /// Other lines.
    lines: BTreeSet<String>,
}

impl MachineState {
    /// The current state.
    pub(crate) fn take() -> Result<Self> {
        let network = NodeSnapshot::take_with_all_bpf(&Namespaces::current("machine")?)?;
        Ok(Self {
            network,
            lines: lines()?,
        })
    }

    /// Fails unless the machine is in this state within 30 seconds: processes and namespaces end in the background.
    pub(crate) fn is_restored(&self, when: &str) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let now = Self::take()?;
            let mut differences = NodeSnapshot::diff(&self.network, &now.network);
            differences.extend(now.lines.difference(&self.lines).map(|line| format!("+ {line}")));
            differences.extend(self.lines.difference(&now.lines).map(|line| format!("- {line}")));
            if differences.is_empty() {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "the machine is not as before {when}:\n{}",
                differences.join("\n")
            );
            thread::sleep(Duration::from_millis(200));
        }
    }

    /// Fails unless something of `kind` was added since this state: the comparison can see it.
    pub(crate) fn sees_new(&self, kind: &str) -> Result<()> {
        let now = lines()?;
        let mut added = now.difference(&self.lines);
        ensure!(
            added.any(|line| line.starts_with(kind)),
            "a running cluster adds no {kind}"
        );
        Ok(())
    }
}

fn lines() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("mounts")?;
    for line in mounts.lines() {
        // The number of the mount and of its parent.
        let words: Vec<&str> = line.split(' ').skip(2).collect();
        found.insert(format!("mount {}", words.join(" ")));
        let mut words = words.iter();
        let at = words.nth(2).copied().unwrap_or_default();
        if line.contains(" - cgroup") {
            found.extend(groups(Path::new(at)));
        }
    }
    for name in SYSCTLS {
        let value = fs::read_to_string(Path::new("/proc/sys").join(name)).unwrap_or_default();
        found.insert(format!("sysctl {name} = {}", value.trim()));
    }
    found.extend(processes()?);
    Ok(found)
}

/// Control groups of nodes. Other programs of the machine may have groups of their own.
fn groups(root: &Path) -> Vec<String> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path().display().to_string());
    paths
        .filter(|path| path.contains("kni-node-"))
        .map(|path| format!("cgroup {path}"))
        .collect()
}

/// Processes in other namespaces than this one, and the namespaces. Ended ones have neither.
fn processes() -> Result<Vec<String>> {
    let mut found = Vec::new();
    let own = ["net", "mnt"].map(|kind| fs::read_link(format!("/proc/self/ns/{kind}")).ok());
    for entry in fs::read_dir("/proc").context("processes")?.flatten() {
        let folder = entry.path();
        for (kind, own) in ["net", "mnt"].iter().zip(&own) {
            let Ok(namespace) = fs::read_link(folder.join("ns").join(kind)) else {
                continue;
            };
            if Some(&namespace) != own.as_ref() {
                let name = fs::read_to_string(folder.join("comm")).unwrap_or_default();
                found.push(format!("process {} {}", folder.display(), name.trim()));
                found.push(format!("namespace {}", namespace.display()));
            }
        }
    }
    Ok(found)
}
