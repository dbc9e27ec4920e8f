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
        let triple = format!("{}-unknown-linux-gnu", env::consts::ARCH);
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
        Ok(Self {
            folder: target.join(triple).join("release"),
        })
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
