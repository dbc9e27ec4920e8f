//! Generates variations of one base policy that each change one part; the expectations are the oracle's.

use super::Case;

const TARGET: &str = "{matchLabels: {pod: a}}";
const BOTH: &str = "[Ingress, Egress]";
const FROM: &str = "[{podSelector: {matchExpressions: [{key: pod, operator: In, values: [b, c]}]}, \
                    namespaceSelector: {matchExpressions: [{key: ns, operator: In, values: [x, y]}]}}]";
const TO: &str = "[{podSelector: {matchExpressions: [{key: pod, operator: In, values: [a, b]}]}, \
                  namespaceSelector: {matchExpressions: [{key: ns, operator: In, values: [y, z]}]}}]";
const PORTS: &str = "[{protocol: TCP, port: 80}]";
const DNS: &str = "{ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]}";

/// The parts of the policy; an empty one is omitted.
#[derive(Clone, Copy)]
struct Base {
    namespace: &'static str,
    target: &'static str,
    types: &'static str,
    from: &'static str,
    ingress_ports: &'static str,
    to: &'static str,
    egress_ports: &'static str,
}

const BASE: Base = Base {
    namespace: "x",
    target: TARGET,
    types: BOTH,
    from: FROM,
    ingress_ports: PORTS,
    to: TO,
    egress_ports: PORTS,
};

impl Base {
    fn spec(&self) -> String {
        let part = |name: &str, value: &str| {
            if value.is_empty() {
                String::new()
            } else {
                format!("{name}: {value}, ")
            }
        };
        let rule = |peers: String, ports: &str| format!("{{{peers}{}}}", part("ports", ports));
        format!(
            "{{{}{}ingress: [{}], egress: [{}, {DNS}]}}",
            part("podSelector", self.target),
            part("policyTypes", self.types),
            rule(part("from", self.from), self.ingress_ports),
            rule(part("to", self.to), self.egress_ports),
        )
    }

    fn case(&self, name: &str) -> Case {
        Case::new(format!("generated: {name}")).with(&[(self.namespace, &self.spec())])
    }
}

/// Forms of `from` and `to`.
const PEERS: [(&str, &str); 22] = [
    ("no peers", ""),
    ("empty peers", "[]"),
    ("pods by label", "[{podSelector: {matchLabels: {pod: b}}}]"),
    ("all pods of the namespace", "[{podSelector: {}}]"),
    ("a namespace by label", "[{namespaceSelector: {matchLabels: {ns: y}}}]"),
    ("all namespaces", "[{namespaceSelector: {}}]"),
    (
        "both by label",
        "[{podSelector: {matchLabels: {pod: b}}, namespaceSelector: {matchLabels: {ns: z}}}]",
    ),
    ("both empty", "[{podSelector: {}, namespaceSelector: {}}]"),
    (
        "pods by label, all namespaces",
        "[{podSelector: {matchLabels: {pod: b}}, namespaceSelector: {}}]",
    ),
    (
        "all pods, a namespace",
        "[{podSelector: {}, namespaceSelector: {matchLabels: {ns: y}}}]",
    ),
    (
        "a namespace by its name",
        "[{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: z}}}]",
    ),
    (
        "pods not in",
        "[{podSelector: {matchExpressions: [{key: pod, operator: NotIn, values: [a, b]}]}}]",
    ),
    (
        "pods not in, of all namespaces",
        "[{podSelector: {matchExpressions: [{key: pod, operator: NotIn, values: [b]}]}, namespaceSelector: {}}]",
    ),
    (
        "namespaces not in",
        "[{namespaceSelector: {matchExpressions: [{key: ns, operator: NotIn, values: [x]}]}}]",
    ),
    (
        "a label that nobody has exists",
        "[{namespaceSelector: {}, podSelector: {matchExpressions: [{key: nope, operator: Exists}]}}]",
    ),
    (
        "a label that nobody has does not",
        "[{namespaceSelector: {}, podSelector: {matchExpressions: [{key: nope, operator: DoesNotExist}]}}]",
    ),
    (
        "a label that all have exists",
        "[{podSelector: {matchExpressions: [{key: pod, operator: Exists}]}}]",
    ),
    (
        "two peers",
        "[{podSelector: {matchLabels: {pod: c}}}, {namespaceSelector: {matchLabels: {ns: z}}}]",
    ),
    (
        "labels and expressions",
        "[{namespaceSelector: {matchLabels: {ns: y}, matchExpressions: [{key: ns, operator: Exists}, {key: no, operator: DoesNotExist}]}}]",
    ),
    (
        "blocks of pods",
        "[{ipBlock: {cidr: V4(y/b)/32}}, {ipBlock: {cidr: 'V6(y/b)/128'}}]",
    ),
    (
        "blocks with excepts",
        "[{ipBlock: {cidr: NET4, except: [V4(y/b)/32, V4(x/b)/31]}}, {ipBlock: {cidr: 'NET6', except: ['V6(z/c)/126']}}]",
    ),
    (
        "a block and a namespace",
        "[{ipBlock: {cidr: V4(z/a)/30}}, {namespaceSelector: {matchLabels: {ns: y}}}]",
    ),
];

/// Forms of `ports`.
const PORT_FORMS: [(&str, &str); 16] = [
    ("no ports", ""),
    ("empty ports", "[]"),
    ("another number", "[{protocol: TCP, port: 81}]"),
    ("a name", "[{protocol: TCP, port: serve-81-tcp}]"),
    ("a name of UDP", "[{protocol: UDP, port: serve-81-udp}]"),
    ("a name of SCTP", "[{protocol: SCTP, port: serve-80-sctp}]"),
    ("a name of another protocol", "[{protocol: SCTP, port: serve-80-tcp}]"),
    ("a name that nobody has", "[{port: serve-82-tcp}]"),
    ("no protocol", "[{port: 81}]"),
    ("a whole protocol", "[{protocol: UDP}]"),
    ("a whole SCTP", "[{protocol: SCTP}]"),
    ("UDP", "[{protocol: UDP, port: 80}]"),
    ("SCTP", "[{protocol: SCTP, port: 81}]"),
    ("a range", "[{port: 80, endPort: 81}]"),
    (
        "a range beside",
        "[{port: 81, endPort: 65535}, {protocol: UDP, port: 1, endPort: 80}]",
    ),
    (
        "several",
        "[{port: 80}, {protocol: UDP, port: serve-80-udp}, {protocol: SCTP, port: 80, endPort: 81}]",
    ),
];

/// All of them.
pub fn cases() -> Vec<Case> {
    let mut cases = vec![BASE.case("base")];
    cases.extend(targets());
    cases.extend(directions());
    for (name, peers) in PEERS {
        cases.push(Base { from: peers, ..BASE }.case(&format!("ingress from {name}")));
        cases.push(Base { to: peers, ..BASE }.case(&format!("egress to {name}")));
    }
    for (name, ports) in PORT_FORMS {
        cases.push(
            Base {
                ingress_ports: ports,
                ..BASE
            }
            .case(&format!("ingress on {name}")),
        );
        cases.push(
            Base {
                egress_ports: ports,
                ..BASE
            }
            .case(&format!("egress on {name}")),
        );
    }
    cases.extend(actions());
    cases
}

fn targets() -> Vec<Case> {
    let mut cases: Vec<Case> = ["y", "z"]
        .into_iter()
        .map(|namespace| Base { namespace, ..BASE }.case(&format!("namespace {namespace}")))
        .collect();
    for (name, target) in [
        ("all pods", "{}"),
        ("pod b", "{matchLabels: {pod: b}}"),
        (
            "two pods",
            "{matchExpressions: [{key: pod, operator: In, values: [a, b]}]}",
        ),
        (
            "all but one",
            "{matchExpressions: [{key: pod, operator: NotIn, values: [c]}]}",
        ),
        (
            "those with a label",
            "{matchExpressions: [{key: pod, operator: Exists}]}",
        ),
        (
            "those without",
            "{matchExpressions: [{key: pod, operator: DoesNotExist}]}",
        ),
        ("nobody", "{matchLabels: {pod: a, ns: x}}"),
    ] {
        cases.push(Base { target, ..BASE }.case(&format!("target {name}")));
    }
    cases
}

fn directions() -> Vec<Case> {
    let mut cases = vec![
        Base {
            types: "[Ingress]",
            ..BASE
        }
        .case("types: ingress, egress rules mean nothing"),
        Base {
            types: "[Egress]",
            ..BASE
        }
        .case("types: egress, ingress rules mean nothing"),
        Base { types: "", ..BASE }.case("no types, rules of both directions"),
    ];
    for (name, rest) in [
        ("deny all ingress", "policyTypes: [Ingress], ingress: []"),
        ("deny all egress", "policyTypes: [Egress], egress: []"),
        ("deny all", "policyTypes: [Ingress, Egress]"),
        ("allow all ingress", "policyTypes: [Ingress], ingress: [{}]"),
        ("allow all egress", "policyTypes: [Egress], egress: [{}]"),
        (
            "allow all",
            "policyTypes: [Ingress, Egress], ingress: [{}], egress: [{}]",
        ),
        ("no types, no rules", "ingress: []"),
        ("no types, empty egress", "egress: []"),
        ("no types, egress rules only", "egress: [{to: [{podSelector: {}}]}]"),
    ] {
        let spec = format!("{{podSelector: {TARGET}, {rest}}}");
        cases.push(Case::new(format!("generated: {name}")).with(&[("x", &spec)]));
    }
    cases
}

fn actions() -> Vec<Case> {
    let base = BASE.spec();
    let other = Base {
        ingress_ports: "[{port: 81}]",
        ..BASE
    }
    .spec();
    let deny = format!("{{podSelector: {TARGET}, policyTypes: {BOTH}}}");
    let by_label = Base {
        from: "[{namespaceSelector: {matchLabels: {new: label}}}]",
        ..BASE
    }
    .spec();
    let by_pod_label = Base {
        from: "[{namespaceSelector: {}, podSelector: {matchLabels: {new: label}}}]",
        ..BASE
    }
    .spec();
    vec![
        Case::new("generated: create, update and delete")
            .with(&[])
            .with(&[("x", &base)])
            .with(&[("x", &other)])
            .with(&[]),
        Case::new("generated: a second policy comes and goes")
            .with(&[("x", &deny)])
            .with(&[("x", &deny), ("x", &base)])
            .with(&[("x", &deny)]),
        Case::new("generated: a policy moves to another namespace")
            .with(&[("x", &base)])
            .with(&[("y", &base)]),
        Case::new("generated: a namespace gets a label and loses it")
            .with(&[("x", &by_label)])
            .label_namespace("z", "new", Some("label"))
            .label_namespace("z", "new", None),
        Case::new("generated: the label that is selected changes")
            .with(&[("x", &base)])
            .label_namespace("y", "ns", Some("not-y"))
            .label_namespace("y", "ns", Some("y")),
        Case::new("generated: a pod gets a label")
            .with(&[("x", &by_pod_label)])
            .label_pod("z/c", "new", Some("label")),
        Case::new("generated: the target is no target any more")
            .with(&[("x", &base)])
            .label_pod("x/a", "pod", Some("d")),
    ]
}
