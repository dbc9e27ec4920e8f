//! Provides agents of earlier releases: those that variables of the environment name, or one built from the sources of
//! its last commit.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

/// The last commit whose agent pins maps of layout 2.
const LAYOUT_2: &str = "1b62b39";
/// The last commit whose agent enters its address blocks into the status of networks, and knows no fabric.
const WITHOUT_FABRIC: &str = "7019eaa";

/// The agent with layout 2, which `KNI_LAYOUT2_AGENT` names.
pub fn layout_2_agent() -> Result<Option<PathBuf>> {
    agent_of("KNI_LAYOUT2_AGENT", LAYOUT_2)
}

/// The agent of the previous release, which also enters its address blocks into the status of networks, and exchanges
/// no packets with other nodes: the one that `KNI_PREVIOUS_AGENT` names.
pub fn previous_agent() -> Result<Option<PathBuf>> {
    agent_of("KNI_PREVIOUS_AGENT", WITHOUT_FABRIC)
}

/// The agent that the variable names. Without it, long proofs build the one of the commit once, into `target/earlier`
/// (five minutes on two CPUs); otherwise `None` where it has not been built.
fn agent_of(variable: &str, commit: &str) -> Result<Option<PathBuf>> {
    if let Some(path) = env::var_os(variable) {
        return Ok(Some(path.into()));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
    let tree = root.join("target/earlier").join(commit);
    let agent = tree.join("target/debug/kni-agent");
    if !agent.exists() && crate::long() {
        build(&root, &tree, commit)?;
    }
    Ok(agent.exists().then_some(agent))
}

fn build(root: &Path, tree: &Path, commit: &str) -> Result<()> {
    if !tree.exists() {
        let path = tree.to_str().context("not UTF-8")?;
        run(Command::new("git")
            .current_dir(root)
            .args(["worktree", "add", "--force", "--detach", path, commit]))?;
    }
    let cargo = || {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(tree);
        for (name, _) in env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("CARGO_") || name == "KNI_EBPF_OBJECT" || name == "LD_LIBRARY_PATH" {
                cargo.env_remove(&*name);
            }
        }
        cargo
    };
    run(cargo().args(["xtask", "build-ebpf"]))?;
    run(cargo().args(["build", "--quiet", "--workspace", "--bin", "kni-agent"]))
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}
