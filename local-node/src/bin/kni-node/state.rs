//! Stores facts about what `up` started in a file for later commands.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::Start;

/// The name of the file.
pub(crate) const FILE: &str = "state.json";

/// What was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One node, whose agent follows its API server.
    Node,
    /// One node, whose agent reads a folder of manifests.
    Standalone,
    /// Several nodes.
    Cluster,
}

impl Kind {
    /// What the options start.
    pub(crate) fn of(start: &Start) -> Self {
        match (start.nodes, start.standalone) {
            (Some(_), _) => Self::Cluster,
            (None, true) => Self::Standalone,
            (None, false) => Self::Node,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Standalone => "standalone",
            Self::Cluster => "cluster",
        }
    }

    fn named(name: &str) -> Option<Self> {
        [Self::Node, Self::Standalone, Self::Cluster]
            .into_iter()
            .find(|kind| kind.name() == name)
    }
}

/// What was started, or is being started.
#[derive(Debug)]
pub(crate) struct State {
    /// The process that owns the nodes. The names of their control groups contain its number.
    pub(crate) keeper: u32,
    /// What it started.
    pub(crate) kind: Kind,
    /// The processes of the nodes; none while they start.
    pub(crate) processes: Vec<(String, u32)>,
}

impl State {
    /// The state of this process, which begins to start nodes.
    pub(crate) fn begin(kind: Kind) -> Self {
        Self {
            keeper: std::process::id(),
            kind,
            processes: Vec::new(),
        }
    }

    /// Adds the processes of the nodes, which are ready.
    pub(crate) fn complete(&mut self, processes: Vec<(String, u32)>) {
        self.processes = processes;
    }

    /// Whether the nodes are ready.
    pub(crate) fn is_complete(&self) -> bool {
        !self.processes.is_empty()
    }

    /// The last state that was written, also of an owner that has ended.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>> {
        let file = folder.join(FILE);
        if !file.exists() {
            return Ok(None);
        }
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        let state = Self::parse(&text).with_context(|| format!("{} is not what `up` writes", file.display()))?;
        Ok(Some(state))
    }

    /// Writes the file.
    pub(crate) fn save(&self, folder: &Path) -> Result<()> {
        let processes = self.processes.iter().map(|(name, pid)| json!([name, pid]));
        let text = json!({
            "keeper": self.keeper,
            "kind": self.kind.name(),
            "processes": processes.collect::<Vec<_>>(),
        });
        let (file, unfinished) = (folder.join(FILE), folder.join(format!(".{FILE}.new")));
        // Atomic: after a crash the file is still readable.
        fs::write(&unfinished, text.to_string())
            .and_then(|()| fs::rename(&unfinished, &file))
            .with_context(|| format!("write {}", file.display()))
    }

    fn parse(text: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(text).ok()?;
        let number = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let process = |value: &Value| Some((value.get(0)?.as_str()?.to_owned(), number(value.get(1)?)?));
        let processes: Option<Vec<_>> = value.get("processes")?.as_array()?.iter().map(process).collect();
        Some(Self {
            keeper: number(value.get("keeper")?)?,
            kind: Kind::named(value.get("kind")?.as_str()?)?,
            processes: processes?,
        })
    }

    /// Whether the owner runs; its process id may have been reused.
    pub(crate) fn is_running(&self) -> bool {
        let words = words(self.keeper);
        words.windows(6).any(|part| part == b"\0keep\0") && words.windows(8).any(|part| part == b"kni-node")
    }
}

/// Whether a process with this id exists and has not ended.
pub(crate) fn is_alive(pid: u32) -> bool {
    !words(pid).is_empty()
}

/// The command line of a process. One that has ended has none, even before its parent has noticed.
fn words(pid: u32) -> Vec<u8> {
    fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_texts_are_no_state() {
        assert!(State::parse("").is_none());
        assert!(State::parse("{\"keeper\": 1}").is_none());
        assert!(State::parse("{\"keeper\": 1, \"kind\": \"other\", \"processes\": []}").is_none());
    }

    #[test]
    fn a_state_is_read_as_it_was_saved() {
        let folder = tempfile::tempdir().unwrap();
        assert!(State::read(folder.path()).unwrap().is_none());
        let mut state = State::begin(Kind::Cluster);
        state.save(folder.path()).unwrap();
        let begun = State::read(folder.path()).unwrap().unwrap();
        assert!(!begun.is_complete());
        state.complete(vec![("node1/kubelet".into(), 7)]);
        state.save(folder.path()).unwrap();
        let read = State::read(folder.path()).unwrap().unwrap();
        assert!(read.is_complete());
        assert_eq!((read.keeper, read.kind), (std::process::id(), Kind::Cluster));
        assert_eq!(read.processes, state.processes);
    }

    #[test]
    fn the_number_of_another_process_is_no_node() {
        assert!(!State::begin(Kind::Node).is_running());
    }
}
