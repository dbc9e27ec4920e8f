//! The options of `kni-image`. `cargo xtask docs` contains this file too, so that it need not build the program:
//! it may use clap alone.

use std::path::PathBuf;

use clap::Parser;

/// Writes the agent's container image around its programs.
#[derive(Parser)]
#[command(name = "kni-image")]
pub(crate) struct Args {
    /// Name of the image
    #[arg(long, value_name = "REFERENCE", default_value = concat!("kni.local/kni-agent:", env!("CARGO_PKG_VERSION")))]
    pub(crate) tag: String,
    /// Where the archive goes
    #[arg(long, value_name = "PATH", required_unless_present = "folder")]
    pub(crate) output: Option<PathBuf>,
    /// Write the image's files into this folder, which must be empty or missing, instead of an archive
    #[arg(long, value_name = "DIR", conflicts_with_all = ["output", "tag"])]
    pub(crate) folder: Option<PathBuf>,
    /// Another file, at the same path in the image; with one, programs need not be static
    #[arg(long = "with", value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// Programs of the image, linked statically
    #[arg(required = true, value_name = "PROGRAM")]
    pub(crate) programs: Vec<PathBuf>,
}
