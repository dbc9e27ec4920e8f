//! Stores facts about a running node in a file for later commands.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// A node that was started.
#[derive(Debug)]
pub(crate) struct State {
    /// The process that owns the node.
    pub(crate) keeper: u32,
    /// The node's control group.
    pub(crate) group: String,
    /// Whether its agent reads a folder of manifests in place of the API server.
    pub(crate) standalone: bool,
    /// The node's processes.
    pub(crate) processes: Vec<(String, u32)>,
}

impl State {
    /// The running node, if there is one.
    pub(crate) fn running(folder: &Path) -> Result<Option<Self>> {
        let file = file(folder);
        if !file.exists() {
            return Ok(None);
        }
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        let state = Self::parse(&text).with_context(|| format!("{} is not what `up` writes", file.display()))?;
        Ok(state.is_running().then_some(state))
    }

    /// Writes the file.
    pub(crate) fn save(&self, folder: &Path) -> Result<()> {
        let processes = self.processes.iter().map(|(name, pid)| json!([name, pid]));
        let text = json!({
            "keeper": self.keeper,
            "group": self.group,
            "standalone": self.standalone,
            "processes": processes.collect::<Vec<_>>(),
        });
        let file = file(folder);
        fs::write(&file, text.to_string()).with_context(|| format!("write {}", file.display()))
    }

    fn parse(text: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(text).ok()?;
        let number = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let process = |value: &Value| Some((value.get(0)?.as_str()?.to_owned(), number(value.get(1)?)?));
        let processes: Option<Vec<_>> = value.get("processes")?.as_array()?.iter().map(process).collect();
        Some(Self {
            keeper: number(value.get("keeper")?)?,
            group: value.get("group")?.as_str()?.to_owned(),
            standalone: value.get("standalone")?.as_bool()?,
            processes: processes?,
        })
    }

    /// Whether the owner runs; its process id may have been reused.
    fn is_running(&self) -> bool {
        let words = fs::read(format!("/proc/{}/cmdline", self.keeper)).unwrap_or_default();
        words.windows(6).any(|part| part == b"\0keep\0") && words.windows(8).any(|part| part == b"kni-node")
    }

    /// Whether a process or control group of the node exists.
    pub(crate) fn is_left(&self) -> bool {
        let groups = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
        let mut roots = groups
            .map(|entry| entry.path())
            .chain([PathBuf::from("/sys/fs/cgroup")]);
        self.is_running() || roots.any(|root| root.join(&self.group).exists())
    }
}

/// Paths and commands for the user of the node.
pub(crate) fn advice(folder: &Path, standalone: bool) -> String {
    let here = std::env::current_dir().unwrap_or_default();
    let folder = folder.strip_prefix(&here).unwrap_or(folder).display();
    let (source, change) = if standalone {
        (
            format!("manifests   {folder}/manifests (networks, policies, services; the agent watches them)\n"),
            format!("cp deploy/examples/policies.yaml {folder}/manifests/"),
        )
    } else {
        (
            String::new(),
            format!(
                "{folder}/kubectl get pnw,nnw,pif -A -o wide\n  {folder}/kubectl apply -f deploy/examples/policies.yaml"
            ),
        )
    };
    format!(
        "kubeconfig  {folder}/kubeconfig
{source}logs        {folder}/logs

Try:
  {folder}/kubectl get nodes
  {folder}/kubectl run web --image={image} --image-pull-policy=Never --port=7000 --expose -- serve --tcp 7000 --http 8080
  {folder}/kubectl run one --image={image} --image-pull-policy=Never --annotations=kni.dev/network=blue -- serve --tcp 7000
  {folder}/kubectl get pods -o wide
  {folder}/kubectl exec web -- /kni-probe ask web 7000
  {change}
  {folder}/knictl interfaces
  {folder}/knictl flows --follow
  {folder}/import ARCHIVE          # an image archive of this machine, for pods with imagePullPolicy Never
  {folder}/enter bash              # a shell in the node's network and mounts
  cargo xtask node down",
        image = kni_local_node::image::PROBE
    )
}

/// Removes the file.
pub(crate) fn remove(folder: &Path) -> Result<()> {
    let file = file(folder);
    if file.exists() {
        fs::remove_file(&file).with_context(|| format!("remove {}", file.display()))?;
    }
    Ok(())
}

/// Whether a process with this id exists.
pub(crate) fn is_alive(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

fn file(folder: &Path) -> PathBuf {
    folder.join("state.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_texts_are_no_state() {
        assert!(State::parse("").is_none());
        assert!(State::parse("{\"keeper\": 1}").is_none());
        let state = State::parse(
            "{\"keeper\": 1, \"group\": \"kni-node-1-0\", \"standalone\": true, \"processes\": [[\"etcd\", 7]]}",
        )
        .unwrap();
        assert_eq!(state.processes, [("etcd".to_owned(), 7)]);
    }

    #[test]
    fn the_number_of_another_process_is_no_node() {
        let state = State {
            keeper: std::process::id(),
            group: "kni-node-of-nobody".into(),
            standalone: false,
            processes: Vec::new(),
        };
        assert!(!state.is_running());
        assert!(!state.is_left());
    }
}
