//! Tests the Helm chart with Helm itself: it contains what `kubectl apply -k` installs, refuses wrong values, and is
//! installed, upgraded and removed at a real API server.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    api_server::ApiServer,
    machine::{self, programs},
    require,
};
use serde_json::{Value, json};

use crate::api::repository;

const NAMESPACE: &str = "kni-system";
/// The name of the agents' configuration without kustomize's hash of its content.
const CONFIG: &str = "kni-agent-config";

/// Helm with its files in a folder of the test.
struct Helm {
    program: PathBuf,
    folder: tempfile::TempDir,
}

impl Helm {
    fn new() -> Result<Self> {
        Ok(Self {
            program: machine::helm()?.path("helm"),
            folder: tempfile::tempdir()?,
        })
    }

    /// Runs Helm; its output, or its messages as the error.
    fn run(&self, args: &[&str]) -> Result<String> {
        let mut helm = std::process::Command::new(&self.program);
        helm.args(args).stdin(Stdio::null());
        for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            helm.env(variable, self.folder.path());
        }
        let done = helm.output().context("run helm")?;
        let said = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "helm {args:?}: {said}");
        String::from_utf8(done.stdout).context("helm does not answer in UTF-8")
    }

    fn template(&self, options: &[&str]) -> Result<String> {
        let chart = chart();
        let chart = chart.to_str().context("path")?;
        let args = ["template", "kni", chart, "--namespace", NAMESPACE, "--include-crds"];
        self.run(&[&args[..], options].concat())
    }
}

fn chart() -> PathBuf {
    repository().join("deploy/helm/kni")
}

/// The objects of a YAML text by kind and name, without what may differ: the hash in the configuration's name, the
/// namespace that kustomize gives objects without one, and the annotation by which the chart rolls out the agents.
fn objects(text: &str) -> Result<BTreeMap<(String, String), Value>> {
    let mut found = BTreeMap::new();
    let hashed = text
        .split([' ', '\n'])
        .find(|word| word.starts_with(&format!("{CONFIG}-")));
    let text = hashed.map_or_else(|| text.to_owned(), |hashed| text.replace(hashed, CONFIG));
    for document in text.split("\n---") {
        let mut object: Value = serde_saphyr::from_str(document).context("YAML")?;
        let Some(kind) = object["kind"].as_str().map(str::to_owned) else {
            continue;
        };
        let name = object["metadata"]["name"].as_str().context("a name")?.to_owned();
        let has_no_namespace = ["PriorityClass", "PriorityLevelConfiguration", "FlowSchema"].contains(&kind.as_str());
        if kind.starts_with("Validating") || kind.starts_with("Cluster") || has_no_namespace {
            object["metadata"]
                .as_object_mut()
                .context("metadata")?
                .remove("namespace");
        }
        if kind == "ConfigMap" {
            // Compared by content: the chart has no comments.
            let config = object["data"]["config.yaml"].as_str().context("config.yaml")?;
            object["data"]["config.yaml"] = serde_saphyr::from_str::<Value>(config)?;
        }
        if let Some(template) = object
            .pointer_mut("/spec/template/metadata")
            .and_then(Value::as_object_mut)
        {
            let emptied = template
                .get_mut("annotations")
                .and_then(Value::as_object_mut)
                .is_some_and(|annotations| {
                    annotations.remove("kni.dev/config");
                    annotations.is_empty()
                });
            if emptied {
                template.remove("annotations");
            }
        }
        if let Some(pod) = object.pointer_mut("/spec/template/spec") {
            sort_volumes(pod);
        }
        found.insert((kind, name), object);
    }
    Ok(found)
}

/// Sorts volumes and mounts, whose order means nothing.
fn sort_volumes(pod: &mut Value) {
    let by = |list: &mut Value, key: &str| {
        if let Some(list) = list.as_array_mut() {
            list.sort_by_key(|item| item[key].as_str().map(str::to_owned));
        }
    };
    by(&mut pod["volumes"], "name");
    for container in pod["containers"].as_array_mut().into_iter().flatten() {
        by(&mut container["volumeMounts"], "mountPath");
    }
}

/// The objects of a kustomization of `deploy/`, but for the namespace, which Helm's user creates.
fn kustomized(folder: &Path) -> Result<BTreeMap<(String, String), Value>> {
    let kubectl = programs()?.path("kubectl");
    let done = std::process::Command::new(kubectl)
        .arg("kustomize")
        .arg(folder)
        .output()?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let mut objects = objects(&String::from_utf8(done.stdout)?)?;
    objects
        .remove(&("Namespace".to_owned(), NAMESPACE.to_owned()))
        .context("the namespace")?;
    Ok(objects)
}

#[test]
fn the_chart_installs_what_kustomize_does() -> Result<()> {
    require!(machine);
    let helm = Helm::new()?;
    for (folder, options) in [("deploy", &[][..]), ("deploy/overlays/kni", &["--set", "mode=kni"])] {
        let expected = kustomized(&repository().join(folder))?;
        let rendered = objects(&helm.template(options)?)?;
        let names = |objects: &BTreeMap<(String, String), Value>| objects.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&rendered), names(&expected), "{folder}");
        // The definitions of the chart are copies of those in `deploy/crds`; kustomize writes their numbers
        // differently.
        let others = expected
            .iter()
            .filter(|((kind, _), _)| kind != "CustomResourceDefinition");
        let differing: Vec<_> = others.filter(|(name, object)| rendered[*name] != **object).collect();
        assert!(differing.is_empty(), "{folder}: the chart differs in {differing:#?}");
    }
    Ok(())
}

#[test]
fn kni_controller_runs_on_the_control_plane_unless_other_nodes_are_named() -> Result<()> {
    require!(machine);
    let helm = Helm::new()?;
    let terms = |options: &[&str]| -> Result<Option<Value>> {
        let objects = objects(&helm.template(options)?)?;
        let deployment = &objects[&("Deployment".to_owned(), "kni-controller".to_owned())];
        let affinity = deployment.pointer("/spec/template/spec/affinity").context("affinity")?;
        let required = "/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
        Ok(affinity.pointer(required).cloned())
    };
    let label = json!({ "key": "node-role.kubernetes.io/control-plane", "operator": "Exists" });
    assert_eq!(terms(&[])?, Some(json!([{ "matchExpressions": [label] }])));
    let other = r#"controller.affinity={"podAntiAffinity":{}}"#;
    assert_eq!(terms(&["--set-json", other])?, None);
    Ok(())
}

#[test]
fn wrong_values_are_refused_by_name() -> Result<()> {
    require!(machine);
    let helm = Helm::new()?;
    for (value, field) in [
        ("mode=other", "/mode"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("apiServer.port=0", "/apiServer/port"),
        ("apiServer.prot=6443", "prot"),
        ("cni.binDir=relative/path", "/cni/binDir"),
        ("maxUnavailable=many", "/maxUnavailable"),
        ("imagee.tag=1", "imagee"),
        ("image.digest=sha256:12", "/image/digest"),
        ("controller.replicas=0", "/controller/replicas"),
        ("nodeSelector.zone=1", "/nodeSelector/zone"),
    ] {
        let refused = helm
            .template(&["--set", value])
            .err()
            .with_context(|| format!("{value} is accepted"))?;
        let refused = refused.to_string();
        assert!(refused.contains(field), "{value}: {refused}");
    }
    Ok(())
}

#[test]
fn the_chart_is_installed_upgraded_and_removed() -> Result<()> {
    require!(machine);
    let server = ApiServer::start("chart")?;
    let helm = Helm::new()?;
    helm.run(&["lint", "--strict", chart().to_str().context("path")?])?;
    let kubeconfig = server.kubeconfig();
    let chart = chart();
    let chart = chart.to_str().context("path")?;
    // Helm runs in the network namespace of the API server.
    let run = |args: &[&str]| server.run_program(&helm.program, &[args, &["--kubeconfig", &kubeconfig]].concat());
    let said = run(&["install", "kni", chart, "--namespace", NAMESPACE, "--create-namespace"])?;
    ensure!(
        said.contains("kubectl kni doctor"),
        "the notes name no next step: {said}"
    );
    let count = |what: &str| -> Result<usize> {
        let objects = server.kubectl_json(&["get", what, "-A", "-l", "app.kubernetes.io/name"])?;
        Ok(objects["items"].as_array().map_or(0, Vec::len))
    };
    ensure!(
        count("daemonset")? == 1 && count("clusterrole")? >= 1,
        "not everything was installed"
    );
    server.kubectl(&[
        "wait",
        "--for=condition=Established",
        "--timeout=60s",
        "crd",
        "podnetworks.kni.dev",
    ])?;
    run(&[
        "upgrade",
        "kni",
        chart,
        "--namespace",
        NAMESPACE,
        "--set",
        "image.tag=0.2.0",
    ])?;
    let images = [
        "get",
        "daemonset",
        "-n",
        NAMESPACE,
        "-o",
        "jsonpath={.items[*].spec.template.spec.containers[0].image}",
    ];
    assert_eq!(server.kubectl(&images)?, "kni.local/kni-agent:0.2.0");
    run(&["uninstall", "kni", "--namespace", NAMESPACE])?;
    ensure!(
        count("daemonset")? + count("clusterrole")? + count("validatingadmissionpolicy")? == 0,
        "left behind"
    );
    // Definitions stay, and with them the objects of users.
    server.kubectl(&["get", "crd", "podnetworks.kni.dev"])?;
    Ok(())
}
