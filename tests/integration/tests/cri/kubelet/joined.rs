//! Tests a node whose agent watches the API server: policies, names, controllers in pods, and an outage of the API
//! server.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{kubelet::random_hex, require};
use kni_local_node::{LocalNode, Part};
use serde_json::{Value, json};

use super::{
    scene::{PATIENCE, PORT, Scene, container, pod, server},
    static_pods::StaticPod,
};

/// An image with kubectl: a controller that connects to its cluster with its service account.
const KUBECTL: &str = "kni.local/kubectl:1";
/// No report for this time: the connection is blocked. One follows each second, and requests each 10 ms.
const SILENCE: Duration = Duration::from_secs(3);

#[test]
fn the_agent_follows_the_api_server() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut scene = Scene::joined("kubelet-joined")?;
    scene
        .local()
        .import(KUBECTL, &scene.local().programs().path("kubectl"))?;
    scene.create(&[
        server("web", &json!({ "app": "web" })),
        server("client", &json!({})),
        server("known", &json!({})),
        service(),
    ])?;
    let address = scene.addresses("web")?[0].to_string();
    let watch = container("watches", &["ping-loop", &address, &PORT.to_string()]);
    scene.create(&[pod("watch", &json!({}), &json!([watch]))])?;
    lists(&scene)?;
    names(&mut scene)?;
    controller(&mut scene)?;
    policy(&mut scene, &address)?;
    a_static_pod(&mut scene)?;
    without_api_server(&mut scene, &address)
}

/// Checks that the output of `kubectl get` contains no JSON and no saturated number.
fn lists(scene: &Scene) -> Result<()> {
    let shown = scene.local().kubectl(&["get", "pnw,nnw,pna", "-o", "wide"])?;
    println!("{shown}");
    for expected in ["10.10.0.0/16,fd10::/64", ">9e18", "default,blue,red"] {
        assert!(shown.contains(expected), "{expected} is missing in\n{shown}");
    }
    for unexpected in ['[', '{', '"'] {
        assert!(!shown.contains(unexpected), "{unexpected} in\n{shown}");
    }
    assert!(!shown.contains(&i64::MAX.to_string()), "{shown}");
    Ok(())
}

fn names(scene: &mut Scene) -> Result<()> {
    let ip = scene.get("service/web", "{.spec.clusterIP}")?;
    for name in ["web", "web.default", "web.default.svc.cluster.local"] {
        let resolve = ["exec", "client", "--", "/kni-probe", "resolve", name];
        assert_eq!(scene.local().kubectl(&resolve)?.trim(), ip, "{name}");
    }
    let unknown = [
        "exec",
        "client",
        "--",
        "/kni-probe",
        "resolve",
        "nothing.default.svc.cluster.local",
    ];
    assert!(scene.local().kubectl(&unknown).is_err());
    assert_eq!(scene.ask("client", "web", 80, "tcp")?, "web");
    Ok(())
}

/// Tests that a pod reaches the API server at the address of its Service, and is identified by its service account.
fn controller(scene: &mut Scene) -> Result<()> {
    let whoami = json!({
        "name": "main", "image": KUBECTL, "imagePullPolicy": "Never", "args": ["auth", "whoami", "-v=6"],
    });
    let mut once = pod("controller", &json!({}), &json!([whoami]));
    once["spec"]["restartPolicy"] = "Never".into();
    scene.local().apply(&once)?;
    scene.wait_for("pod/controller", "{.status.phase}", "Succeeded")?;
    let logs = scene.local().kubectl(&["logs", "controller"])?;
    assert!(logs.contains("system:serviceaccount:default:default"), "{logs}");
    assert!(logs.contains("https://10.96.0.1:443/"), "{logs}");
    scene
        .local()
        .kubectl(&["delete", "pod", "controller", "--grace-period=0"])
        .map(drop)
}

/// Tests that a default deny stops new and established connections, and that both work after its removal.
fn policy(scene: &mut Scene, address: &str) -> Result<()> {
    wait_for_answers(scene)?;
    scene.local().apply(&json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": { "name": "deny", "namespace": "default" },
        "spec": { "podSelector": {}, "policyTypes": ["Ingress"] },
    }))?;
    let new = |node: &LocalNode| {
        let port = PORT.to_string();
        let ask = [
            "exec",
            "client",
            "--",
            "/kni-probe",
            "ask",
            address,
            &port,
            "--timeout-ms",
            "500",
        ];
        node.kubectl(&ask).is_ok()
    };
    scene
        .machine
        .local
        .wait("new connections are denied", PATIENCE, |node| Ok(!new(node)))?;
    // The last report may be of before. None follows while no answer arrives.
    let (mut last, mut since) = (report(scene.local())?, Instant::now());
    scene
        .machine
        .local
        .wait("the established connection is blocked", PATIENCE, |node| {
            let now = report(node)?;
            if now != last {
                (last, since) = (now, Instant::now());
            }
            Ok(since.elapsed() >= SILENCE)
        })?;
    scene.local().kubectl(&["delete", "networkpolicy", "deny"])?;
    scene
        .machine
        .local
        .wait("new connections work", PATIENCE, |node| Ok(new(node)))?;
    wait_for_answers(scene)
}

/// Tests a pod of a manifest on the node, of which the API server has a mirror.
fn a_static_pod(scene: &mut Scene) -> Result<()> {
    let fixed = StaticPod::write(scene, "fixed")?;
    fixed.answers(scene, "client")?;
    fixed.is_reported(scene)?;
    fixed.answers(scene, "client")?;
    fixed.remove(scene)
}

/// Writes the manifest of a static pod while there is no API server, and waits until the agent has refused it by name.
fn a_static_pod_waits(scene: &mut Scene) -> Result<StaticPod> {
    let waits = StaticPod::write(scene, "waits")?;
    let (agent, pod) = (&scene.agent, format!("pod default/{}, ", waits.mirror));
    let is_refusal = |line: &str| line.contains(&pod) && line.contains("whose mirror pod the kubelet creates");
    let refused = "the static pod waits for its mirror pod";
    scene
        .machine
        .local
        .wait(refused, PATIENCE, |_| Ok(agent.log().lines().any(is_refusal)))?;
    Ok(waits)
}

/// Tests an outage of the API server: traffic continues, a pod whose sandbox has died gets a new one with an
/// interface, and a static pod waits for its mirror pod.
fn without_api_server(scene: &mut Scene, address: &str) -> Result<()> {
    let before = running(scene.local(), "known")?;
    scene.machine.local.kill(Part::ApiServer)?;
    let port = PORT.to_string();
    let ask = ["/kni-probe", "ask", address, &port, "--timeout-ms", "1000"];
    for name in ["client", "known"] {
        let answer = running(scene.local(), name)?.exec(scene.local(), &ask)?;
        assert!(answer.starts_with("web "), "{name} hears {answer:?}");
    }
    scene
        .local()
        .ctr(&["task", "kill", "--signal", "SIGKILL", &before.sandbox])?;
    scene
        .machine
        .local
        .wait("another sandbox of the pod reaches others", PATIENCE, |node| {
            let pod = running(node, "known")?;
            ensure!(pod.sandbox != before.sandbox, "the old sandbox runs");
            Ok(pod.exec(node, &ask)?.starts_with("web "))
        })?;
    let waits = a_static_pod_waits(scene)?;

    scene.machine.local.start(Part::ApiServer)?;
    let ready = ["get", "--raw", "/readyz"];
    scene.machine.local.wait("the API server is ready", PATIENCE, |node| {
        Ok(node.kubectl(&ready)? == "ok")
    })?;
    scene.wait_for_pods("condition=Ready")?;
    // Until the kubelet has reported the new sandbox, the API server still has the address of the killed one.
    scene
        .machine
        .local
        .wait("the reported address of the pod answers", PATIENCE, |node| {
            let ip = node.kubectl(&["get", "pod/known", "-o", "jsonpath={.status.podIP}"])?;
            let ask = ["/kni-probe", "ask", &ip, &port, "--timeout-ms", "1000"];
            Ok(running(node, "client")?.exec(node, &ask)?.starts_with("known "))
        })?;
    waits.answers(scene, "client")?;
    wait_for_answers(scene)
}

/// The running containers of a pod, by their ids in containerd, which is independent of the API server.
struct Running {
    sandbox: String,
    container: String,
}

impl Running {
    /// Runs a program in the container; returns its standard output.
    fn exec(&self, node: &LocalNode, command: &[&str]) -> Result<String> {
        let id = random_hex(8);
        let exec = ["task", "exec", "--exec-id", &id, &self.container];
        node.ctr(&[&exec[..], command].concat())
    }
}

fn running(node: &LocalNode, pod: &str) -> Result<Running> {
    let tasks = node.ctr(&["task", "ls"])?;
    let runs = |id: &str| {
        let mut lines = tasks.lines().map(str::split_whitespace);
        lines.any(|mut words| words.next() == Some(id) && words.nth(1) == Some("RUNNING"))
    };
    let find = |kind: &str| {
        let filter = format!("labels.\"io.kubernetes.pod.name\"=={pod},labels.\"io.cri-containerd.kind\"=={kind}");
        let listed = node.ctr(&["containers", "ls", "-q", &filter])?;
        let id = listed.lines().find(|id| runs(id)).map(str::to_owned);
        id.with_context(|| format!("no {kind} of {pod} runs"))
    };
    Ok(Running {
        sandbox: find("sandbox")?,
        container: find("container")?,
    })
}

fn wait_for_answers(scene: &mut Scene) -> Result<()> {
    let before = answers(scene.local())?;
    scene
        .machine
        .local
        .wait("the established connection works", PATIENCE, |node| {
            Ok(answers(node)? > before)
        })
}

/// The number of answers that the probing pod has received.
fn answers(node: &LocalNode) -> Result<u64> {
    Ok(report(node)?.1)
}

/// The time of the last report of the probing pod, and the number of answers; it reports each second.
fn report(node: &LocalNode) -> Result<(String, u64)> {
    let line = node.kubectl(&["logs", "watch", "--tail=1", "--timestamps"])?;
    let (time, report) = line.split_once(' ').with_context(|| format!("report {line:?}"))?;
    let report: Value = serde_json::from_str(report).with_context(|| format!("report {report:?}"))?;
    Ok((time.to_owned(), report["answers"].as_u64().context("no count")?))
}

fn service() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": "web", "namespace": "default" },
        "spec": { "selector": { "app": "web" }, "ports": [{ "port": 80, "targetPort": PORT }] },
    })
}
