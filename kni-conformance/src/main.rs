//! Entry point of kni-conformance: reads the arguments, prints the results and writes the documents.

#![forbid(unsafe_code)]

use std::{
    fs,
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use kni_conformance::{Level, Options, run};

/// Checks that a server of the KNI gRPC API (KEP-4410) behaves as the kubelet needs it.
///
/// Makes pods and removes them. Needs root, and the network and mount namespaces of the server. Exits with status 1 if
/// a case fails; optional features that the server does not offer are no failures.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// The server's socket
    #[arg(long, default_value = "/run/kni/kni.sock")]
    socket: PathBuf,
    /// The cases to run
    #[arg(long, value_enum, default_value_t = Levels::All)]
    level: Levels,
    /// Run only the case of this name; may be repeated
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Multiply all time limits by this, for a machine that is busy with other work
    #[arg(long, value_name = "FACTOR", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    limit_factor: u8,
    /// Write the results to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the results to this file in the XML format of test runs
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// List the cases and exit
    #[arg(long)]
    list: bool,
}

/// The levels to run.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Levels {
    Core,
    Extended,
    All,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let options = Options {
        socket: args.socket,
        levels: match args.level {
            Levels::Core => vec![Level::Core],
            Levels::Extended => vec![Level::Extended],
            Levels::All => Vec::new(),
        },
        only: args.only,
        limit_factor: args.limit_factor.into(),
    };
    if args.list {
        return list(&options);
    }
    let report = run(&options, |result| {
        let name = result.outcome.name();
        // The table follows; without a terminal nothing is lost.
        writeln!(io::stderr(), "{} ({name}, {:.2} s)", result.name, result.seconds).ok();
    })?;
    for (path, text) in [(args.json, report.json()), (args.junit, report.junit())] {
        if let Some(path) = path {
            fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        }
    }
    io::stdout().write_all(report.table().as_bytes())?;
    let is_failed = report.failed().next().is_some();
    Ok(if is_failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn list(options: &Options) -> Result<ExitCode> {
    let mut out = io::stdout().lock();
    for case in options.selected()? {
        writeln!(out, "{:8}  {:24}  {}", case.level, case.name, case.about)?;
    }
    Ok(ExitCode::SUCCESS)
}
