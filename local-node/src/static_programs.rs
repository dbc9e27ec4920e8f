//! Builds the static programs of crate `kni-probe` with cargo.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

/// The programs of crate `kni-probe`, linked statically so that they run in images without other files.
#[derive(Debug, Clone)]
pub struct StaticPrograms {
    folder: PathBuf,
}

impl StaticPrograms {
    /// Builds them in the target folder `target`, an absolute path. It must not be that of the workspace, whose lock
    /// the cargo process of the caller may hold. Cargo's lock serializes concurrent builds.
    pub fn build(target: &Path) -> Result<Self> {
        let triple = triple();
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .args([
                "build",
                "--quiet",
                "--release",
                "--package",
                "kni-probe",
                "--target",
                &triple,
            ])
            .arg("--target-dir")
            .arg(target)
            .env("RUSTFLAGS", "-C target-feature=+crt-static")
            .env_remove("CARGO_ENCODED_RUSTFLAGS");
        // Variables that cargo set for the caller's crate would cause rebuilds.
        for (name, _) in env::vars_os() {
            let own = name
                .to_str()
                .is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_"));
            if own || name == "LD_LIBRARY_PATH" {
                cargo.env_remove(name);
            }
        }
        let status = cargo.status().context("run cargo")?;
        ensure!(status.success(), "cargo build of kni-probe failed ({status})");
        Ok(Self::in_target(target))
    }

    /// Those that [`Self::build`] built earlier; builds them only if they are missing.
    pub fn find(target: &Path) -> Result<Self> {
        let built = Self::in_target(target);
        if built.janitor().is_file() {
            return Ok(built);
        }
        Self::build(target)
    }

    fn in_target(target: &Path) -> Self {
        Self {
            folder: target.join(triple()).join("release"),
        }
    }

    /// The program of the container that holds a pod's namespaces.
    pub fn pause(&self) -> PathBuf {
        self.folder.join("kni-pause")
    }

    /// The server and client that pods of tests and demonstrations run.
    pub fn probe(&self) -> PathBuf {
        self.folder.join("kni-probe")
    }

    /// Removes leftovers of a node.
    pub fn janitor(&self) -> PathBuf {
        self.folder.join("kni-janitor")
    }
}

fn triple() -> String {
    format!("{}-unknown-linux-gnu", env::consts::ARCH)
}
