//! Proves that a cluster left nothing on the machine.
//!
//! Only what is of the cluster counts: its processes, control groups, namespaces and eBPF objects by their identity,
//! and changes of the machine itself that name something of it. Other programs of the machine, such as other tests,
//! start and end meanwhile.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Namespaces, NodeSnapshot, eventually_sync, patience};
use serde_json::Value;

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
/// Parts of the names of what a cluster makes.
const OURS: [&str; 4] = ["kni", "kube", "cni", "containerd"];
/// Links that also others have.
const COMMON: [&str; 2] = ["lo", "eth0"];

/// The machine before a cluster, and what the cluster had on it since.
pub(crate) struct MachineState {
    /// Links, addresses, routes, rules, nftables rules, bpffs, sysctls of the network.
    network: NodeSnapshot,
    /// Mounts and sysctls.
    lines: BTreeSet<String>,
    seen: Seen,
}

/// What a cluster has on the machine.
#[derive(Debug, Default)]
struct Seen {
    /// The parts of the names of control groups.
    groups: BTreeSet<String>,
    processes: BTreeSet<Process>,
    /// Of eBPF objects the kernel never uses a number twice.
    bpf: BTreeSet<(&'static str, u64)>,
    /// Words that name something of the cluster.
    words: BTreeSet<String>,
}

/// A process by its number and the time of its start, as numbers are used again.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Process {
    id: u32,
    start: String,
    name: String,
}

impl MachineState {
    /// The state without a cluster.
    pub(crate) fn take() -> Result<Self> {
        Ok(Self {
            network: NodeSnapshot::take(&Namespaces::current("machine")?)?,
            lines: lines()?,
            seen: Seen::default(),
        })
    }

    /// Notes what the cluster of this owner has now. Fails if a kind of it is missing: the comparison could not see it.
    pub(crate) fn observe(&mut self, owner: i32, folder: &Path) -> Result<()> {
        let owner = u32::try_from(owner)?;
        let group = format!("kni-node-{owner}-");
        let (processes, namespaces) = processes_of(owner, &group)?;
        let bpf = bpf_of(&processes)?;
        ensure!(!groups(&group)?.is_empty(), "a running cluster has no control group");
        ensure!(processes.len() > 10, "a running cluster has processes: {processes:?}");
        ensure!(
            namespaces.iter().any(|(kind, ..)| *kind == "net") && namespaces.iter().any(|(kind, ..)| *kind == "mnt"),
            "a running cluster has no namespaces of its own"
        );
        for (kind, _, of) in namespaces.iter().filter(|(kind, ..)| *kind == "net") {
            self.seen
                .words
                .extend(links(*of).with_context(|| format!("links of {kind}"))?);
        }
        self.seen.groups.insert(group);
        self.seen.processes.extend(processes);
        self.seen.bpf.extend(bpf);
        self.seen.words.insert(folder.display().to_string());
        Ok(())
    }

    /// How many eBPF objects were seen.
    pub(crate) fn bpf_objects(&self) -> usize {
        self.seen.bpf.len()
    }

    /// Fails unless nothing of the cluster is left: processes and namespaces end in the background.
    pub(crate) fn is_restored(&self, when: &str) -> Result<()> {
        let restored = eventually_sync(patience(), || {
            let left = self.left()?;
            ensure!(left.is_empty(), "left on the machine:\n{}", left.join("\n"));
            Ok(())
        });
        restored.with_context(|| format!("the machine {when}"))
    }

    fn left(&self) -> Result<Vec<String>> {
        let mut left = Vec::new();
        for group in &self.seen.groups {
            left.extend(groups(group)?.into_iter().map(|path| format!("cgroup {path}")));
        }
        let alive = self.seen.processes.iter().filter(|process| process.is_alive());
        left.extend(alive.map(|process| format!("{process:?}")));
        let now: BTreeSet<_> = bpf_ids()?.into_iter().collect();
        left.extend(
            self.seen
                .bpf
                .intersection(&now)
                .map(|(kind, id)| format!("{kind} {id}")),
        );
        let network = NodeSnapshot::take(&Namespaces::current("machine")?)?;
        let (lines, mut changes) = (lines()?, NodeSnapshot::diff(&self.network, &network));
        changes.extend(lines.difference(&self.lines).map(|line| format!("+ {line}")));
        changes.extend(self.lines.difference(&lines).map(|line| format!("- {line}")));
        left.extend(changes.into_iter().filter(|line| self.seen.names(line)));
        Ok(left)
    }
}

impl Seen {
    /// Whether a change of the machine concerns the cluster. Settings have no names: no change of one is allowed.
    fn names(&self, change: &str) -> bool {
        change.contains("sysctl ")
            || OURS.iter().any(|part| change.contains(part))
            || change
                .split([' ', '/', '"', ',', '@'])
                .any(|word| self.words.contains(word))
            || self
                .words
                .iter()
                .any(|word| word.starts_with('/') && change.contains(word.as_str()))
    }
}

impl Process {
    fn of(id: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        let (name, rest) = (stat.split(['(', ')']).nth(1)?, stat.rsplit(')').next()?);
        let fields: Vec<&str> = rest.split_whitespace().collect();
        // The first of these is the third field: the state. A process that has ended and is not collected is gone.
        (*fields.first()? != "Z").then_some(())?;
        Some(Self {
            id,
            start: (*fields.get(19)?).to_owned(),
            name: name.to_owned(),
        })
    }

    fn is_alive(&self) -> bool {
        Self::of(self.id).is_some_and(|now| now.start == self.start)
    }
}

/// A namespace of a process: its kind, its name, and the process.
type Namespace = (&'static str, PathBuf, u32);

/// The processes that are descendants of the owner, in a control group of its nodes, or in a namespace of those, and
/// the namespaces other than those of this process.
fn processes_of(owner: u32, group: &str) -> Result<(BTreeSet<Process>, Vec<Namespace>)> {
    let mut all = Vec::new();
    for entry in fs::read_dir("/proc").context("processes")?.flatten() {
        all.extend(entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    let mut ours: BTreeSet<u32> = [owner].into();
    loop {
        let known = ours.clone();
        ours.extend(all.iter().filter(|id| {
            let read = |file: &str| fs::read_to_string(format!("/proc/{id}/{file}")).unwrap_or_default();
            let status = read("status");
            let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
            let parent = parent.and_then(|parent| parent.trim().parse().ok());
            parent.is_some_and(|parent: u32| known.contains(&parent)) || read("cgroup").contains(group)
        }));
        if ours == known {
            break;
        }
    }
    let namespace = |id: u32, kind: &str| fs::read_link(format!("/proc/{id}/ns/{kind}")).ok();
    let mut namespaces: Vec<Namespace> = Vec::new();
    for kind in ["net", "mnt"] {
        let own = namespace(std::process::id(), kind);
        for id in &ours {
            let found = namespace(*id, kind).filter(|found| Some(found) != own.as_ref());
            if let Some(found) = found
                && !namespaces.iter().any(|(_, known, _)| *known == found)
            {
                namespaces.push((kind, found, *id));
            }
        }
    }
    let inside = |id: &&u32| {
        let mut known = namespaces.iter();
        known.any(|(kind, name, _)| namespace(**id, kind).as_ref() == Some(name))
    };
    ours.extend(all.iter().filter(inside));
    Ok((ours.into_iter().filter_map(Process::of).collect(), namespaces))
}

/// The links in the network namespace of a process, but for those with common names.
fn links(process: u32) -> Result<Vec<String>> {
    let namespace = format!("--net=/proc/{process}/ns/net");
    let listed = output(Command::new("nsenter").args([&namespace, "ip", "-j", "link", "show"]))?;
    let listed: Value = serde_json::from_str(&listed)?;
    let links = listed.as_array().into_iter().flatten();
    let names = links.filter_map(|link| link["ifname"].as_str());
    Ok(names.filter(|name| !COMMON.contains(name)).map(str::to_owned).collect())
}

/// The eBPF objects that these processes have open, the maps of their programs, and the links of those.
fn bpf_of(processes: &BTreeSet<Process>) -> Result<Vec<(&'static str, u64)>> {
    let mut found = BTreeSet::new();
    for process in processes {
        let files = fs::read_dir(format!("/proc/{}/fdinfo", process.id))
            .into_iter()
            .flatten();
        for file in files.flatten() {
            let text = fs::read_to_string(file.path()).unwrap_or_default();
            for line in text.lines() {
                for (field, kind) in [("prog_id:", "prog"), ("map_id:", "map"), ("link_id:", "link")] {
                    let id = line.strip_prefix(field).and_then(|id| id.trim().parse().ok());
                    found.extend(id.map(|id: u64| (kind, id)));
                }
            }
        }
    }
    for program in bpf("prog")? {
        if program["id"].as_u64().is_some_and(|id| found.contains(&("prog", id))) {
            let maps = program["map_ids"].as_array().into_iter().flatten();
            found.extend(maps.filter_map(Value::as_u64).map(|id| ("map", id)));
        }
    }
    for link in bpf("link")? {
        if link["prog_id"].as_u64().is_some_and(|id| found.contains(&("prog", id))) {
            found.extend(link["id"].as_u64().map(|id| ("link", id)));
        }
    }
    Ok(found.into_iter().collect())
}

/// All eBPF objects of the kernel.
fn bpf_ids() -> Result<Vec<(&'static str, u64)>> {
    let mut found = Vec::new();
    for kind in ["prog", "map", "link"] {
        found.extend(
            bpf(kind)?
                .iter()
                .filter_map(|object| Some((kind, object["id"].as_u64()?))),
        );
    }
    Ok(found)
}

fn bpf(kind: &str) -> Result<Vec<Value>> {
    let listed = output(Command::new("bpftool").args(["-j", kind, "show"]))?;
    if listed.trim().is_empty() {
        return Ok(Vec::new());
    }
    let listed: Value = serde_json::from_str(&listed).with_context(|| format!("eBPF objects: {listed}"))?;
    Ok(listed.as_array().cloned().unwrap_or_default())
}

fn output(command: &mut Command) -> Result<String> {
    let done = command.output().with_context(|| format!("run {command:?}"))?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{command:?}: {said}");
    String::from_utf8(done.stdout).context("not UTF-8")
}

fn mounts() -> Result<Vec<String>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("mounts")?;
    Ok(mounts.lines().map(str::to_owned).collect())
}

fn lines() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for line in mounts()? {
        // The number of the mount and of its parent.
        let words: Vec<&str> = line.split(' ').skip(2).collect();
        found.insert(format!("mount {}", words.join(" ")));
    }
    for name in SYSCTLS {
        let value = fs::read_to_string(Path::new("/proc/sys").join(name)).unwrap_or_default();
        found.insert(format!("sysctl {name} = {}", value.trim()));
    }
    Ok(found)
}

/// The control groups whose names begin with this.
fn groups(prefix: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for line in mounts()?.iter().filter(|line| line.contains(" - cgroup")) {
        let root = line.split(' ').nth(4).unwrap_or_default();
        for entry in fs::read_dir(root).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(prefix) {
                found.push(entry.path().display().to_string());
            }
        }
    }
    Ok(found)
}
