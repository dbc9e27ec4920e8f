//! Runs `kni-node` for a cluster, with a folder of its own.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use kni_integration::agent::{knictl_binary, node_binary};
use serde_json::Value;

/// The image of the agent.
pub(crate) struct Image<'a> {
    pub(crate) archive: &'a Path,
    pub(crate) tag: &'a str,
    /// Whether the kubelets make the networks of pods by KNI, with `deploy/overlays/kni`.
    pub(crate) kni: bool,
}

/// A cluster that ends with the value.
pub(crate) struct Clustered {
    program: PathBuf,
    /// The folder of its kubeconfig, scripts and logs.
    pub(crate) folder: PathBuf,
    tools: PathBuf,
}

impl Clustered {
    /// No cluster yet.
    pub(crate) fn new() -> Result<Self> {
        let program = node_binary()?;
        // The shortcuts of the folder name it.
        knictl_binary()?;
        let target = program.ancestors().nth(2).context("no target folder")?;
        Ok(Self {
            folder: target.join(format!("test-cluster-{}", std::process::id())),
            tools: target.join("tools/node"),
            program,
        })
    }

    fn command(&self, action: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--folder").arg(&self.folder);
        command.arg("--tools").arg(&self.tools);
        command.arg("--programs").args(self.program.parent());
        command.args(action).stdin(Stdio::null());
        command
    }

    /// Begins to start two nodes.
    pub(crate) fn begin(&self, image: &Image<'_>) -> Result<Child> {
        let mut up = self.command(&["up", "--nodes", "2", "--tag", image.tag]);
        up.arg("--image").arg(image.archive).stdout(Stdio::piped());
        if image.kni {
            up.arg("--kni");
        }
        up.spawn().context("run kni-node up")
    }

    /// Starts two nodes; returns what the command printed.
    pub(crate) fn up(&self, image: &Image<'_>) -> Result<String> {
        finished("up", self.begin(image)?)
    }

    /// Ends the cluster; returns what the command printed.
    pub(crate) fn down(&self) -> Result<String> {
        let mut down = self.command(&["down"]);
        finished(
            "down",
            down.stdout(Stdio::piped()).spawn().context("run kni-node down")?,
        )
    }

    /// Runs a script of the folder.
    pub(crate) fn run(&self, script: &str, args: &[&str]) -> Result<String> {
        let mut command = Command::new(self.folder.join(script));
        let done = command.args(args).output().with_context(|| format!("run {script}"))?;
        let errors = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "{script} {}: {errors}", args.join(" "));
        String::from_utf8(done.stdout).context("not UTF-8")
    }

    /// Runs kubectl outside of the nodes.
    pub(crate) fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.run("kubectl", args)
    }

    /// The items of a kind of objects.
    pub(crate) fn list(&self, args: &[&str]) -> Result<Vec<Value>> {
        let text = self.kubectl(&[&["get", "-o", "json"], args].concat())?;
        let list: Value = serde_json::from_str(&text).context("a list")?;
        list["items"].as_array().cloned().context("items")
    }

    /// The process that owns the nodes, as `up` has recorded it.
    pub(crate) fn owner(&self) -> Result<i32> {
        let text = fs::read_to_string(self.folder.join("state.json")).context("state")?;
        let state: Value = serde_json::from_str(&text).context("state")?;
        let owner = state["keeper"].as_i64().context("no owner")?;
        Ok(i32::try_from(owner)?)
    }
}

impl Drop for Clustered {
    fn drop(&mut self) {
        if let Err(error) = self.down() {
            eprintln!("{error:#}");
        }
    }
}

/// Waits for the end of a command; failure quotes its output.
pub(crate) fn finished(what: &str, child: Child) -> Result<String> {
    let done = child
        .wait_with_output()
        .with_context(|| format!("wait for kni-node {what}"))?;
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    if !done.status.success() {
        bail!("kni-node {what}: {}\n{text}", done.status);
    }
    Ok(text)
}
