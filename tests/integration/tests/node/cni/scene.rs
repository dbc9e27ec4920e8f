//! Provides a node with a CNI runtime.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
pub(crate) use kni_integration::patience;
use kni_integration::{AgentOptions, Manifest, Namespaces, agent::shim_binary, eventually, eventually_sync};
use kni_proto::{
    kni::{Network, QueryNodeNetworksRequest},
    runtime::{Interface, ListInterfacesRequest},
};
use serde_json::{Value, json};

use crate::watched::{Watched, warm};

/// State folder of the plugin, inside the node.
pub(crate) const STATE: &str = "/run/kni-cni";
/// Folder of deletes that wait for the agent.
pub(crate) const PENDING: &str = "/run/kni-cni/cni/pending";

/// The node, its agent and the plugin.
pub(crate) struct Scene {
    pub(crate) stage: Watched,
    shim: PathBuf,
}

/// One call of the plugin, as a runtime prepares it.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) container: String,
    pub(crate) netns: String,
    pub(crate) ifname: String,
    pub(crate) args: String,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) config: Value,
}

/// The result of a call.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    pub(crate) success: bool,
    pub(crate) stdout: String,
    pub(crate) took: Duration,
}

impl Call {
    /// A pod's `eth0` in the namespace of that name.
    pub(crate) fn new(container: &str, netns: &str) -> Self {
        Self {
            container: container.into(),
            netns: format!("/run/netns/{netns}"),
            ifname: "eth0".into(),
            args: format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=team;K8S_POD_NAME={netns};K8S_POD_UID=uid-{container}"),
            env: Vec::new(),
            config: json!({"cniVersion": "1.1.0", "name": "kni", "type": "kni-cni", "stateDir": STATE}),
        }
    }

    /// Replaces a value of the configuration.
    #[must_use]
    pub(crate) fn with(mut self, key: &str, value: Value) -> Self {
        self.config[key] = value;
        self
    }

    /// Adds annotations, as runtimes pass them.
    #[must_use]
    pub(crate) fn annotated(self, annotations: &Value) -> Self {
        self.with(
            "runtimeConfig",
            json!({"io.kubernetes.cri.pod-annotations": annotations}),
        )
    }

    /// Uses another interface.
    #[must_use]
    pub(crate) fn interface(mut self, ifname: &str) -> Self {
        ifname.clone_into(&mut self.ifname);
        self
    }
}

impl Outcome {
    /// The printed result or error.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error} in {:?}", self.stdout))
    }

    /// The result of a call that must succeed.
    #[track_caller]
    pub(crate) fn result(&self) -> Value {
        assert!(self.success, "{self:?}");
        self.json()
    }

    /// Checks that it succeeded and printed nothing.
    #[track_caller]
    pub(crate) fn assert_silent_success(&self) {
        assert!(self.success && self.stdout.is_empty(), "{self:?}");
    }

    /// The error of a call that must fail with this code.
    #[track_caller]
    pub(crate) fn error(&self, code: u64) -> Value {
        assert!(!self.success, "{self:?}");
        let error = self.json();
        assert_eq!(error["code"], code, "{error}");
        assert!(error["msg"].as_str().is_some_and(|msg| !msg.is_empty()), "{error}");
        assert!(error["cniVersion"].is_string(), "{error}");
        error
    }
}

impl Scene {
    pub(crate) async fn new(name: &str) -> Result<Self> {
        Self::with(name, Manifest::overlapping()).await
    }

    pub(crate) async fn with(name: &str, manifests: Vec<Manifest>) -> Result<Self> {
        Self::with_args(name, manifests, &[]).await
    }

    pub(crate) async fn with_args(name: &str, manifests: Vec<Manifest>, more: &[&str]) -> Result<Self> {
        let mut options = AgentOptions { manifests, ..warm(0) };
        options.args.extend(["--cni-state-dir".into(), STATE.into()]);
        options.args.extend(more.iter().map(|arg| (*arg).into()));
        Self::on(Watched::with(name, options).await?)
    }

    /// A runtime with a running agent.
    pub(crate) fn on(stage: Watched) -> Result<Self> {
        // Created here, so that a snapshot from before the first delete without an agent contains it, too.
        stage.node.enter(|| fs::create_dir_all(PENDING))??;
        let shim = stage.node.install(&shim_binary()?)?;
        Ok(Self { stage, shim })
    }

    /// Creates a namespace as a runtime does.
    pub(crate) fn netns(&self, name: &str) -> Result<Namespaces> {
        self.stage.node.ip(&[&format!("netns add {name}")])?;
        self.inside(name)
    }

    pub(crate) fn inside(&self, name: &str) -> Result<Namespaces> {
        self.stage.node.net_at(name, &Path::new("/run/netns").join(name))
    }

    pub(crate) fn remove_netns(&self, name: &str) -> Result<()> {
        self.stage.node.ip(&[&format!("netns del {name}")])
    }

    /// Runs the plugin to completion.
    pub(crate) fn call(&self, verb: &str, call: &Call) -> Result<Outcome> {
        let mut command = self.stage.node.command(&self.shim);
        command
            .env_clear()
            .env("CNI_COMMAND", verb)
            .env("CNI_PATH", "/opt/cni/bin");
        for (name, value) in [
            ("CNI_CONTAINERID", &call.container),
            ("CNI_NETNS", &call.netns),
            ("CNI_IFNAME", &call.ifname),
            ("CNI_ARGS", &call.args),
        ] {
            if !value.is_empty() {
                command.env(name, value);
            }
        }
        command.envs(call.env.iter().map(|(name, value)| (name, value)));
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let started = Instant::now();
        let mut child = command.spawn().with_context(|| self.shim.display().to_string())?;
        let mut stdin = child.stdin.take().context("no stdin")?;
        stdin.write_all(call.config.to_string().as_bytes())?;
        drop(stdin);
        let output = child.wait_with_output()?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(
            stderr.is_empty(),
            "{verb} of {} wrote on stderr: {stderr}",
            call.container
        );
        Ok(Outcome {
            success: output.status.success(),
            stdout: String::from_utf8(output.stdout)?,
            took: started.elapsed(),
        })
    }

    /// Runs an ADD that must succeed; returns its result.
    #[track_caller]
    pub(crate) fn add(&self, call: &Call) -> Result<Value> {
        Ok(self.call("ADD", call)?.result())
    }

    /// Runs a DEL that must succeed.
    #[track_caller]
    pub(crate) fn del(&self, call: &Call) -> Result<()> {
        self.call("DEL", call)?.assert_silent_success();
        Ok(())
    }

    /// A network as listed for clients of KNI.
    pub(crate) async fn network(&self, name: &str) -> Result<Network> {
        let request = QueryNodeNetworksRequest {};
        let answer = self
            .stage
            .kubelet
            .kni()
            .query_node_networks(request)
            .await?
            .into_inner();
        let found = answer.networks.into_iter().find(|network| network.name == name);
        found.with_context(|| format!("no network {name}"))
    }

    /// Number of used addresses of a network.
    pub(crate) async fn used(&self, network: &str) -> Result<u32> {
        Ok(self.network(network).await?.extradata["addresses_used"].parse()?)
    }

    /// The agent's interfaces of a sandbox.
    pub(crate) async fn listed(&self, sandbox: &str) -> Result<Vec<Interface>> {
        let request = ListInterfacesRequest {
            sandbox_id: sandbox.into(),
            ..Default::default()
        };
        let answer = self.stage.kubelet.runtime().list_interfaces(request).await?;
        Ok(answer.into_inner().interfaces)
    }

    /// From now on calls run a copy of the plugin, which may be uninstalled.
    pub(crate) fn use_copy(&mut self) -> Result<()> {
        let copy = Path::new("/run/copy-of-kni-cni");
        self.stage.node.enter(|| fs::copy(&self.shim, copy))??;
        copy.clone_into(&mut self.shim);
        Ok(())
    }

    /// Waits until a process runs the copy.
    pub(crate) fn wait_for_copy(&self) -> Result<()> {
        let copy = self.stage.node.enter(|| fs::metadata(&self.shim))??;
        eventually_sync(patience(), || {
            let runs = fs::read_dir("/proc")?.flatten().any(|process| {
                let program = fs::metadata(process.path().join("exe"));
                program.is_ok_and(|program| (program.dev(), program.ino()) == (copy.dev(), copy.ino()))
            });
            ensure!(runs, "no process runs {}", self.shim.display());
            Ok(())
        })
    }

    /// Removes the copy.
    pub(crate) fn uninstall_copy(&self) -> Result<()> {
        ensure!(self.shim.starts_with("/run"), "not a copy: {}", self.shim.display());
        Ok(self.stage.node.enter(|| fs::remove_file(&self.shim))??)
    }

    /// Names of the deletes that wait for the agent.
    pub(crate) fn pending(&self) -> Result<Vec<String>> {
        let names = self.stage.node.enter(|| {
            fs::read_dir(PENDING)?
                .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
                .collect::<std::io::Result<Vec<String>>>()
        });
        Ok(names??)
    }

    /// Waits until the condition is true.
    pub(crate) async fn until<F: Future<Output = Result<bool>>>(&self, what: &str, so: impl Fn() -> F) -> Result<()> {
        let came = eventually(patience(), async || {
            ensure!(so().await?, "{what} does not come");
            Ok(())
        })
        .await;
        came.with_context(|| format!("the agent's log:\n{}", self.stage.agent.log()))
    }
}
