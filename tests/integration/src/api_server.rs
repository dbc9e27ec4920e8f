//! Runs a real API server with its store in a separate network namespace, for tests of objects without a node.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    process::{Child, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use kni_local_node::{COLLECTION, programs::ApiServerPrograms, spawn::spawn_tied};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{eventually_sync, machine, namespaces::Namespaces, wait::patience};

/// Each look is a process whose start costs a tenth of a second of CPU time.
const PAUSE: Duration = Duration::from_millis(250);
/// The address of the API server inside the namespace.
const ADDRESS: &str = "https://127.0.0.1:6443";
const ETCD: &str = "http://127.0.0.1:2379";
/// The token of the administrator.
const TOKEN: &str = "administrator";
/// The `OpenAPI` path with the schemas of the API group.
const EXPLAINED: &str = "/openapi/v3/apis/kni.dev/v1alpha1";

/// etcd and kube-apiserver, reachable from their namespace only. They are killed when the value is dropped or this
/// process exits.
#[derive(Debug)]
pub struct ApiServer {
    inside: Namespaces,
    programs: ApiServerPrograms,
    /// In the order of their start.
    running: Vec<(&'static str, Child)>,
    /// The number of kubectl's cache: with a new cache kubectl reads the schemas of the server again.
    cache: AtomicU32,
    /// All files of the servers.
    folder: TempDir,
}

impl ApiServer {
    /// Starts both servers and waits until the API server is ready. `name` appears in messages only.
    pub fn start(name: &str) -> Result<Self> {
        let mut server = Self {
            inside: Namespaces::fresh_net(name)?,
            programs: ApiServerPrograms::find(machine::programs)?,
            running: Vec::new(),
            cache: AtomicU32::new(0),
            folder: tempfile::Builder::new().prefix("kni-api-server-").tempdir()?,
        };
        server.write_files()?;
        server.spawn("etcd", server.etcd())?;
        server.spawn("kube-apiserver", server.kube_apiserver())?;
        let deadline = Instant::now() + patience();
        // The API server itself creates the namespace: there are no controllers.
        while server.kubectl(&["get", "--raw", "/readyz"]).is_err()
            || server.kubectl(&["get", "ns", "default"]).is_err()
        {
            let ended = server.ended()?;
            if ended.is_some() || Instant::now() > deadline {
                let log = server.log(ended.unwrap_or("kube-apiserver"));
                bail!("the API server does not become ready; ended: {ended:?}\n{log}");
            }
            thread::sleep(PAUSE);
        }
        Ok(server)
    }

    /// Applies the definitions in a folder with a kustomization, and waits until every kind can be used and explained.
    pub fn install(&self, folder: &Path) -> Result<()> {
        self.kubectl(&["apply", "--server-side", "-k", &folder.display().to_string()])?;
        let established = ["wait", "--for=condition=Established", "--timeout=60s", "crd", "--all"];
        self.kubectl(&established)?;
        let definitions = self.kubectl_json(&["get", "crd"])?;
        let kinds: Vec<&str> = definitions["items"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|definition| definition["spec"]["names"]["kind"].as_str())
            .collect();
        ensure!(!kinds.is_empty(), "{} has no definition", folder.display());
        eventually_sync(patience(), || {
            ensure!(self.explains(&kinds), "{EXPLAINED} does not show all of {kinds:?}");
            Ok(())
        })?;
        self.cache.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The schemas of the kinds of `kni.dev`, which kubectl uses to explain fields.
    pub fn explained(&self) -> Result<Value> {
        let text = self.kubectl(&["get", "--raw", EXPLAINED])?;
        serde_json::from_str(&text).context(EXPLAINED)
    }

    fn explains(&self, kinds: &[&str]) -> bool {
        self.explained().is_ok_and(|explained| {
            let schemas = &explained["components"]["schemas"];
            kinds
                .iter()
                .all(|kind| schemas.get(format!("dev.kni.v1alpha1.{kind}")).is_some())
        })
    }

    /// Runs kubectl as the administrator and returns its output, which is also part of the error.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.kubectl_with_input(args, "")
    }

    /// [`Self::kubectl`] with standard input.
    pub fn kubectl_with_input(&self, args: &[&str], input: &str) -> Result<String> {
        let output = self.run(args, input)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kubectl {}: {}", args.join(" "), said.trim());
        String::from_utf8(output.stdout).context("kubectl does not answer in UTF-8")
    }

    /// [`Self::kubectl`] with its output as JSON.
    pub fn kubectl_json(&self, args: &[&str]) -> Result<Value> {
        let text = self.kubectl(&[args, &["-o", "json"]].concat())?;
        serde_json::from_str(&text).context("kubectl does not answer in JSON")
    }

    /// Creates the objects of `manifest`, YAML or JSON.
    pub fn create(&self, manifest: &str) -> Result<()> {
        self.kubectl_with_input(&["create", "-f", "-"], manifest).map(drop)
    }

    /// The message of kubectl if the API server refuses a request; an error if the server accepts it.
    pub fn refusal(&self, args: &[&str], input: &str) -> Result<String> {
        let output = self.run(args, input)?;
        ensure!(!output.status.success(), "kubectl {} succeeds", args.join(" "));
        String::from_utf8(output.stderr).context("kubectl does not answer in UTF-8")
    }

    /// The administrator's file for clients that run in the network namespace of the server.
    pub fn kubeconfig(&self) -> String {
        self.path("kubeconfig").display().to_string()
    }

    /// Runs a client of the API server in its network namespace, with the server's folder as its home, and returns its
    /// output.
    pub fn run_program(&self, program: &Path, args: &[&str]) -> Result<String> {
        let mut client = self.inside.command(program);
        client.args(args).env("HOME", self.folder.path()).stdin(Stdio::null());
        let done = client.output().with_context(|| format!("run {}", program.display()))?;
        let said = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "{} {args:?}: {said}", program.display());
        String::from_utf8(done.stdout).context("not UTF-8")
    }

    fn run(&self, args: &[&str], input: &str) -> Result<Output> {
        let mut kubectl = self.inside.command(self.programs.path("kubectl"));
        let cache = format!("cache-{}", self.cache.load(Ordering::Relaxed));
        kubectl.arg("--kubeconfig").arg(self.path("kubeconfig"));
        kubectl.arg("--cache-dir").arg(self.path(&cache)).args(args);
        kubectl.env(COLLECTION.0, COLLECTION.1).stdin(Stdio::piped());
        kubectl.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = kubectl.spawn().context("run kubectl")?;
        let mut stdin = child.stdin.take().context("no stdin")?;
        // A kubectl that refuses its arguments does not read its input.
        drop(stdin.write_all(input.as_bytes()));
        drop(stdin);
        child.wait_with_output().context("wait for kubectl")
    }

    fn write_files(&self) -> Result<()> {
        let authority_key = KeyPair::generate()?;
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root = authority.self_signed(&authority_key)?.pem();
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::IpAddress([127, 0, 0, 1].into())];
        let certificate = params.signed_by(&key, &Issuer::new(authority, authority_key))?.pem();
        let accounts = KeyPair::generate()?;
        let kubeconfig = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "it", "cluster": {
                "server": ADDRESS,
                "certificate-authority": self.path("root.crt"),
            }}],
            "users": [{ "name": "it", "user": { "token": TOKEN }}],
            "contexts": [{ "name": "it", "context": { "cluster": "it", "user": "it" }}],
            "current-context": "it",
        });
        for (name, text) in [
            ("root.crt", root),
            ("server.crt", certificate),
            ("server.key", key.serialize_pem()),
            ("accounts.key", accounts.serialize_pem()),
            ("accounts.pub", accounts.public_key_pem()),
            ("tokens.csv", format!("{TOKEN},admin,admin,\"system:masters\"\n")),
            ("kubeconfig", kubeconfig.to_string()),
        ] {
            fs::write(self.path(name), text).with_context(|| name.to_owned())?;
        }
        Ok(())
    }

    fn etcd(&self) -> Vec<String> {
        vec![
            format!("--data-dir={}", self.path("etcd").display()),
            format!("--listen-client-urls={ETCD}"),
            format!("--advertise-client-urls={ETCD}"),
            "--listen-peer-urls=http://127.0.0.1:2380".into(),
            "--unsafe-no-fsync".into(),
        ]
    }

    fn kube_apiserver(&self) -> Vec<String> {
        let file = |option: &str, name: &str| format!("--{option}={}", self.path(name).display());
        vec![
            format!("--etcd-servers={ETCD}"),
            "--secure-port=6443".into(),
            "--bind-address=127.0.0.1".into(),
            // The API server accepts no loopback address here.
            "--advertise-address=192.0.2.1".into(),
            "--endpoint-reconciler-type=none".into(),
            file("tls-cert-file", "server.crt"),
            file("tls-private-key-file", "server.key"),
            file("token-auth-file", "tokens.csv"),
            file("service-account-key-file", "accounts.pub"),
            file("service-account-signing-key-file", "accounts.key"),
            "--service-account-issuer=https://kubernetes.default.svc".into(),
            "--authorization-mode=RBAC".into(),
            "--service-cluster-ip-range=10.96.0.0/16,fd00:96::/112".into(),
            // Without controllers there are no service accounts for pods.
            "--disable-admission-plugins=ServiceAccount".into(),
        ]
    }

    fn spawn(&mut self, name: &'static str, arguments: Vec<String>) -> Result<()> {
        let log = File::create(self.path(&format!("{name}.log")))?;
        let mut command = self.inside.command(self.programs.path(name));
        command.args(arguments).current_dir(self.folder.path());
        command.env(COLLECTION.0, COLLECTION.1);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = spawn_tied(command).with_context(|| format!("start {name}"))?;
        self.running.push((name, child));
        Ok(())
    }

    /// A process that has exited by itself.
    fn ended(&mut self) -> Result<Option<&'static str>> {
        for (name, child) in &mut self.running {
            if child.try_wait()?.is_some() {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    /// The end of the log of `name`.
    fn log(&self, name: &str) -> String {
        let text = fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default();
        let skipped = text.lines().count().saturating_sub(20);
        text.lines().skip(skipped).collect::<Vec<_>>().join("\n")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- the end of kube-apiserver.log ---\n{}", self.log("kube-apiserver"));
        }
        for (_, child) in self.running.iter_mut().rev() {
            // The signal fails for a process that has already exited.
            drop(child.kill());
            drop(child.wait());
        }
    }
}
