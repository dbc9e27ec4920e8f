//! Simulates clusters of several sizes on a real API server, and predicts larger ones; see docs/design/scale.md.

mod options;

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use kni_integration::simulation::{self, Options, Outcome, report};
use serde_json::json;

use crate::options::Args;

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        nix::unistd::geteuid().is_root(),
        "this makes network namespaces, which needs root"
    );
    ensure!(
        args.nodes >= 8 && args.pods >= args.nodes && args.networks >= 2,
        "too small"
    );
    let cores = std::thread::available_parallelism()?.get();
    let cores = f64::from(u32::try_from(cores)?);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let parts: &[usize] = if args.single { &[1] } else { &[4, 2, 1] };
    let mut outcomes: Vec<Outcome> = Vec::new();
    for part in parts {
        let options = Options {
            nodes: args.nodes / part,
            pods: args.pods / part,
            networks: (args.networks / part).max(2),
            rate: args.rate,
            fill: args.fill,
            duration: Duration::from_secs(args.duration),
            rest: None,
        };
        let say = |what: &str| println!("{} nodes: {what}", options.nodes);
        let outcome = runtime.block_on(simulation::run(options.clone(), say))?;
        println!("{}", report::text(&outcome, cores));
        outcomes.push(outcome);
    }
    let mut all = json!({ "sizes": outcomes.iter().map(report::json).collect::<Vec<_>>() });
    if let [first, second, rest @ ..] = outcomes.as_slice() {
        let (text, model) = report::prediction(first, second, rest.first());
        println!("{text}");
        all["model"] = model;
    }
    if let Some(file) = args.json {
        fs::write(&file, serde_json::to_string_pretty(&all)?).with_context(|| file.display().to_string())?;
    }
    Ok(())
}
