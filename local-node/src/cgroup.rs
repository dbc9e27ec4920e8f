//! Creates the control groups of a node: they identify its processes and are parents of the kubelet's pods.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context as _, Result, bail};

/// The group of a node's own programs, below the node's group: in version 2 a group has either processes or child
/// groups.
const DAEMONS: &str = "daemons";
/// Controllers that kubelet and runc use.
const CONTROLLERS: [&str; 6] = ["cpuset", "cpu", "io", "memory", "pids", "hugetlb"];

/// A group of one name in every mounted hierarchy of versions 1 and 2. The janitor removes it.
#[derive(Debug, Clone)]
pub struct Cgroup {
    name: String,
    /// `cgroup.procs` of the programs' group, in the hierarchy by which processes are found.
    entry: PathBuf,
}

impl Cgroup {
    /// Creates a group with a unique name.
    pub fn create() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}{number}", prefix(std::process::id()));
        let hierarchies = hierarchies()?;
        for hierarchy in &hierarchies {
            hierarchy
                .make(&name)
                .with_context(|| format!("control group {name} below {}", hierarchy.root.display()))?;
        }
        // Version 2 if there is one: runc of version 1 leaves it as it was inherited.
        let Some(found_by) = hierarchies.iter().max_by_key(|hierarchy| hierarchy.unified) else {
            bail!("no control groups are mounted");
        };
        Ok(Self {
            entry: found_by.root.join(&name).join(DAEMONS).join("cgroup.procs"),
            name,
        })
    }

    /// Its name, which is also its path from the root of each hierarchy, without the slash.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A command that enters the group and then executes the program of `command` with its arguments and environment;
    /// its children inherit the group.
    ///
    /// A shell enters, not a closure between fork and exec, for the same reason as in [`crate::namespaces`].
    pub fn adopt(&self, command: &Command) -> Command {
        let mut adopted = Command::new("/bin/sh");
        adopted.args(["-c", r#"echo 0 > "$0" && exec "$@""#]).arg(&self.entry);
        adopted.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => adopted.env(name, value),
                None => adopted.env_remove(name),
            };
        }
        adopted
    }
}

/// The names of the groups that exist of the nodes of a process.
pub fn of_process(pid: u32) -> Result<BTreeSet<String>> {
    let prefix = prefix(pid);
    let mut found = BTreeSet::new();
    for Hierarchy { root, .. } in hierarchies()? {
        let entries = fs::read_dir(&root).with_context(|| format!("read {}", root.display()))?;
        let names = entries
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned());
        found.extend(names.filter(|name| name.starts_with(&prefix)));
    }
    Ok(found)
}

fn prefix(pid: u32) -> String {
    format!("kni-node-{pid}-")
}

struct Hierarchy {
    root: PathBuf,
    unified: bool,
}

impl Hierarchy {
    fn make(&self, name: &str) -> io::Result<()> {
        let group = self.root.join(name);
        let daemons = group.join(DAEMONS);
        fs::create_dir_all(&group)?;
        if self.unified {
            for parent in [&self.root, &group] {
                delegate(parent)?;
            }
        } else {
            // A group of version 1 accepts no process before its CPUs and memory nodes are set.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                inherit(&self.root, &group, file)?;
            }
        }
        fs::create_dir_all(daemons)
    }
}

/// Enables the controllers for the children of `group`, except those that are unavailable or in use elsewhere.
fn delegate(group: &Path) -> io::Result<()> {
    let there = fs::read_to_string(group.join("cgroup.controllers"))?;
    for controller in CONTROLLERS
        .iter()
        .filter(|name| there.split_whitespace().any(|word| word == **name))
    {
        // The kubelet reports a missing controller with a better message.
        drop(fs::write(
            group.join("cgroup.subtree_control"),
            format!("+{controller}"),
        ));
    }
    Ok(())
}

fn inherit(parent: &Path, child: &Path, file: &str) -> io::Result<()> {
    if child.join(file).exists() {
        fs::write(child.join(file), fs::read(parent.join(file))?)?;
    }
    Ok(())
}

fn hierarchies() -> Result<Vec<Hierarchy>> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("mounts of this machine")?;
    let of_cgroups = |line: &str| {
        let mut words = line.split(' ').skip(1);
        let (at, kind) = (words.next()?, words.next()?);
        ["cgroup", "cgroup2"].contains(&kind).then(|| Hierarchy {
            root: at.into(),
            unified: kind == "cgroup2",
        })
    };
    Ok(mounts.lines().filter_map(of_cgroups).collect())
}
