//! Builds the image of the agent from this source with `cargo xtask image`.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

pub(crate) use kni_local_node::kustomize::AGENT_IMAGE as NAME;

/// Builds the image with a tag; returns the archive. `KNI_IMAGES` names a folder with a prebuilt one.
pub(crate) fn build(tag: &str) -> Result<PathBuf> {
    let (root, file) = (root(), format!("test-{tag}.tar"));
    if let Some(made) = env::var_os("KNI_IMAGES") {
        return Ok(Path::new(&made).join(file));
    }
    let archive = root.join("target/image").join(file);
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(&root);
    cargo.args(["xtask", "image", "--debug"]);
    cargo
        .args(["--tag", &format!("{NAME}:{tag}"), "--output"])
        .arg(&archive);
    // The variables that cargo set for this test would cause a rebuild.
    for (name, _) in env::vars_os() {
        let own = name
            .to_str()
            .is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_"));
        if own || name == "LD_LIBRARY_PATH" {
            cargo.env_remove(name);
        }
    }
    let done = cargo.output().context("run cargo xtask image")?;
    let said = [done.stdout, done.stderr].concat();
    ensure!(
        done.status.success(),
        "cargo xtask image: {}",
        String::from_utf8_lossy(&said)
    );
    Ok(archive)
}

/// The root of the repository.
pub(crate) fn root() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().nth(2).unwrap_or(package).to_owned()
}
