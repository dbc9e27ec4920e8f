//! Tests every kind of container and of workload on a node whose pods get their networks by KNI: each container asks
//! the network with its first instruction.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{Ipv4Addr, TcpStream},
    process::{Child, ChildStdout, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::require;
use kni_local_node::image;
use serde_json::{Value, json};

use super::{
    super::{
        scene::{PATIENCE, PORT, Scene, container, pod, server},
        static_pods::StaticPod,
    },
    nothing_is_left,
};

/// Runs of the Job, each a pod that exits after its question.
const RUNS: u32 = 6;

#[test]
fn every_container_is_answered_at_once() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut scene = Scene::by_kni("kni-workloads")?;
    scene.create(&[server("server", &json!({}))])?;
    a_job_is_answered_in_every_first_run(&mut scene)?;
    init_and_sidecar_containers(&scene)?;
    an_ephemeral_container(&mut scene)?;
    a_stateful_set_replaces_its_pod(&mut scene)?;
    a_static_pod(&mut scene)?;
    a_port_is_forwarded(&scene)?;
    scene.local().kubectl(&["delete", "job,statefulset", "--all"])?;
    nothing_is_left(&mut scene)
}

/// A container that asks the server by an address of it, and exits: with 0 only if it is answered, without another try.
fn question(scene: &Scene, name: &str, family: usize) -> Result<Value> {
    let address = scene.addresses("server")?[family].to_string();
    Ok(container(name, &["ask", &address, &PORT.to_string()]))
}

fn a_job_is_answered_in_every_first_run(scene: &mut Scene) -> Result<()> {
    let containers = [question(scene, "asks-4", 0)?, question(scene, "asks-6", 1)?];
    scene.local().apply(&json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": { "name": "asks", "namespace": "default" },
        "spec": {
            "completions": RUNS,
            "parallelism": RUNS,
            // One failure ends the Job.
            "backoffLimit": 0,
            "template": { "spec": { "restartPolicy": "Never", "containers": containers } },
        },
    }))?;
    scene.wait_for("job/asks", "{.status.succeeded}", &RUNS.to_string())?;
    scene.local().kubectl(&["delete", "job", "asks"]).map(drop)
}

fn init_and_sidecar_containers(scene: &Scene) -> Result<()> {
    let port = (PORT + 1).to_string();
    let mut sidecar = container("sidecar", &["serve", "--tcp", &port, "--name", "sidecar"]);
    sidecar["restartPolicy"] = "Always".into();
    let serve = container(
        "serves",
        &["serve", "--tcp", &PORT.to_string(), "--name", "initialised"],
    );
    let mut pod = pod("initialised", &json!({}), &json!([serve]));
    pod["spec"]["initContainers"] = json!([question(scene, "first", 0)?, sidecar, question(scene, "second", 1)?]);
    scene.create(&[pod])?;
    let restarts = "{.status.initContainerStatuses[*].restartCount}";
    ensure!(scene.get("pod/initialised", restarts)? == "0 0 0");
    for address in scene.addresses("initialised")? {
        for (port, name) in [(PORT, "initialised"), (PORT + 1, "sidecar")] {
            ensure!(scene.ask("server", &address.to_string(), port, "tcp")? == name);
        }
    }
    Ok(())
}

fn an_ephemeral_container(scene: &mut Scene) -> Result<()> {
    let address = scene.addresses("server")?[0].to_string();
    let image = format!("--image={}", image::PROBE);
    let port = PORT.to_string();
    let debug = [
        &[
            "debug",
            "initialised",
            &image,
            "--image-pull-policy=Never",
            "--container=asks",
            "--",
        ][..],
        &["/kni-probe", "ask", &address, &port],
    ];
    scene.local().kubectl(&debug.concat())?;
    let code = "{.status.ephemeralContainerStatuses[?(@.name==\"asks\")].state.terminated.exitCode}";
    scene.wait_for("pod/initialised", code, "0")
}

/// A deleted pod of the set comes back by its name, and is reached at an address of its own.
fn a_stateful_set_replaces_its_pod(scene: &mut Scene) -> Result<()> {
    let labels = json!({ "app": "db" });
    let template = server("db", &labels);
    scene.local().apply(&json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": { "name": "db", "namespace": "default" },
        "spec": {
            "replicas": 2,
            "serviceName": "db",
            "selector": { "matchLabels": labels },
            "template": { "metadata": { "labels": labels }, "spec": template["spec"] },
        },
    }))?;
    scene.wait_for("statefulset/db", "{.status.readyReplicas}", "2")?;
    let uid = scene.get("pod/db-0", "{.metadata.uid}")?;
    scene.local().kubectl(&["delete", "pod", "db-0"])?;
    scene.machine.local.wait("db-0 is replaced", PATIENCE, |node| {
        let path = "jsonpath={.metadata.uid} {.status.conditions[?(@.type==\"Ready\")].status}";
        let now = node.kubectl(&["get", "pod/db-0", "-o", path])?;
        Ok(!now.starts_with(&uid) && now.ends_with("True"))
    })?;
    let others = scene.addresses("db-1")?;
    for address in scene.addresses("db-0")? {
        ensure!(!others.contains(&address), "{address} is that of two pods");
        ensure!(scene.ask("server", &address.to_string(), PORT, "tcp")? == "db");
    }
    Ok(())
}

/// A pod of a manifest on the node: it has a network before the API server knows it, and none once the file is away.
fn a_static_pod(scene: &mut Scene) -> Result<()> {
    let fixed = StaticPod::write(scene, "fixed")?;
    fixed.answers(scene, "server")?;
    fixed.remove(scene)
}

fn a_port_is_forwarded(scene: &Scene) -> Result<()> {
    let forward = Forward::start(scene, "server")?;
    let answer = scene.local().inside().enter(|| -> Result<String> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, forward.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.write_all(b"hello\n")?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer)?;
        Ok(answer)
    })??;
    ensure!(answer.starts_with("server 127.0.0.1:"), "{answer:?}");
    Ok(())
}

/// `kubectl port-forward`, until it is dropped.
struct Forward {
    kubectl: Child,
    /// Kept open: kubectl prints a line for each connection.
    output: BufReader<ChildStdout>,
    port: u16,
}

impl Forward {
    fn start(scene: &Scene, pod: &str) -> Result<Self> {
        let mut command = scene.local().kubectl_command();
        command.args(["port-forward", pod, &format!(":{PORT}")]);
        let mut kubectl = command.stdout(Stdio::piped()).spawn().context("kubectl port-forward")?;
        let output = kubectl.stdout.take().context("no stdout")?;
        let mut forward = Self {
            kubectl,
            output: BufReader::new(output),
            port: 0,
        };
        let mut line = String::new();
        forward.output.read_line(&mut line)?;
        let port = line.split("127.0.0.1:").nth(1).and_then(|rest| rest.split(' ').next());
        forward.port = port.with_context(|| format!("kubectl prints {line:?}"))?.parse()?;
        Ok(forward)
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.kubectl.kill());
        drop(self.kubectl.wait());
    }
}
