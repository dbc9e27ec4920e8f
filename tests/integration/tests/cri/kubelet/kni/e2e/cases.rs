//! Names the cases of upstream's end-to-end tests that are executed, and those that are known not to pass.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};

use super::report::Case;

/// Ten cases that always run, in two processes that run at once.
pub(super) const GATE: [&[&str]; 2] = [
    &[
        "[sig-network] Netpol NetworkPolicy between server and client should support a 'default-deny-ingress' policy \
         [Feature:NetworkPolicy]",
        "[sig-network] Netpol NetworkPolicy between server and client should enforce policy based on Ports \
         [Feature:NetworkPolicy]",
        "[sig-network] Netpol NetworkPolicy between server and client should allow ingress access from updated pod \
         [Feature:NetworkPolicy]",
        "[sig-network] Netpol NetworkPolicy between server and client should support denying of egress traffic on the \
         client side (even if the server explicitly allows this traffic) [Feature:NetworkPolicy]",
    ],
    &[
        "[sig-network] Networking Granular Checks: Pods should function for intra-pod communication: http \
         [NodeConformance] [Conformance]",
        "[sig-network] Networking Granular Checks: Pods should function for node-pod communication: udp [LinuxOnly] \
         [NodeConformance] [Conformance]",
        "[sig-network] Services should serve multiport endpoints from pods [Conformance]",
        "[sig-network] Services should have session affinity work for service with type clusterIP [LinuxOnly] \
         [Conformance]",
        "[sig-network] Services should serve endpoints on same port and different protocols [Conformance]",
        "[sig-network] HostPort validates that there is no conflict between pods with same hostPort but different \
         hostIP and protocol [LinuxOnly] [Conformance]",
    ],
];

/// Expressions for the cases of long tests, each for a process, and for those of them that another process executes.
/// The processes run at once.
pub(super) const LONG: [[&str; 2]; 4] = [
    [r"\[sig-network\] Netpol", ""],
    [r"\[sig-network\] Services ", ""],
    [r"\[sig-network\] (Networking|\[Feature:IPv6DualStack\])", ""],
    [
        r"\[sig-network\]",
        r"\[sig-network\] (Netpol|Services |Networking|\[Feature:IPv6DualStack\])",
    ],
];

/// Expressions for cases that are not executed, each with the reason.
pub(super) const NOT_RUN: [(&str, &str); 6] = [
    (r"\[Disruptive\]", "restarts parts of the node over SSH"),
    (
        r"\[Serial\]",
        "changes settings of the whole cluster, or looks for kernel modules over SSH",
    ),
    (r"\[Feature:LoadBalancer\]", "needs a cloud"),
    (
        r"\[Feature:SCTPConnectivity\]",
        "needs SCTP sockets, which many kernels lack",
    ),
    (r"\[Feature:Networking-Performance\]", "measures the machine"),
    (r"\[Feature:Networking-(IPv4|IPv6|DNS)\]", "needs the Internet"),
];

/// Cases that are known not to pass, below a line with the reason.
const KNOWN: &str = include_str!("known.txt");

/// The cases of [`KNOWN`] with their reasons.
#[derive(Debug, Default)]
pub(super) struct Known(BTreeMap<&'static str, &'static str>);

impl Known {
    pub(super) fn read() -> Result<Self> {
        let mut known = BTreeMap::new();
        let mut reason = None;
        for line in KNOWN.lines().filter(|line| !line.is_empty()) {
            if let Some(found) = line.strip_prefix("# ") {
                reason = Some(found);
                continue;
            }
            let reason = reason.with_context(|| format!("no reason for {line:?}"))?;
            ensure!(known.insert(line, reason).is_none(), "{line:?} is listed twice");
        }
        Ok(Self(known))
    }

    /// Why a case does not pass.
    pub(super) fn reason(&self, name: &str) -> Option<&'static str> {
        self.0.get(name).copied()
    }

    /// Fails unless exactly the known cases have not passed, and each of them was attempted.
    pub(super) fn compare(&self, cases: &[Case]) -> Result<()> {
        let mut wrong = Vec::new();
        for case in cases {
            match (case.has_passed(), self.reason(&case.name)) {
                (true, Some(reason)) => wrong.push(format!("{}: passed, and is listed ({reason})", case.name)),
                (false, None) => wrong.push(format!("{}: {}", case.name, case.outcome)),
                (true, None) | (false, Some(_)) => {}
            }
        }
        let attempted = |name: &str| cases.iter().any(|case| case.name == name);
        wrong.extend(
            self.0
                .keys()
                .filter(|name| !attempted(name))
                .map(|name| format!("{name}: listed, and was not attempted")),
        );
        ensure!(!cases.is_empty(), "no case was attempted");
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{super::report::Outcome, *};

    fn case(name: &str, outcome: Outcome) -> Case {
        Case {
            name: name.into(),
            group: "group".into(),
            outcome,
            took: Duration::ZERO,
        }
    }

    #[test]
    fn every_difference_from_the_list_is_an_error() {
        let known = Known([("away", "needs two nodes")].into());
        let failed = || Outcome::Failed("why".into());
        let compared = |cases: &[Case]| known.compare(cases).map_err(|error| error.to_string());
        let expected = [case("here", Outcome::Passed), case("away", failed())];
        assert_eq!(compared(&expected), Ok(()));
        assert!(compared(&expected[..1]).unwrap_err().contains("was not attempted"));
        let passes = [case("away", Outcome::Passed)];
        assert!(compared(&passes).unwrap_err().contains("passed, and is listed"));
        let fails = [
            case("here", failed()),
            case("away", Outcome::Skipped("one node".into())),
        ];
        assert_eq!(compared(&fails).unwrap_err(), "here: failed: why");
        assert!(compared(&[]).is_err());
    }

    #[test]
    fn the_list_is_complete_and_ten_cases_always_run() {
        let known = Known::read().unwrap();
        let names: Vec<&str> = GATE.into_iter().flatten().copied().collect();
        assert_eq!(names.len(), 10);
        assert!(names.iter().all(|name| known.reason(name).is_none()));
    }
}
