//! Tests common uses of pods: probes, services, exec, logs, host ports and the host network.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, TcpStream},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Manifest, node::NODE_V4, patience, require};
use serde_json::{Value, json};

use super::scene::{PATIENCE, PORT, Scene, container, pod, server};

const HOST_PORT: u16 = 30800;
/// The port of the pod on the host network.
const HOST_NETWORK_PORT: u16 = 7100;
/// Addresses of KNI's own service, outside the range of the API server's services.
const OURS: [&str; 2] = ["10.97.0.10", "fd00:97::10"];

#[test]
fn probes_services_exec_logs_and_host_ports_work() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    use_pods(&mut Scene::start("kubelet-pods")?)
}

/// Uses pods of a new node in every way that this module tests.
pub(crate) fn use_pods(scene: &mut Scene) -> Result<()> {
    scene.create(&[
        probed("web-1"),
        server("web-2", &json!({ "app": "web" })),
        server("client", &json!({})),
        host_port("published"),
        host_network("on-host"),
        service(),
    ])?;
    exec_and_logs(scene)?;
    services(scene)?;
    host(scene)?;
    probes(scene)
}

fn exec_and_logs(scene: &Scene) -> Result<()> {
    for (address, protocol) in scene.addresses("web-2")?.iter().zip(["tcp", "udp"]) {
        let answer = scene.ask("client", &address.to_string(), PORT, protocol)?;
        assert_eq!(answer, "web-2", "{address} by {protocol}");
    }
    let logs = scene.local().kubectl(&["logs", "web-2"])?;
    let client = scene.addresses("client")?;
    assert!(logs.contains(&format!("tcp connection from {}:", client[0])), "{logs}");
    assert!(logs.contains(&format!("udp datagram from [{}]:", client[1])), "{logs}");
    Ok(())
}

/// Tests the Service of kube-proxy by its address of either family, then KNI's by both, which the agent translates.
fn services(scene: &mut Scene) -> Result<()> {
    let ips = scene.get("service/web", "{.spec.clusterIPs[*]}")?;
    for ip in ips.split(' ') {
        assert_both_answer(scene, ip)?;
    }
    let manifests = [Manifest::file("ours.json", ours(scene)?.to_string())];
    Manifest::apply(&manifests, &scene.machine.node)?;
    for ip in OURS {
        assert_both_answer(scene, ip)?;
    }
    Ok(())
}

fn assert_both_answer(scene: &mut Scene, ip: &str) -> Result<()> {
    for wanted in ["web-1", "web-2"] {
        // The translation of a service takes a moment to be applied, and either backend may be chosen.
        let what = format!("{wanted} answers at {ip}");
        let port = "80";
        scene.machine.local.wait(&what, PATIENCE, |node| {
            let said = node.kubectl(&[
                "exec",
                "client",
                "--",
                "/kni-probe",
                "ask",
                ip,
                port,
                "--timeout-ms",
                "500",
            ])?;
            Ok(said.starts_with(wanted))
        })?;
    }
    Ok(())
}

fn host(scene: &Scene) -> Result<()> {
    assert_eq!(from_fabric(scene, HOST_PORT)?, "published");
    assert_eq!(from_fabric(scene, HOST_NETWORK_PORT)?, "on-host");
    assert_eq!(scene.addresses("on-host")?[0].to_string(), NODE_V4);
    assert_eq!(scene.ask("client", NODE_V4, HOST_NETWORK_PORT, "tcp")?, "on-host");
    for address in scene.addresses("web-2")? {
        assert_eq!(scene.ask("on-host", &address.to_string(), PORT, "tcp")?, "web-2");
    }
    Ok(())
}

/// Tests that a pod whose readiness probe fails leaves its service and returns, and that one whose liveness probe fails
/// is restarted.
fn probes(scene: &mut Scene) -> Result<()> {
    let ready = "{.status.conditions[?(@.type==\"Ready\")].status}";
    let restarts = "{.status.containerStatuses[?(@.name==\"live\")].restartCount}";
    let events = scene.local().kubectl(&["get", "events"])?;
    assert_eq!(
        scene.get("pod/web-1", restarts)?,
        "0",
        "nothing has failed so far:\n{events}"
    );
    let run = |scene: &Scene, container: &str, task: &str| {
        let exec = ["exec", "web-1", "-c", container, "--", "/kni-probe", task, "/tmp/fail"];
        scene.local().kubectl(&exec).map(drop)
    };
    run(scene, "ready", "touch")?;
    scene.wait_for("pod/web-1", ready, "False")?;
    let ip = scene.get("service/web", "{.spec.clusterIP}")?;
    // The service has one endpoint left, so every answer is from that one.
    scene
        .machine
        .local
        .wait("web-1 has left the service", PATIENCE, |node| {
            let ask = ["exec", "client", "--", "/kni-probe", "ask", &ip, "80"];
            let answers = (0..8).map(|_| node.kubectl(&ask)).collect::<Result<Vec<_>>>()?;
            Ok(answers.iter().all(|said| said.starts_with("web-2")))
        })?;
    run(scene, "ready", "remove")?;
    scene.wait_for("pod/web-1", ready, "True")?;
    run(scene, "live", "touch")?;
    scene.wait_for("pod/web-1", restarts, "1")?;
    scene.wait_for("pod/web-1", ready, "True")
}

/// Two containers: one with a liveness probe, one with a readiness probe; a probe fails when `/tmp/fail` exists.
pub(crate) fn probed(name: &str) -> Value {
    let port = PORT.to_string();
    let serve = |port: &'static str| ["serve", "--http", port, "--fail-file", "/tmp/fail"];
    let probe = |port: u16, path: &str| {
        json!({
            "httpGet": { "port": port, "path": path },
            "periodSeconds": 1,
            "failureThreshold": 3,
            // Two cores run a cluster and several tests.
            "timeoutSeconds": 10,
        })
    };
    let mut ready = container(
        "ready",
        &[&serve("8081")[..], &["--tcp", &port, "--name", name]].concat(),
    );
    ready["readinessProbe"] = probe(8081, "/readyz");
    let mut live = container("live", &serve("8080"));
    live["livenessProbe"] = probe(8080, "/healthz");
    pod(name, &json!({ "app": "web" }), &json!([ready, live]))
}

fn host_port(name: &str) -> Value {
    let mut pod = server(name, &json!({}));
    pod["spec"]["containers"][0]["ports"] = json!([{ "containerPort": PORT, "hostPort": HOST_PORT }]);
    pod
}

pub(crate) fn host_network(name: &str) -> Value {
    let port = HOST_NETWORK_PORT.to_string();
    let serve = container("serves", &["serve", "--tcp", &port, "--name", name]);
    let mut pod = pod(name, &json!({}), &json!([serve]));
    pod["spec"]["hostNetwork"] = true.into();
    pod
}

/// The service for kube-proxy.
pub(crate) fn service() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": "web", "namespace": "default" },
        "spec": {
            "selector": { "app": "web" },
            "ipFamilyPolicy": "RequireDualStack",
            "ports": [{ "port": 80, "targetPort": PORT }],
        },
    })
}

/// The same pods behind a service that only the agent serves.
fn ours(scene: &Scene) -> Result<Value> {
    let pods = [scene.addresses("web-1")?, scene.addresses("web-2")?];
    let slice = |family: usize, kind: &str| {
        let endpoints: Vec<Value> = pods.iter().map(|ips| json!({ "addresses": [ips[family]] })).collect();
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("ours-{}", kind.to_lowercase()),
                "namespace": "default",
                "labels": { "kubernetes.io/service-name": "ours" },
            },
            "addressType": kind,
            "ports": [{ "port": PORT }],
            "endpoints": endpoints,
        })
    };
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": "ours", "namespace": "default" },
        "spec": { "clusterIPs": OURS, "ports": [{ "port": 80 }] },
    });
    Ok(json!({
        "apiVersion": "v1",
        "kind": "List",
        "items": [service, slice(0, "IPv4"), slice(1, "IPv6")],
    }))
}

/// The server that answers an external host at a port of the node.
fn from_fabric(scene: &Scene, port: u16) -> Result<String> {
    let node: IpAddr = NODE_V4.parse()?;
    scene.machine.node.fabric().enter(|| {
        let timeout = patience();
        let mut stream = TcpStream::connect_timeout(&(node, port).into(), timeout)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.write_all(b"hello\n")?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer)?;
        let name = answer.split(' ').next().context("no answer")?;
        ensure!(!name.is_empty(), "port {port} of the node closes the connection");
        Ok(name.to_owned())
    })?
}
