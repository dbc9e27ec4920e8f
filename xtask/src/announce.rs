//! Prints at the start of a command what it will build and about how long that takes.

use std::path::{Path, PathBuf};

use crate::{
    goal::Build,
    linker,
    programs::Profile,
    progress::say,
    workspace::{ebpf_object, target},
};

/// The table of a node's programs, in which each has its name and its package in quotes.
const TABLE: &str = include_str!("../../local-node/src/programs/table.rs");

/// What is missing of a build, and the minutes that it takes on two CPUs with crates and modules downloaded.
#[derive(Debug, PartialEq, Eq)]
struct Missing {
    what: String,
    minutes: usize,
}

/// Prints what is missing of `builds` and the time for it; nothing if all was built before.
pub(crate) fn announce(builds: &[Build]) {
    let missing: Vec<Missing> = builds.iter().flat_map(|build| missing(*build)).collect();
    if let Some(line) = sentence(&missing) {
        say(&line);
    }
}

/// The folder of the programs of a node.
fn node_programs() -> PathBuf {
    target().join("tools/node/bin")
}

fn missing(build: Build) -> Vec<Missing> {
    let part = |is_missing: bool, what: &str, minutes| {
        is_missing.then(|| Missing {
            what: what.to_owned(),
            minutes,
        })
    };
    let parts = match build {
        Build::Ebpf => vec![
            part(linker::is_missing(), "bpf-linker", 2),
            part(!ebpf_object().is_file(), "the eBPF programs", 1),
        ],
        Build::Programs => vec![part(
            !Profile::Dev.program("kni-agent").is_file(),
            "the agent and its tools",
            7,
        )],
        Build::NodePrograms => vec![of_node(&node_programs())],
        Build::Image => vec![part(
            !target().join("image/cluster.tar").is_file(),
            "the agent's image",
            2,
        )],
        Build::CniPlugin | Build::Arm64 | Build::Machines => Vec::new(),
    };
    parts.into_iter().flatten().collect()
}

/// The programs of a node that `folder` lacks.
fn of_node(folder: &Path) -> Option<Missing> {
    let all = names(TABLE);
    let is_missing = |name: &&&str| !folder.join(format!(".{name}.built")).is_file();
    let count = all.iter().filter(is_missing).count();
    (count > 0).then(|| Missing {
        what: format!("{count} programs of a Kubernetes node"),
        // The first one compiles the libraries of many.
        minutes: 1 + 8 * count / all.len(),
    })
}

/// The names in the list `PROGRAMS` of `table`, and runc, which has a list of its own.
fn names(table: &str) -> Vec<&str> {
    let list = table.split_once("PROGRAMS: &[Program]").map_or("", |(_, rest)| rest);
    let list = list.split_once("];").map_or("", |(list, _)| list);
    let mut names: Vec<&str> = list.split('"').skip(1).step_by(4).collect();
    names.push("runc");
    names
}

fn sentence(missing: &[Missing]) -> Option<String> {
    let (last, others) = missing.split_last()?;
    let minutes: usize = missing.iter().map(|part| part.minutes).sum();
    let others: Vec<&str> = others.iter().map(|part| part.what.as_str()).collect();
    let parts = if others.is_empty() {
        last.what.clone()
    } else {
        format!("{} and {}", others.join(", "), last.what)
    };
    let unit = if minutes == 1 { "minute" } else { "minutes" };
    Some(format!(
        "This builds {parts}: about {minutes} {unit} on two CPUs, seconds when built before."
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(what: &str, minutes: usize) -> Missing {
        Missing {
            what: what.to_owned(),
            minutes,
        }
    }

    #[test]
    fn only_what_is_missing_is_announced() {
        assert_eq!(sentence(&[]), None);
        assert_eq!(
            sentence(&[part("the eBPF programs", 1)]).unwrap(),
            "This builds the eBPF programs: about 1 minute on two CPUs, seconds when built before."
        );
        let all = [part("bpf-linker", 2), part("the agent", 7), part("18 programs", 9)];
        assert_eq!(
            sentence(&all).unwrap(),
            "This builds bpf-linker, the agent and 18 programs: about 18 minutes on two CPUs, seconds when built before."
        );
    }

    #[test]
    fn the_programs_of_a_node_come_from_their_table() {
        let all = names(TABLE);
        let of_table = TABLE.split("pub const PROGRAMS").nth(1).unwrap();
        let of_table = of_table.split("];").next().unwrap().matches("program(").count();
        assert_eq!(all.len(), of_table + 1);
        for name in ["bridge", "kubelet", "kubectl", "runc"] {
            assert!(all.contains(&name), "{name} of {all:?}");
        }
        assert!(all.iter().all(|name| !name.contains(['/', '.', '\n'])), "{all:?}");
    }

    #[test]
    fn programs_with_a_record_are_not_missing() {
        let folder = std::env::temp_dir().join(format!("xtask-announce-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let all = names(TABLE);
        let count = |folder: &Path| of_node(folder).map(|part| part.what);
        assert_eq!(
            count(&folder).unwrap(),
            format!("{} programs of a Kubernetes node", all.len())
        );
        for name in all {
            std::fs::write(folder.join(format!(".{name}.built")), "").unwrap();
        }
        assert_eq!(count(&folder), None);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
