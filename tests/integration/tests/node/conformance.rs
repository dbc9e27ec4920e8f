//! Tests the agent with the conformance suite, and the suite with a small server in which faults are planted.

use std::{
    env, fs,
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Child, Stdio},
};

use anyhow::{Context as _, Result};
use kni_conformance::{Level, Options, Outcome, Report, run};
use kni_integration::{
    Agent, AgentOptions, Node, agent::KUBELET_SOCKET, eventually_sync, machine, patience, require, wait::slowness,
};
use kni_local_node::spawn::spawn_tied;

/// The socket of the server with the faults.
const REFERENCE_SOCKET: &str = "/run/kni-reference/kni.sock";

/// Each planted fault, the case that must find it, and a part of the reason.
const FAULTS: [(&str, &str, &str); 13] = [
    (
        "unknown-query-fails",
        "query-unknown",
        "QueryPodNetwork fails with NotFound",
    ),
    (
        "unknown-detach-fails",
        "detach-unknown",
        "DetachInterface fails with NotFound",
    ),
    ("cidr-addresses", "attach-interface", "is not a bare address"),
    ("same-address-twice", "addresses-in-use", "which address-0 has"),
    (
        "attach-not-idempotent",
        "attach-repeated",
        "a repeated AttachInterface answers",
    ),
    ("delete-keeps-namespace", "delete", "still exists"),
    ("no-networks", "node-networks", "lists no network"),
    (
        "detach-keeps-interface",
        "detach",
        "eth0 is still in the pod's namespace",
    ),
    ("attach-answers-early", "attach-interface", "has no eth0"),
    ("path-from-name", "create-unique", "file exists"),
    (
        "delete-keeps-interface",
        "delete-attached",
        "eth0 is still in the pod's namespace",
    ),
    (
        "missing-namespace-succeeds",
        "attach-missing-namespace",
        "succeeds with",
    ),
    ("old-ids-hit-newer", "older-sandbox", ""),
];

/// The server with the faults; it ends when the value is dropped.
struct Reference(Child);

impl Reference {
    fn start(node: &Node, fault: &str) -> Result<Self> {
        let program = node.install(&reference_binary()?)?;
        // That of an earlier server in the same node.
        node.enter(|| fs::remove_file(REFERENCE_SOCKET).ok())?;
        let mut command = node.command(program);
        command.args(["--socket", REFERENCE_SOCKET, "--fault", fault]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let server = Self(spawn_tied(command).context("start the reference server")?);
        eventually_sync(patience(), || {
            let connected = node.enter(|| UnixStream::connect(REFERENCE_SOCKET))?;
            connected.map(drop).context("the reference server does not serve")
        })?;
        Ok(server)
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        // A server that has already exited refuses the signal.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// The server: `KNI_REFERENCE_BIN`, or the one of the programs of a node.
fn reference_binary() -> Result<PathBuf> {
    match env::var_os("KNI_REFERENCE_BIN") {
        Some(path) => Ok(path.into()),
        None => Ok(machine::programs()?.path("kni-reference")),
    }
}

/// All cases, with limits for a machine on which other tests run. A server that is late is not the subject here.
fn all(socket: &str) -> Options {
    Options {
        limit_factor: 4.0 * slowness(),
        ..Options::all(socket)
    }
}

/// The failed cases with their reasons.
fn failures(report: &Report) -> Vec<String> {
    let failed = report.failed();
    failed
        .map(|result| format!("{}: {}", result.name, result.outcome.reason()))
        .collect()
}

fn check(node: &Node, options: &Options) -> Result<Report> {
    let report = node.enter(|| run(options, |_| {}))??;
    println!("{}", report.table());
    Ok(report)
}

fn names(report: &Report, is_selected: impl Fn(Level, &Outcome) -> bool) -> Vec<&'static str> {
    let results = report.results.iter();
    results
        .filter(|result| is_selected(result.level, &result.outcome))
        .map(|result| result.name)
        .collect()
}

fn is_core_passed(level: Level, outcome: &Outcome) -> bool {
    level == Level::Core && *outcome == Outcome::Passed
}

#[test]
fn the_agent_passes_every_case_of_level_core_and_what_it_offers() -> Result<()> {
    require!(root, netns, bpf, ip);
    let node = Node::new("conformance")?;
    // Without it, the node's own processes do not reach host ports.
    node.run("mount", &["-t", "cgroup2", "none", "/sys/fs/cgroup"])?;
    let _agent = Agent::start(&node, AgentOptions::default())?;
    let report = check(&node, &all(KUBELET_SOCKET))?;
    assert_eq!(failures(&report), [""; 0]);
    let passed = names(&report, is_core_passed);
    assert_eq!(passed, names(&report, |level, _| level == Level::Core));
    let absent = names(&report, |_, outcome| matches!(outcome, Outcome::NotOffered(_)));
    // The network is ready, and that cannot be changed by a client.
    assert_eq!(absent, ["readiness-reason"]);
    Ok(())
}

#[test]
fn a_small_server_passes_every_case_of_level_core() -> Result<()> {
    require!(root, netns, ip, machine);
    let node = Node::new("reference")?;
    let _server = Reference::start(&node, "")?;
    let report = check(&node, &all(REFERENCE_SOCKET))?;
    assert_eq!(failures(&report), [""; 0]);
    let passed = names(&report, is_core_passed);
    assert_eq!(passed, names(&report, |level, _| level == Level::Core));
    let absent = names(&report, |_, outcome| matches!(outcome, Outcome::NotOffered(_)));
    // An extended feature that the server does not offer is no failure.
    assert!(
        absent.contains(&"features") && absent.contains(&"host-port-tcp"),
        "{absent:?}"
    );
    Ok(())
}

#[test]
fn every_planted_fault_is_found_by_its_case() -> Result<()> {
    require!(root, netns, ip, machine, waiting);
    let node = Node::new("faults")?;
    for (fault, case, reason) in FAULTS {
        let _server = Reference::start(&node, fault)?;
        let options = Options {
            only: vec![case.to_owned()],
            limit_factor: slowness(),
            ..Options::all(REFERENCE_SOCKET)
        };
        let report = check(&node, &options)?;
        let failed: Vec<_> = report
            .failed()
            .map(|result| (result.name, result.outcome.reason()))
            .collect();
        assert!(
            matches!(failed[..], [(name, why)] if name == case && why.contains(reason)),
            "{fault}: {failed:?}"
        );
    }
    Ok(())
}

#[test]
fn a_fault_fails_only_what_depends_on_it() -> Result<()> {
    require!(root, netns, ip, machine);
    let node = Node::new("no-networks")?;
    let _server = Reference::start(&node, "no-networks")?;
    let options = Options {
        levels: vec![Level::Core],
        ..Options::all(REFERENCE_SOCKET)
    };
    let report = check(&node, &options)?;
    let failed: Vec<_> = report.failed().map(|result| result.name).collect();
    assert_eq!(failed, ["node-networks"]);
    Ok(())
}
