//! Runs the process of the simulated nodes, inside the namespaces of the control plane.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufRead as _, BufReader, Write as _},
    path::PathBuf,
    process::{Child, ChildStdin, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use kni_local_node::spawn::spawn_tied;
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{agent::simulated_nodes_binary, cluster::Cluster, namespaces::Namespaces};

/// What the nodes observed. Times are seconds since 1970.
#[derive(Debug, Default, Deserialize)]
pub struct Observed {
    /// The nodes that know a state of a pod as that of a peer, by UID and stamp.
    pub peers: BTreeMap<String, Vec<(String, f64)>>,
    /// When a pod's own node had attached it, by UID.
    pub attached: BTreeMap<String, f64>,
    /// When a node held its first block of a network, by network.
    pub blocks: BTreeMap<String, Vec<(String, f64)>>,
    /// Changes of peers that the nodes have received.
    pub peer_changes: u64,
    /// Changes of what nodes know of the fabric.
    pub fabric_changes: u64,
}

impl Observed {
    /// Adds what was observed later.
    pub(super) fn add(&mut self, later: Self) {
        for (id, nodes) in later.peers {
            self.peers.entry(id).or_default().extend(nodes);
        }
        self.attached.extend(later.attached);
        for (network, nodes) in later.blocks {
            self.blocks.entry(network).or_default().extend(nodes);
        }
        self.peer_changes += later.peer_changes;
        self.fabric_changes += later.fabric_changes;
    }
}

/// The process. It is killed when the value is dropped.
#[derive(Debug)]
pub struct Fleet {
    child: Child,
    input: ChildStdin,
    answers: mpsc::Receiver<Value>,
    folder: TempDir,
}

impl Fleet {
    /// Starts it without nodes.
    pub fn start(cluster: &mut Cluster) -> Result<Self> {
        let kubelet = cluster.control.kubeconfig("simulated-kubelet", "system:masters")?;
        let ns: &Namespaces = cluster.control.node();
        let program = ns.install(&simulated_nodes_binary()?)?;
        let inside = PathBuf::from("/run/simulated-kubelet.conf");
        ns.enter(|| fs::write(&inside, kubelet))?.context("kubeconfig")?;
        let folder = tempfile::Builder::new().prefix("kni-simulation-").tempdir()?;
        let log = File::create(folder.path().join("log"))?;
        let mut command = ns.command(&program);
        command.arg("--kubelet").arg(&inside);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut child = spawn_tied(command).context("start the simulated nodes")?;
        let input = child.stdin.take().context("no input")?;
        let output = child.stdout.take().context("no output")?;
        let (sender, answers) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let Ok(answer) = serde_json::from_str(&line) else {
                    continue;
                };
                if sender.send(answer).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            child,
            input,
            answers,
            folder,
        })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its log until now.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn send(&mut self, command: &Value) -> Result<()> {
        writeln!(self.input, "{command}").with_context(|| format!("the simulated nodes have ended: {}", self.log()))
    }

    /// Starts agents, all of them at once; returns how long each took until pods could be attached.
    pub fn start_nodes(&mut self, places: &[Value], patience: Duration) -> Result<Vec<f64>> {
        self.send(&json!({ "start": places }))?;
        let started = self.ready(places.len(), patience)?;
        Ok(started.into_iter().map(|(seconds, _)| seconds).collect())
    }

    /// Starts one agent that can be stopped. Returns how long that took, and the bytes that it has read, by resource.
    pub fn start_alone(&mut self, place: &Value, patience: Duration) -> Result<(f64, BTreeMap<String, f64>)> {
        self.send(&json!({ "alone": place }))?;
        self.ready(1, patience)?.pop().context("no answer")
    }

    fn ready(&self, count: usize, patience: Duration) -> Result<Vec<(f64, BTreeMap<String, f64>)>> {
        let deadline = Instant::now() + patience;
        let mut times = Vec::new();
        while times.len() < count {
            let answer = self.answer(deadline.saturating_duration_since(Instant::now()))?;
            match answer["seconds"].as_f64() {
                Some(seconds) => times.push((seconds, serde_json::from_value(answer["read"].clone())?)),
                None => bail!("{answer}; {}", self.log()),
            }
        }
        Ok(times)
    }

    fn answer(&self, patience: Duration) -> Result<Value> {
        let answer = self.answers.recv_timeout(patience);
        answer.with_context(|| format!("no answer after {patience:?}; {}", self.log()))
    }

    /// Ends the agent of a node as a crash does.
    pub fn stop(&mut self, name: &str) -> Result<()> {
        self.send(&json!({ "stop": name }))?;
        self.answer(Duration::from_mins(1)).map(drop)
    }

    /// What was observed since the last call.
    pub fn observed(&mut self) -> Result<Observed> {
        self.send(&json!("observed"))?;
        let mut answer = self.answer(Duration::from_mins(2))?;
        serde_json::from_value(answer["observed"].take()).context("what was observed")
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        // The signal fails for a process that has already exited.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
