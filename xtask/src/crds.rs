//! `crds`: generates the custom resource definitions with the program `kni-crds`, or checks them.

use std::process::Command;

use anyhow::Result;

use crate::{
    command::relay,
    programs::{Profile, programs},
    progress::Progress,
};

/// Arguments of `crds`.
#[derive(Default, clap::Args)]
pub(crate) struct Args {
    /// Write nothing; fail, and show the differences, where the files are not what would be written
    #[arg(long)]
    check: bool,
}

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    Progress::new(1).step("definitions", || run(args.check))
}

/// Fails if the files differ from the definitions that the types generate.
pub(crate) fn up_to_date() -> Result<()> {
    run(true)
}

fn run(check: bool) -> Result<()> {
    programs(Profile::Dev, &["kni-crds"])?;
    let mut crds = Command::new(Profile::Dev.program("kni-crds"));
    if check {
        crds.arg("--check");
    }
    relay(&mut crds)
}
