//! `image`: builds static programs, and a container image of them with the program `kni-image`.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use crate::{
    build_cni, build_ebpf,
    command::relay,
    goal::{self, Build},
    libraries,
    programs::{Profile, programs},
    progress::Progress,
    workspace::{ebpf_object, target},
};

/// The name of the image in `deploy/`.
const TAG: &str = concat!("kni.local/kni-agent:", env!("CARGO_PKG_VERSION"));

/// Arguments of `image`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Name of the image
    #[arg(long, value_name = "REFERENCE", default_value = TAG)]
    tag: String,
    /// Where the archive goes [default: target/image/kni-agent.tar]
    #[arg(long, value_name = "PATH")]
    output: Option<PathBuf>,
    /// Write the image's files into this folder, which must be empty or missing, instead of an archive
    #[arg(long, value_name = "DIR", conflicts_with_all = ["output", "tag"])]
    folder: Option<PathBuf>,
    /// Programs as for the tests: quicker to build, slower to run
    #[arg(long)]
    debug: bool,
}

/// Number of steps of [`build`].
pub(crate) const STEPS: usize = 4;

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    build(args, &mut Progress::new(STEPS))
}

/// Builds the image with programs as for the tests into an archive, as [`STEPS`] steps of `progress`.
pub(crate) fn build_for_tests(archive: &Path, progress: &mut Progress) -> Result<()> {
    let args = Args {
        tag: TAG.to_owned(),
        output: Some(archive.to_owned()),
        folder: None,
        debug: true,
    };
    build(&args, progress)
}

fn build(args: &Args, progress: &mut Progress) -> Result<()> {
    goal::declared(Build::Image)?;
    let profile = if args.debug { Profile::Dev } else { Profile::Release };
    progress.step("eBPF programs", || {
        if args.debug && ebpf_object().is_file() {
            return Ok(());
        }
        build_ebpf::build(false).map(drop)
    })?;
    progress.step("agent and tools", || {
        let mut names = vec!["kni-agent", "kni-controller", "kni-image", "knictl"];
        if args.debug {
            names.push("kni-cni");
        }
        programs(profile, &names)
    })?;
    let mut contents: Vec<PathBuf> = ["kni-agent", "kni-controller", "knictl"]
        .map(|name| profile.program(name))
        .into();
    contents.push(progress.step("CNI plugin", || match profile {
        // The one of the tests: the small one is a second build of everything that it uses.
        Profile::Dev => Ok(profile.program("kni-cni")),
        Profile::Release => build_cni::build(),
    })?);
    progress.step("image", || {
        let mut image = Command::new(profile.program("kni-image"));
        match (&args.folder, &args.output) {
            (Some(folder), _) => image.arg("--folder").arg(folder),
            (None, Some(output)) => image.arg("--output").arg(output),
            (None, None) => image.arg("--output").arg(target().join("image/kni-agent.tar")),
        };
        if args.folder.is_none() {
            image.args(["--tag", &args.tag]);
        }
        if args.debug {
            // Programs built for the tests are not static.
            for file in libraries_of(&contents)? {
                image.arg("--with").arg(file);
            }
        }
        relay(image.args(contents))
    })
}

fn libraries_of(programs: &[PathBuf]) -> Result<BTreeSet<PathBuf>> {
    let mut files = BTreeSet::new();
    for program in programs {
        files.extend(libraries::needed(program)?);
    }
    Ok(files)
}
