//! Simulates the nodes of a large cluster in one process: the controllers of one agent for each, on nodes in memory.
//!
//! Commands arrive on standard input and answers leave on standard output, one JSON object a line. The watches, the
//! cache, the claims of blocks, the reports and the policy engine are the agent's own code. There is no kernel, no
//! attach and no kubelet.

#![forbid(unsafe_code)]

mod agent;
mod node;
mod observed;

use std::{
    collections::BTreeMap,
    io::{self, BufRead as _, Write as _},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result};
use clap::Parser;
use kni_reflectors::{RequestLimits, Sender, connect};
use kube::Client;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    runtime::{Builder, Handle, Runtime},
    sync::mpsc,
};
use tracing_subscriber::EnvFilter;

use self::{agent::Place, node::SimulatedNode, observed::Observed};

/// Simulates nodes.
#[derive(Debug, Parser)]
struct Args {
    /// Kubeconfig of the kubelets: it may write the status of pods
    #[arg(long)]
    kubelet: PathBuf,
}

/// A command.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Command {
    /// Starts the agents of these nodes; each answers when it is ready.
    Start(Vec<Place>),
    /// The same in a runtime of its own, so that it can be stopped.
    Alone(Place),
    /// Ends the agent of a node that was started alone, as a crash does.
    Stop(String),
    /// Answers with what was observed since the last time.
    Observed,
}

fn main() -> Result<()> {
    let args = Args::parse();
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::from_default_env())
        .with_writer(io::stderr)
        .init();
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let runtime = Builder::new_multi_thread().enable_all().build()?;
    let limits = RequestLimits::default();
    let kubelet = runtime
        .block_on(connect(Some(&args.kubelet), limits, Sender::Job))?
        .client;
    let (answers, written) = mpsc::unbounded_channel();
    std::thread::spawn(move || write_answers(written));
    let mut simulation = Simulation {
        kubelet,
        observed: Observed::default(),
        answers,
        alone: BTreeMap::new(),
        nodes: BTreeMap::new(),
    };
    for line in io::stdin().lock().lines() {
        let command = serde_json::from_str(&line?).context("a command")?;
        simulation.carry_out(runtime.handle(), command)?;
    }
    runtime.shutdown_background();
    Ok(())
}

struct Simulation {
    kubelet: Client,
    observed: Observed,
    answers: mpsc::UnboundedSender<Value>,
    alone: BTreeMap<String, Runtime>,
    /// What a node keeps while its agent is not running.
    nodes: BTreeMap<String, SimulatedNode>,
}

impl Simulation {
    fn carry_out(&mut self, runtime: &Handle, command: Command) -> Result<()> {
        match command {
            Command::Start(places) => {
                for place in places {
                    self.start(runtime, place);
                }
            }
            Command::Alone(place) => {
                let own = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
                self.start(own.handle(), place.clone());
                self.alone.insert(place.name, own);
            }
            Command::Stop(name) => {
                if let Some(own) = self.alone.remove(&name) {
                    own.shutdown_background();
                }
                self.answers.send(json!({ "stopped": name }))?;
            }
            Command::Observed => self.answers.send(json!({ "observed": self.observed.take() }))?,
        }
        Ok(())
    }

    fn start(&mut self, runtime: &Handle, place: Place) {
        let node = self.nodes.entry(place.name.clone());
        let node = node.or_insert_with(|| {
            SimulatedNode::new(
                &place.name,
                &place.addresses,
                place.rest.map(Duration::from_secs),
                &self.observed,
            )
        });
        let (node, kubelet) = (node.restarted(), self.kubelet.clone());
        let answers = self.answers.clone();
        runtime.spawn(async move {
            let name = place.name.clone();
            let answer = match agent::start(place, node, kubelet).await {
                Ok(started) => json!({
                    "ready": name, "seconds": started.after.as_secs_f64(), "read": started.read,
                }),
                Err(error) => json!({ "failed": name, "error": format!("{error:#}") }),
            };
            // The reader is gone at the end only.
            drop(answers.send(answer));
        });
    }
}

fn write_answers(mut answers: mpsc::UnboundedReceiver<Value>) {
    let mut out = io::stdout().lock();
    while let Some(answer) = answers.blocking_recv() {
        if writeln!(out, "{answer}").and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}
