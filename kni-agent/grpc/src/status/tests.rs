use std::{collections::BTreeSet, time::Duration};

use kni_dataplane::DataplaneError;
use kni_enforcement::SyncError;
use kni_model::{NetworkName, NetworkSelection, PodRef};
use kni_pods::Subject;
use kni_uplink::UplinkError;

use super::*;

fn subject() -> Subject {
    Subject {
        pod: PodRef::named("shop", "web-0"),
        sandbox: "abc123".to_owned(),
    }
}

fn selection() -> kni_model::SelectionError {
    let annotations = [("k8s.v1.cni.cncf.io/networks".to_owned(), "no spaces".to_owned())];
    NetworkSelection::parse_annotations(annotations.iter().map(|(k, v)| (k, v))).unwrap_err()
}

/// Position of each kind; a new kind does not compile before it has a position here and a row below.
fn position(kind: &ErrorKind) -> usize {
    match kind {
        ErrorKind::NotInSync => 0,
        ErrorKind::NoDefaultNetwork => 1,
        ErrorKind::UnknownNetwork(_) => 2,
        ErrorKind::NetworkDisabled(_) => 3,
        ErrorKind::InvalidSelection(_) => 4,
        ErrorKind::InvalidField { .. } => 5,
        ErrorKind::NetnsNotFound(_) => 6,
        ErrorKind::AddressesExhausted { .. } => 7,
        ErrorKind::AddressUnavailable { .. } => 8,
        ErrorKind::EndpointsExhausted { .. } => 9,
        ErrorKind::Conflict(_) => 10,
        ErrorKind::Timeout { .. } => 11,
        ErrorKind::Stopping => 12,
        ErrorKind::Kernel { .. } => 13,
        ErrorKind::Store(_) => 14,
        ErrorKind::Gate(GateError::Policies(_)) => 15,
        ErrorKind::HostPortTaken { .. } => 16,
        ErrorKind::Gate(GateError::HostPorts(_)) => 17,
        ErrorKind::Xdp { .. } => 18,
        ErrorKind::Provider { .. } => 19,
        ErrorKind::NotReady(_) => 20,
        ErrorKind::Gate(GateError::Egress(_)) => 21,
        ErrorKind::NotAuthorized(_) => 22,
        ErrorKind::Unwritable(_) => 23,
        ErrorKind::AddressElsewhere { .. } => 24,
    }
}
const KINDS: usize = 25;

fn network() -> NetworkName {
    "blue".parse().unwrap()
}

fn because() -> String {
    "because".to_owned()
}

/// Errors caused by the client's request.
fn requested() -> Vec<(ErrorKind, Code)> {
    let field = ErrorKind::InvalidField {
        field: "netns",
        reason: because(),
    };
    let refusal = kni_model::AccessRefusal {
        network: network(),
        rule: kni_model::AccessRule::Namespaces,
        reason: because(),
    };
    vec![
        (ErrorKind::NoDefaultNetwork, Code::FailedPrecondition),
        (ErrorKind::UnknownNetwork(network()), Code::NotFound),
        (ErrorKind::NetworkDisabled(network()), Code::FailedPrecondition),
        (ErrorKind::NotAuthorized(Box::new(refusal)), Code::PermissionDenied),
        (
            ErrorKind::InvalidSelection(Box::new(selection())),
            Code::InvalidArgument,
        ),
        (field, Code::InvalidArgument),
        (unavailable(true), Code::AlreadyExists),
        (unavailable(false), Code::InvalidArgument),
        (elsewhere(), Code::InvalidArgument),
    ]
}

fn elsewhere() -> ErrorKind {
    ErrorKind::AddressElsewhere {
        network: network(),
        address: std::net::Ipv4Addr::new(10, 0, 0, 9).into(),
        field: "kni.dev/ips",
        holder: None,
    }
}

fn unavailable(in_use: bool) -> ErrorKind {
    ErrorKind::AddressUnavailable {
        network: network(),
        reason: because(),
        in_use,
    }
}

/// Errors caused by the state of the node.
fn found() -> Vec<(ErrorKind, Code)> {
    let exhausted = ErrorKind::AddressesExhausted {
        network: network(),
        reason: because(),
    };
    let taken = ErrorKind::HostPortTaken {
        port: "TCP 8080 of any address".to_owned(),
        holder: subject(),
    };
    vec![
        (ErrorKind::NetnsNotFound("/run/netns/x".into()), Code::NotFound),
        (exhausted, Code::ResourceExhausted),
        (
            ErrorKind::EndpointsExhausted { capacity: 1024 },
            Code::ResourceExhausted,
        ),
        (ErrorKind::Conflict(because()), Code::AlreadyExists),
        (taken, Code::AlreadyExists),
    ]
}

/// Errors caused by the agent itself.
fn own() -> Vec<(ErrorKind, Code)> {
    let kernel = || DataplaneError::Kernel(because());
    let provider = |retryable| ErrorKind::Provider {
        network: network(),
        reason: because(),
        retryable,
    };
    let timeout = ErrorKind::Timeout {
        step: "attach",
        limit: Duration::from_secs(20),
    };
    let refused = ErrorKind::Kernel {
        step: "veth",
        reason: because(),
    };
    let xdp = ErrorKind::Xdp {
        network: network(),
        reason: because(),
    };
    vec![
        (xdp, Code::Internal),
        (provider(true), Code::Unavailable),
        (provider(false), Code::FailedPrecondition),
        (ErrorKind::NotInSync, Code::Unavailable),
        (ErrorKind::NotReady(because()), Code::Unavailable),
        (
            GateError::Policies(SyncError::Policy(kernel())).into(),
            Code::Unavailable,
        ),
        (
            GateError::Egress(UplinkError::Dataplane(kernel())).into(),
            Code::Unavailable,
        ),
        (
            GateError::HostPorts(UplinkError::Dataplane(kernel())).into(),
            Code::Unavailable,
        ),
        (ErrorKind::Stopping, Code::Unavailable),
        (timeout, Code::DeadlineExceeded),
        (refused, Code::Internal),
        (ErrorKind::Store(because()), Code::Internal),
        (ErrorKind::Unwritable(because()), Code::Unavailable),
    ]
}

#[test]
fn every_error_has_its_code_and_keeps_its_words() {
    let mut seen = BTreeSet::new();
    for (kind, code) in requested().into_iter().chain(found()).chain(own()) {
        seen.insert(position(&kind));
        let error = subject().error(kind);
        let words = error.to_string();
        assert!(words.starts_with("pod shop/web-0, sandbox abc123: "), "{words}");
        let status = error.into_status();
        assert_eq!(status.code(), code, "{words}");
        assert_eq!(status.message(), words);
    }
    assert_eq!(seen.len(), KINDS, "a kind has no row: {seen:?}");
}

#[test]
fn messages_are_one_bounded_line() {
    let kind = ErrorKind::Store("first\nsecond\r\t\u{1b}[31mred\u{2028}third\0".to_owned());
    let error = Subject::node().error(kind);
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
