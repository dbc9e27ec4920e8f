//! Defines the cases of the Kubernetes policy tests with manually listed denied pairs.

use super::{Case, tcp};
use crate::oracle::Protocol;

const DENY_INGRESS: &str = "{podSelector: {}, policyTypes: [Ingress]}";
const DENY_EGRESS: &str = "{podSelector: {}, policyTypes: [Egress]}";
const DENY_ALL: &str = "{podSelector: {}, policyTypes: [Ingress, Egress]}";

/// An ingress policy of pod a with one rule.
macro_rules! into_a {
    ($rule:literal) => {
        concat!(
            "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Ingress], ingress: [",
            $rule,
            "]}"
        )
    };
}

/// An egress policy of pod a with one rule.
macro_rules! out_of_a {
    ($rule:literal) => {
        concat!(
            "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [",
            $rule,
            "]}"
        )
    };
}

/// All of them.
pub fn cases() -> Vec<Case> {
    [
        isolation(),
        peers(),
        sets_of_peers(),
        ports(),
        stacked(),
        changes(),
        egress(),
        blocks(),
    ]
    .concat()
}

fn isolation() -> Vec<Case> {
    vec![
        Case::new("default-deny-ingress")
            .with(&[("x", DENY_INGRESS)])
            .denied(|q| q.is_to("x/")),
        Case::new("default-deny-egress")
            .with(&[("x", DENY_EGRESS)])
            .denied(|q| q.is_from("x/")),
        Case::new("default-deny-all")
            .with(&[("x", DENY_ALL)])
            .denied(|q| q.is_to("x/") || q.is_from("x/")),
        Case::new("deny-all-everywhere")
            .with(&[("x", DENY_ALL), ("y", DENY_ALL), ("z", DENY_ALL)])
            .denied(|_| true),
        Case::new("allow-all-ingress")
            .with(&[("x", "{podSelector: {}, ingress: [{}]}")])
            .denied(|_| false),
        Case::new("allow-all-egress")
            .with(&[("x", "{podSelector: {}, policyTypes: [Egress], egress: [{}]}")])
            .denied(|_| false),
        Case::new("selects-nobody")
            .with(&[(
                "x",
                "{podSelector: {matchLabels: {pod: nobody}}, policyTypes: [Ingress, Egress]}",
            )])
            .denied(|_| false),
    ]
}

fn peers() -> Vec<Case> {
    vec![
        Case::new("allow-within-namespace-by-podSelector")
            .with(&[("x", into_a!("{from: [{podSelector: {matchLabels: {pod: b}}}]}"))])
            .denied(|q| q.is_to("x/a") && !q.is_from("x/b")),
        Case::new("allow-from-other-namespace-by-namespaceSelector")
            .with(&[("x", into_a!("{from: [{namespaceSelector: {matchLabels: {ns: y}}}]}"))])
            .denied(|q| q.is_to("x/a") && !q.is_from("y/")),
        Case::new("allow-own-namespace-only")
            .with(&[("x", "{podSelector: {}, ingress: [{from: [{podSelector: {}}]}]}")])
            .denied(|q| q.is_to("x/") && !q.is_from("x/")),
        Case::new("podSelector-with-matchExpressions")
            .with(&[(
                "x",
                into_a!("{from: [{podSelector: {matchExpressions: [{key: pod, operator: In, values: [b]}]}}]}"),
            )])
            .denied(|q| q.is_to("x/a") && !q.is_from("x/b")),
        Case::new("namespaceSelector-with-matchExpressions")
            .with(&[(
                "x",
                into_a!("{from: [{namespaceSelector: {matchExpressions: [{key: ns, operator: In, values: [y]}]}}]}"),
            )])
            .denied(|q| q.is_to("x/a") && !q.is_from("y/")),
        Case::new("podSelector-or-namespaceSelector")
            .with(&[(
                "x",
                into_a!(
                    "{from: [{podSelector: {matchLabels: {pod: b}}}, {namespaceSelector: {matchLabels: {ns: y}}}]}"
                ),
            )])
            .denied(|q| q.is_to("x/a") && !q.is_from("x/b") && !q.is_from("y/")),
        Case::new("podSelector-and-namespaceSelector")
            .with(&[(
                "x",
                into_a!("{from: [{podSelector: {matchLabels: {pod: b}}, namespaceSelector: {matchLabels: {ns: y}}}]}"),
            )])
            .denied(|q| q.is_to("x/a") && !q.is_from("y/b")),
    ]
}

fn sets_of_peers() -> Vec<Case> {
    vec![
        Case::new("several-pods-and-namespaces")
            .with(&[(
                "x",
                into_a!(
                    "{from: [{podSelector: {matchExpressions: [{key: pod, operator: In, values: [b, c]}]}, \
                     namespaceSelector: {matchExpressions: [{key: ns, operator: NotIn, values: [x]}]}}]}"
                ),
            )])
            .denied(|q| q.is_to("x/a") && (q.is_from("x/") || q.is_from("y/a") || q.is_from("z/a"))),
        Case::new("any-pod-of-a-set")
            .with(&[(
                "x",
                into_a!(
                    "{from: [{podSelector: {matchExpressions: [{key: pod, operator: In, values: [a, b]}]}, \
                     namespaceSelector: {}}]}"
                ),
            )])
            .denied(|q| q.is_to("x/a") && (q.is_from("x/c") || q.is_from("y/c") || q.is_from("z/c"))),
        Case::new("default-namespace-label")
            .with(&[(
                "x",
                into_a!("{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: y}}}]}"),
            )])
            .denied(|q| q.is_to("x/a") && !q.is_from("y/")),
        Case::new("default-namespace-label-egress")
            .with(&[(
                "x",
                out_of_a!("{to: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: y}}}]}"),
            )])
            .denied(|q| q.is_from("x/a") && !q.is_to("y/")),
    ]
}

fn ports() -> Vec<Case> {
    vec![
        Case::new("by-port")
            .with(&[(
                "x",
                into_a!("{from: [{namespaceSelector: {matchLabels: {ns: y}}}], ports: [{port: 81}]}"),
            )])
            .denied(|q| q.is_to("x/a") && !(q.is_from("y/") && tcp(q, 81))),
        Case::new("all-of-y-to-x/a-denied-on-80/TCP")
            .with(&[(
                "x",
                into_a!(
                    "{from: [{namespaceSelector: {matchLabels: {ns: y}}}], \
                     ports: [{port: 81}, {protocol: UDP}, {protocol: SCTP}]}, \
                     {from: [{namespaceSelector: {matchExpressions: [{key: ns, operator: NotIn, values: [y]}]}}]}"
                ),
            )])
            .denied(|q| q.is_to("x/a") && q.is_from("y/") && tcp(q, 80)),
        Case::new("several-ports")
            .with(&[("x", into_a!("{ports: [{port: 80}, {protocol: UDP, port: 81}]}"))])
            .denied(|q| q.is_to("x/a") && !tcp(q, 80) && !(q.protocol == Protocol::Udp && q.port == 81)),
        Case::new("port-range")
            .with(&[("x", into_a!("{ports: [{port: 79, endPort: 80}]}"))])
            .denied(|q| q.is_to("x/a") && !tcp(q, 80)),
        Case::new("named-port")
            .with(&[("x", into_a!("{ports: [{port: serve-80-tcp}]}"))])
            .denied(|q| q.is_to("x/a") && !tcp(q, 80)),
        Case::new("named-port-from-a-namespace")
            .with(&[(
                "x",
                into_a!("{from: [{namespaceSelector: {matchLabels: {ns: y}}}], ports: [{port: serve-80-tcp}]}"),
            )])
            .denied(|q| q.is_to("x/a") && !(q.is_from("y/") && tcp(q, 80))),
        Case::new("named-port-of-another-protocol-is-none")
            .with(&[("x", into_a!("{ports: [{protocol: UDP, port: serve-80-tcp}]}"))])
            .denied(|q| q.is_to("x/a")),
        Case::new("named-port-egress")
            .with(&[(
                "x",
                out_of_a!("{ports: [{port: serve-80-tcp}, {protocol: SCTP, port: serve-81-sctp}]}"),
            )])
            .denied(|q| q.is_from("x/a") && !tcp(q, 80) && !(q.protocol == Protocol::Sctp && q.port == 81)),
        Case::new("only-UDP-means-no-TCP")
            .with(&[("x", into_a!("{ports: [{protocol: UDP, port: 80}]}"))])
            .denied(|q| q.is_to("x/a") && !(q.protocol == Protocol::Udp && q.port == 80)),
        Case::new("SCTP-is-not-TCP")
            .with(&[("x", into_a!("{ports: [{protocol: SCTP, port: 80}]}"))])
            .denied(|q| q.is_to("x/a") && !(q.protocol == Protocol::Sctp && q.port == 80)),
        Case::new("TCP-is-not-SCTP")
            .with(&[("x", into_a!("{ports: [{protocol: TCP}]}"))])
            .denied(|q| q.is_to("x/a") && q.protocol != Protocol::Tcp),
    ]
}

fn stacked() -> Vec<Case> {
    const PORT_80: &str = into_a!("{from: [{namespaceSelector: {matchLabels: {ns: y}}}], ports: [{port: 80}]}");
    const PORT_81: &str = into_a!("{from: [{namespaceSelector: {matchLabels: {ns: y}}}], ports: [{port: 81}]}");
    vec![
        Case::new("stacked-ports")
            .with(&[("x", PORT_80), ("x", PORT_81)])
            .denied(|q| q.is_to("x/a") && !(q.is_from("y/") && q.protocol == Protocol::Tcp)),
        Case::new("stacked-with-overlapping-selectors")
            .with(&[
                ("x", into_a!("{from: [{podSelector: {matchLabels: {pod: b}}}]}")),
                (
                    "x",
                    "{podSelector: {matchExpressions: [{key: pod, operator: In, values: [a, b]}]}, \
                     ingress: [{from: [{podSelector: {matchLabels: {pod: c}}}]}]}",
                ),
            ])
            .denied(|q| {
                (q.is_to("x/a") && !q.is_from("x/b") && !q.is_from("x/c")) || (q.is_to("x/b") && !q.is_from("x/c"))
            }),
        Case::new("ingress-allow-all-wins-when-stacked")
            .with(&[
                ("x", DENY_INGRESS),
                ("x", PORT_80),
                ("x", "{podSelector: {}, ingress: [{}]}"),
            ])
            .denied(|_| false),
        Case::new("egress-allow-all-wins-when-stacked")
            .with(&[
                ("x", DENY_EGRESS),
                ("x", out_of_a!("{ports: [{port: 80}]}")),
                ("x", "{podSelector: {}, policyTypes: [Egress], egress: [{}]}"),
            ])
            .denied(|_| false),
        Case::new("both-ends-must-agree")
            .with(&[
                (
                    "x",
                    out_of_a!("{to: [{namespaceSelector: {matchLabels: {ns: y}}}], ports: [{port: 80}]}"),
                ),
                (
                    "y",
                    into_a!("{from: [{namespaceSelector: {matchLabels: {ns: x}}}], ports: [{port: 80}]}"),
                ),
            ])
            .denied(|q| {
                let out = q.is_from("x/a") && !(q.is_to("y/") && tcp(q, 80));
                out || q.is_to("y/a") && !(q.is_from("x/") && tcp(q, 80))
            }),
        Case::new("one-end-does-not-overrule-the-other")
            .with(&[
                ("x", "{podSelector: {}, policyTypes: [Egress], egress: [{}]}"),
                ("y", DENY_INGRESS),
            ])
            .denied(|q| q.is_to("y/")),
    ]
}

fn changes() -> Vec<Case> {
    const FROM_TEAM: &str = into_a!("{from: [{namespaceSelector: {matchLabels: {team: blue}}}]}");
    const FROM_ROLE: &str = into_a!("{from: [{namespaceSelector: {}, podSelector: {matchLabels: {role: client}}}]}");
    vec![
        Case::new("policy-updated")
            .with(&[("x", "{podSelector: {}, ingress: [{}]}")])
            .denied(|_| false)
            .with(&[("x", DENY_INGRESS)])
            .denied(|q| q.is_to("x/"))
            .with(&[("x", "{podSelector: {}, ingress: [{ports: [{port: 81}]}]}")])
            .denied(|q| q.is_to("x/") && !tcp(q, 81)),
        Case::new("stops-after-deletion")
            .with(&[("x", DENY_ALL)])
            .denied(|q| q.is_to("x/") || q.is_from("x/"))
            .with(&[])
            .denied(|_| false),
        Case::new("one-of-two-policies-deleted")
            .with(&[("x", DENY_INGRESS), ("y", DENY_EGRESS)])
            .denied(|q| q.is_to("x/") || q.is_from("y/"))
            .with(&[("x", DENY_INGRESS)])
            .denied(|q| q.is_to("x/")),
        Case::new("namespace-label-updated")
            .with(&[("x", FROM_TEAM)])
            .denied(|q| q.is_to("x/a"))
            .label_namespace("y", "team", Some("blue"))
            .denied(|q| q.is_to("x/a") && !q.is_from("y/"))
            .label_namespace("y", "team", Some("red"))
            .denied(|q| q.is_to("x/a"))
            .label_namespace("y", "team", None)
            .denied(|q| q.is_to("x/a")),
        Case::new("pod-label-updated")
            .with(&[("x", FROM_ROLE)])
            .denied(|q| q.is_to("x/a"))
            .label_pod("y/b", "role", Some("client"))
            .denied(|q| q.is_to("x/a") && !q.is_from("y/b"))
            .label_pod("y/b", "role", None)
            .denied(|q| q.is_to("x/a")),
        Case::new("target-pod-label-updated")
            .with(&[(
                "x",
                "{podSelector: {matchLabels: {role: server}}, policyTypes: [Ingress]}",
            )])
            .denied(|_| false)
            .label_pod("x/c", "role", Some("server"))
            .denied(|q| q.is_to("x/c")),
    ]
}

fn egress() -> Vec<Case> {
    vec![
        Case::new("deny-egress-by-podSelector")
            .with(&[("x", "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress]}")])
            .denied(|q| q.is_from("x/a")),
        Case::new("deny-egress-of-a-namespace")
            .with(&[("y", DENY_EGRESS)])
            .denied(|q| q.is_from("y/")),
        Case::new("egress-to-another-namespace-by-both-selectors")
            .with(&[(
                "x",
                out_of_a!("{to: [{namespaceSelector: {matchLabels: {ns: y}}, podSelector: {matchLabels: {pod: a}}}]}"),
            )])
            .denied(|q| q.is_from("x/a") && !q.is_to("y/a")),
        Case::new("egress-by-port")
            .with(&[("x", out_of_a!("{ports: [{protocol: UDP, port: 80}, {port: 81}]}"))])
            .denied(|q| q.is_from("x/a") && !tcp(q, 81) && !(q.protocol == Protocol::Udp && q.port == 80)),
        Case::new("egress-and-ingress-in-one-policy")
            .with(&[(
                "x",
                "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Ingress, Egress], \
                 ingress: [{from: [{namespaceSelector: {matchLabels: {ns: y}}}]}], \
                 egress: [{to: [{namespaceSelector: {matchLabels: {ns: z}}}]}]}",
            )])
            .denied(|q| (q.is_to("x/a") && !q.is_from("y/")) || (q.is_from("x/a") && !q.is_to("z/"))),
    ]
}

fn blocks() -> Vec<Case> {
    vec![
        Case::new("egress-to-a-CIDR")
            .with(&[(
                "x",
                out_of_a!("{to: [{ipBlock: {cidr: V4(y/b)/32}}, {ipBlock: {cidr: 'V6(y/b)/128'}}]}"),
            )])
            .denied(|q| q.is_from("x/a") && !q.is_to("y/b")),
        Case::new("egress-to-a-CIDR-with-except")
            .with(&[(
                "x",
                out_of_a!(
                    "{to: [{ipBlock: {cidr: NET4, except: [V4(y/b)/32]}}, {ipBlock: {cidr: 'NET6', except: ['V6(y/b)/128']}}]}"
                ),
            )])
            .denied(|q| q.is_from("x/a") && q.is_to("y/b")),
        Case::new("excepted-by-one-block-allowed-by-another")
            .with(&[(
                "x",
                out_of_a!(
                    "{to: [{ipBlock: {cidr: NET4, except: [V4(y/b)/32, V4(z/c)/32]}}, {ipBlock: {cidr: V4(y/b)/32}}]}"
                ),
            )])
            .denied(|q| q.is_from("x/a") && (!q.v4 || q.is_to("z/c"))),
        Case::new("ingress-from-a-CIDR")
            .with(&[(
                "x",
                into_a!("{from: [{ipBlock: {cidr: V4(y/b)/32}}, {ipBlock: {cidr: 'V6(z/c)/128'}}]}"),
            )])
            .denied(|q| q.is_to("x/a") && !q.is_from(if q.v4 { "y/b" } else { "z/c" })),
        Case::new("a-block-of-one-family-is-not-of-the-other")
            .with(&[("x", into_a!("{from: [{ipBlock: {cidr: 0.0.0.0/0}}]}"))])
            .denied(|q| q.is_to("x/a") && !q.v4),
        Case::new("a-block-beside-a-selector")
            .with(&[(
                "x",
                into_a!("{from: [{ipBlock: {cidr: V4(y/b)/32}}, {podSelector: {}}], ports: [{port: 80}]}"),
            )])
            .denied(|q| q.is_to("x/a") && !(tcp(q, 80) && (q.is_from("x/") || q.v4 && q.is_from("y/b")))),
    ]
}
