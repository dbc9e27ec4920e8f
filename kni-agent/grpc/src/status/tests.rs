use std::collections::BTreeSet;

use kni_model::{NetworkName, NetworkSelection, PodRef, SandboxId};

use super::*;

fn pod() -> PodRef {
    PodRef {
        namespace: "shop".to_owned(),
        name: "web-0".to_owned(),
        uid: String::new(),
    }
}

fn sandbox() -> SandboxId {
    "abc123".parse().unwrap()
}

fn selection() -> kni_model::SelectionError {
    let annotations = [("k8s.v1.cni.cncf.io/networks".to_owned(), "no spaces".to_owned())];
    NetworkSelection::parse_annotations(annotations.iter().map(|(k, v)| (k, v))).unwrap_err()
}

/// Position of each variant; a new one does not compile before it has a place here and a row below.
fn variant(error: &AttachError) -> usize {
    match error {
        AttachError::NotInSync => 0,
        AttachError::NoDefaultNetwork { .. } => 1,
        AttachError::UnknownNetwork { .. } => 2,
        AttachError::NetworkDisabled { .. } => 3,
        AttachError::InvalidSelection { .. } => 4,
        AttachError::InvalidField { .. } => 5,
        AttachError::NetnsNotFound { .. } => 6,
        AttachError::AddressesExhausted { .. } => 7,
        AttachError::AddressUnavailable { .. } => 8,
        AttachError::EndpointsExhausted { .. } => 9,
        AttachError::Conflict { .. } => 10,
        AttachError::Timeout { .. } => 11,
        AttachError::Stopping => 12,
        AttachError::Kernel { .. } => 13,
        AttachError::Store(_) => 14,
        AttachError::Policy { .. } => 15,
        AttachError::HostPortTaken { .. } => 16,
        AttachError::HostPorts { .. } => 17,
        AttachError::Xdp { .. } => 18,
        AttachError::Provider { .. } => 19,
        AttachError::NotReady { .. } => 20,
    }
}
const VARIANTS: usize = 21;

fn network() -> NetworkName {
    "blue".parse().unwrap()
}

fn because() -> String {
    "because".to_owned()
}

/// Errors about what the client asks for.
fn asked() -> Vec<(AttachError, Code)> {
    let (pod, sandbox) = (pod(), sandbox().to_string());
    let field = |pod| AttachError::InvalidField {
        pod,
        sandbox,
        field: "netns",
        reason: because(),
    };
    vec![
        (
            AttachError::NoDefaultNetwork { pod: pod.clone() },
            Code::FailedPrecondition,
        ),
        (
            AttachError::UnknownNetwork {
                pod: pod.clone(),
                network: network(),
            },
            Code::NotFound,
        ),
        (
            AttachError::NetworkDisabled {
                pod: pod.clone(),
                network: network(),
            },
            Code::FailedPrecondition,
        ),
        (
            AttachError::InvalidSelection {
                pod: pod.clone(),
                source: Box::new(selection()),
            },
            Code::InvalidArgument,
        ),
        (field(pod), Code::InvalidArgument),
        (unavailable(true), Code::AlreadyExists),
        (unavailable(false), Code::InvalidArgument),
    ]
}

fn unavailable(in_use: bool) -> AttachError {
    AttachError::AddressUnavailable {
        pod: pod(),
        sandbox: sandbox(),
        network: network(),
        reason: because(),
        in_use,
    }
}

/// Errors about what the node has.
fn found() -> Vec<(AttachError, Code)> {
    let (pod, id) = (pod(), sandbox());
    let exhausted = |pod, sandbox| AttachError::AddressesExhausted {
        pod,
        sandbox,
        network: network(),
        reason: because(),
    };
    let netns = |pod, sandbox| AttachError::NetnsNotFound {
        pod,
        sandbox,
        path: "/run/netns/x".into(),
    };
    let endpoints = |pod, sandbox| AttachError::EndpointsExhausted {
        pod,
        sandbox,
        capacity: 1024,
    };
    let conflict = |pod, sandbox| AttachError::Conflict {
        pod,
        sandbox,
        reason: because(),
    };
    vec![
        (netns(pod.clone(), id.clone()), Code::NotFound),
        (exhausted(pod.clone(), id.clone()), Code::ResourceExhausted),
        (endpoints(pod.clone(), id.clone()), Code::ResourceExhausted),
        (conflict(pod.clone(), id.clone()), Code::AlreadyExists),
        (
            AttachError::HostPortTaken {
                pod: pod.clone(),
                sandbox: id.clone(),
                port: "TCP 8080 of any address".to_owned(),
                holder: pod,
                holder_sandbox: id,
            },
            Code::AlreadyExists,
        ),
    ]
}

/// Errors about the agent itself.
fn own() -> Vec<(AttachError, Code)> {
    let (pod, sandbox) = (pod(), sandbox().to_string());
    let timeout = |pod, sandbox| AttachError::Timeout {
        pod,
        sandbox,
        step: "attach",
        seconds: 20,
    };
    let kernel = |pod, sandbox| AttachError::Kernel {
        pod,
        sandbox,
        step: "veth",
        reason: because(),
    };
    let policy = |pod, sandbox| AttachError::Policy {
        pod,
        sandbox,
        reason: because(),
    };
    let host_ports = |pod, sandbox| AttachError::HostPorts {
        pod,
        sandbox,
        reason: because(),
    };
    let provider = |pod, sandbox, again| AttachError::Provider {
        pod,
        sandbox,
        network: network(),
        reason: because(),
        again,
    };
    let xdp = |pod, sandbox| AttachError::Xdp {
        pod,
        sandbox,
        network: network(),
        reason: because(),
    };
    vec![
        (xdp(pod.clone(), sandbox.clone()), Code::Internal),
        (provider(pod.clone(), sandbox.clone(), true), Code::Unavailable),
        (provider(pod.clone(), sandbox.clone(), false), Code::FailedPrecondition),
        (AttachError::NotInSync, Code::Unavailable),
        (
            AttachError::NotReady {
                pod: pod.clone(),
                sandbox: sandbox.clone(),
                reason: because(),
            },
            Code::Unavailable,
        ),
        (policy(pod.clone(), sandbox.clone()), Code::Unavailable),
        (host_ports(pod.clone(), sandbox.clone()), Code::Unavailable),
        (AttachError::Stopping, Code::Unavailable),
        (timeout(pod.clone(), sandbox.clone()), Code::DeadlineExceeded),
        (kernel(pod, sandbox), Code::Internal),
        (AttachError::Store(because()), Code::Internal),
    ]
}

#[test]
fn every_error_has_its_code_and_keeps_its_words() {
    let mut seen = BTreeSet::new();
    for (error, code) in asked().into_iter().chain(found()).chain(own()) {
        seen.insert(variant(&error));
        let words = error.to_string();
        let status = error.into_status();
        assert_eq!(status.code(), code, "{words}");
        assert_eq!(status.message(), words);
    }
    assert_eq!(seen.len(), VARIANTS, "a variant has no row: {seen:?}");
}

#[test]
fn messages_are_one_bounded_line() {
    let error = AttachError::Store("first\nsecond\r\t\u{1b}[31mred\u{2028}third\0".to_owned());
    assert_eq!(error.into_status().message(), "state: first second   [31mred third ");
    for text in ["x".repeat(5000), "é".repeat(5000), "\u{2028}".repeat(5000)] {
        let line = one_line(&text);
        assert!(
            line.len() <= MAX_MESSAGE && line.len() > MAX_MESSAGE - 8,
            "{}",
            line.len()
        );
        assert!(line.ends_with('…'));
    }
    let fits = "x".repeat(MAX_MESSAGE);
    assert_eq!(one_line(&fits), fits);
}
