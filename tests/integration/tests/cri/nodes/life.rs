//! Tests that a cluster comes up complete and goes without a trace, also when its owner is killed.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader, Read as _},
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::require;
use kni_local_node::LocalNode;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use super::{
    machine::MachineState,
    scene::{Clustered, Image},
    traffic::pods_of_both_nodes_reach_each_other,
};
use crate::deploy::image;

/// The addresses of the two nodes: no two are in one subnet.
const ADDRESSES: [[&str; 2]; 2] = [
    ["198.18.11.2", "2001:db8:18:11::2"],
    ["198.18.12.2", "2001:db8:18:12::2"],
];

#[test]
fn two_nodes_come_up_and_leave_nothing() -> Result<()> {
    require!(exclusive, root, netns, bpf, machine);
    let archive = image::build("one")?;
    let image = Image {
        archive: &archive,
        tag: "one",
        kni: false,
    };
    let cluster = Clustered::new()?;
    let before = MachineState::take()?;
    let start = Instant::now();
    let report = |what: &str| println!("{:>6.1} s  {what}", start.elapsed().as_secs_f32());

    cluster.up(&image)?;
    report("up");
    for kind in ["cgroup", "process", "namespace"] {
        before.sees_new(kind)?;
    }
    nodes_are_ready(&cluster)?;
    traffic_is_routed(&cluster)?;
    pods_run_everywhere(&cluster)?;
    both_nodes_explain(&cluster)?;
    report("used");
    let again = cluster.up(&image)?;
    ensure!(again.contains("already up"), "a second up: {again}");
    cluster.down()?;
    before.is_restored("after down")?;
    ensure!(!cluster.folder.exists(), "{} still exists", cluster.folder.display());
    report("down");

    killed_while_it_starts(&cluster, &image)?;
    before.is_restored("after the owner was killed")?;
    report("killed");
    cluster.down()?;
    let nothing = cluster.down()?;
    ensure!(nothing.contains("nothing is up"), "a second down: {nothing}");
    ensure!(!cluster.folder.exists(), "{} still exists", cluster.folder.display());
    before.is_restored("after a second down")
}

/// The deployment that writes no file of CNI, on nodes whose kubelets call its agents.
#[test]
fn two_nodes_get_their_networks_by_kni() -> Result<()> {
    require!(exclusive, root, netns, bpf, machine);
    let archive = image::build("one")?;
    let image = Image {
        archive: &archive,
        tag: "one",
        kni: true,
    };
    let cluster = Clustered::new()?;
    let before = MachineState::take()?;
    cluster.up(&image)?;
    nodes_are_ready(&cluster)?;
    pods_run_everywhere(&cluster)?;
    pods_of_both_nodes_reach_each_other(&cluster)?;
    for node in ["node1", "node2"] {
        for folder in LocalNode::cni_folders() {
            let files = cluster.run("enter", &[node, "ls", &folder.display().to_string()])?;
            ensure!(
                files.is_empty(),
                "{node} has files of CNI in {}: {files}",
                folder.display()
            );
        }
    }
    cluster.down()?;
    before.is_restored("after down")
}

fn nodes_are_ready(cluster: &Clustered) -> Result<()> {
    let nodes = cluster.list(&["nodes"])?;
    assert_eq!(nodes.len(), 2);
    for (node, wanted) in nodes.iter().zip(ADDRESSES) {
        let addresses = items(&node["status"]["addresses"]).filter(|address| address["type"] == "InternalIP");
        let addresses: Vec<&str> = addresses.filter_map(|address| address["address"].as_str()).collect();
        assert_eq!(addresses, wanted, "{}", node["metadata"]["name"]);
        let mut conditions = items(&node["status"]["conditions"]);
        let ready = conditions.find(|condition| condition["type"] == "Ready");
        assert_eq!(ready.context("no condition Ready")?["status"], "True");
    }
    let agents = cluster.list(&["pods", "-n", "kni-system", "-l", "app.kubernetes.io/name=kni-agent"])?;
    assert_eq!(nodes_of(&agents), both(), "the nodes of the agents");
    let dns = cluster.list(&["pods", "-n", "kube-system", "-l", "k8s-app=kube-dns"])?;
    assert_eq!(nodes_of(&dns), both(), "the nodes of CoreDNS");
    Ok(())
}

/// The nodes reach each other over the router, which alone forwards.
fn traffic_is_routed(cluster: &Clustered) -> Result<()> {
    for (node, (own, other)) in [("node1", (0, 1)), ("node2", (1, 0))] {
        for (own, other) in ADDRESSES[own].iter().zip(ADDRESSES[other]) {
            let route = cluster.run("enter", &[node, "ip", "route", "get", other])?;
            let gateway = own.trim_end_matches('2').to_owned() + "1";
            ensure!(route.contains(&format!("via {gateway} ")), "{node} to {other}: {route}");
            // The port of the kubelet.
            let connect = format!("exec 3<>/dev/tcp/{other}/10250");
            cluster.run("enter", &[node, "timeout", "5", "bash", "-c", &connect])?;
        }
    }
    for (namespace, wanted) in [("node1", "0"), ("node2", "0"), ("router", "1")] {
        for setting in ["net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"] {
            let value = cluster.run("enter", &[namespace, "sysctl", "-n", setting])?;
            assert_eq!(value.trim(), wanted, "{setting} of {namespace}");
        }
    }
    Ok(())
}

fn pods_run_everywhere(cluster: &Clustered) -> Result<()> {
    let program = ["--", "/kni-probe", "serve", "--tcp", "7000"];
    let create = ["create", "deployment", "web", "--replicas=4"];
    let image = format!("--image={}", kni_local_node::image::PROBE);
    cluster.kubectl(&[&create[..], &[&image], &program].concat())?;
    cluster.kubectl(&["rollout", "status", "deployment/web", "--timeout=120s"])?;
    let pods = cluster.list(&["pods", "-l", "app=web"])?;
    assert_eq!(nodes_of(&pods), both(), "the nodes of the pods");
    for pod in &pods {
        let name = pod["metadata"]["name"].as_str().context("a pod without name")?;
        let ips: Vec<&str> = items(&pod["status"]["podIPs"])
            .filter_map(|ip| ip["ip"].as_str())
            .collect();
        assert_eq!(ips.len(), 2, "addresses of {name}");
        let log = cluster.kubectl(&["logs", name])?;
        ensure!(log.starts_with(name), "log of {name}: {log}");
        let own = cluster.kubectl(&["exec", name, "--", "/kni-probe", "ask", ips[0], "7000"])?;
        ensure!(own.starts_with(name), "{name} asks itself: {own}");
    }
    Ok(())
}

/// `kubectl kni` joins what the agents of both nodes say about a packet, and each node receives the other's answers
/// through the tunnel.
fn both_nodes_explain(cluster: &Clustered) -> Result<()> {
    let pods = cluster.list(&["pods", "-l", "app=web"])?;
    let on = |node: &str| {
        let mut of_node = pods.iter().filter(|pod| pod["spec"]["nodeName"] == node);
        of_node.next().context("a pod on each node")
    };
    let (from, to) = (on("node1")?, on("node2")?);
    let name = |pod: &Value| Ok::<_, anyhow::Error>(pod["metadata"]["name"].as_str().context("a name")?.to_owned());
    let (from_name, to_name) = (name(from)?, name(to)?);
    let ip = to["status"]["podIP"].as_str().context("an address")?;
    let ask = |words: &[&str]| -> Result<Value> {
        let ends = [format!("default/{from_name}"), format!("default/{to_name}")];
        let words = [&["kni", "explain", &ends[0], &ends[1], "tcp/7000"], words].concat();
        println!("$ kubectl {}\n{}", words.join(" "), cluster.kubectl(&words)?);
        let answer = cluster.kubectl(&[&words[..], &["-o", "json"]].concat())?;
        serde_json::from_str(&answer).context(answer)
    };
    let verdict = |answer: &Value| {
        let text = |field: &str| answer["verdict"][field].as_str().unwrap_or_default().to_owned();
        (text("node"), text("program"), text("reason"))
    };
    let expected = |node: &str, program: &str, reason: &str| (node.to_owned(), program.to_owned(), reason.to_owned());
    let passes = ask(&[])?;
    assert_eq!(
        verdict(&passes),
        expected("node2", "from_overlay", "redirected"),
        "{passes:#}"
    );
    assert_eq!((&passes["allowed"], &passes["node"]), (&true.into(), &"node1".into()));
    let answer = cluster.kubectl(&["exec", &from_name, "--", "/kni-probe", "ask", ip, "7000"])?;
    ensure!(answer.starts_with(&to_name), "{from_name} asks {to_name}: {answer}");
    let large = ask(&["--length", "1500"])?;
    assert_eq!(verdict(&large), expected("node1", "from_pod", "too_big"), "{large:#}");

    // The exit code is of all checks.
    let report = match cluster.kubectl(&["kni", "doctor"]) {
        Ok(report) => report,
        Err(error) => format!("{error:#}"),
    };
    println!("$ kubectl kni doctor\n{report}");
    let lines = report.lines().filter(|line| line.contains("answer through the tunnel"));
    let lines: Vec<&str> = lines.map(str::trim).collect();
    assert_eq!(
        lines,
        ["ok       Other nodes answer through the tunnel (1 were asked)"; 2]
    );
    Ok(())
}

/// Kills the owner of the nodes and its janitors while the agents are deployed: `up` removes the nodes itself.
fn killed_while_it_starts(cluster: &Clustered, image: &Image<'_>) -> Result<()> {
    let mut up = cluster.begin(image)?;
    let mut lines = BufReader::new(up.stdout.take().context("no output")?);
    let mut line = String::new();
    while line.trim() != "agents" {
        line.clear();
        ensure!(lines.read_line(&mut line)? > 0, "`up` does not come to the agents");
    }
    let owner = cluster.owner()?;
    let janitors = children(owner, "kni-janitor")?;
    assert_eq!(janitors.len(), 3, "a janitor for the control plane and each node");
    for process in janitors.into_iter().chain([owner]) {
        kill(Pid::from_raw(process), Signal::SIGKILL)?;
    }
    let mut rest = String::new();
    lines.read_to_string(&mut rest)?;
    let status = up.wait().context("wait for kni-node up")?;
    ensure!(
        !status.success() && rest.contains("nothing stays up"),
        "`up` without its owner ({status}): {rest}"
    );
    Ok(())
}

/// The processes that `parent` has started of the program `name`.
fn children(parent: i32, name: &str) -> Result<Vec<i32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Ok(status) = fs::read_to_string(entry.path().join("status")) else {
            continue;
        };
        let field = |key: &str| {
            let line = status.lines().find(|line| line.starts_with(key));
            line.and_then(|line| line.split_whitespace().nth(1)).unwrap_or_default()
        };
        if field("Name:") == name && field("PPid:") == parent.to_string() {
            found.push(field("Pid:").parse()?);
        }
    }
    Ok(found)
}

fn nodes_of(pods: &[Value]) -> BTreeSet<&str> {
    pods.iter().filter_map(|pod| pod["spec"]["nodeName"].as_str()).collect()
}

fn both() -> BTreeSet<&'static str> {
    ["node1", "node2"].into()
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}
