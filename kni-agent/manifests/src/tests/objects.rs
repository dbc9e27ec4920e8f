//! Checks policies, namespaces, services and lists of objects.

use kni_model::{
    policy::{NamedNetwork, PolicyKind, PolicyScope},
    service::TrafficDistribution,
};

use super::*;

fn policy(name: &str, spec: &str) -> String {
    format!("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata:\n  name: {name}\nspec:\n{spec}")
}

fn service(name: &str, address: &str, labels: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\n  labels: {{{labels}}}\nspec:\n  ports: [{{port: 80}}]\n  \
         clusterIP: {address}\n"
    )
}

fn refused_of(set: &ManifestSet) -> Vec<(Option<u32>, &str, &str)> {
    let refused = set.refused.iter();
    refused
        .map(|r| {
            (
                r.line,
                r.name.as_deref().unwrap_or_default(),
                r.field.as_deref().unwrap_or_default(),
            )
        })
        .collect()
}

#[test]
fn the_examples_of_policies_and_services_are_valid() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/examples");
    let set = ManifestSource::new(dir).load().unwrap();
    assert_eq!(set.refused, []);
    let mut kinds: Vec<_> = set.policies.iter().map(|(policy, _)| policy.reference.kind).collect();
    kinds.dedup();
    assert_eq!(
        kinds,
        [
            PolicyKind::EgressPolicy,
            PolicyKind::MultiNetworkPolicy,
            PolicyKind::NetworkPolicy
        ]
    );
    let denies = |(policy, _): &&(Policy, Origin)| policy.ingress.as_ref().is_some_and(Vec::is_empty);
    assert_eq!(set.policies.iter().filter(denies).count(), 1);
    assert_eq!(set.namespaces["demo"]["kubernetes.io/metadata.name"], "demo");
    let services: Vec<_> = set
        .services
        .iter()
        .map(|(service, _)| service.reference.to_string())
        .collect();
    assert_eq!(services, ["demo/web", "demo/store"]);
    assert_eq!(set.services[1].0.network, Some("blue".parse().unwrap()));
    for (slice, _) in &set.slices {
        let owner = set
            .services
            .iter()
            .find(|(service, _)| service.reference.name == slice.service);
        let (owner, _) = owner.expect("the slice's Service is there");
        assert!(
            slice
                .ports
                .iter()
                .all(|port| owner.ports.iter().any(|other| other.name == port.name))
        );
        assert!(!slice.endpoints.is_empty());
    }
    assert_eq!(set.slices.len(), 3);
}

#[test]
fn every_kind_has_its_place() {
    let text = [
        policy("p", "  podSelector: {}\n"),
        "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: x\n  labels: {ns: x}\nspec: {finalizers: [kubernetes]}\n\
         status: {phase: Active, unheard: of}\n"
            .to_owned(),
        service("s", "10.96.0.1", ""),
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  namespace: x\n  name: s-1\n  labels:\n    \
         kubernetes.io/service-name: s\naddressType: IPv4\nports: [{port: 8080}]\nendpoints: [{addresses: [10.0.0.1]}]\n"
            .to_owned(),
        "apiVersion: kni.dev/v1alpha1\nkind: EgressPolicy\nmetadata: {name: e, namespace: x}\nspec: {podSelector: {}}\n"
            .to_owned(),
        "apiVersion: k8s.cni.cncf.io/v1beta1\nkind: MultiNetworkPolicy\nmetadata:\n  name: m\n  annotations: \
         {k8s.v1.cni.cncf.io/policy-for: blue}\nspec: {podSelector: {}}\n"
            .to_owned(),
    ]
    .join("---\n");
    let set = parse(&text);
    assert_eq!(set.refused, []);
    let policies: Vec<_> = set
        .policies
        .iter()
        .map(|(policy, _)| policy.reference.to_string())
        .collect();
    assert_eq!(
        policies,
        [
            "NetworkPolicy default/p",
            "EgressPolicy x/e",
            "MultiNetworkPolicy default/m"
        ]
    );
    assert_eq!(set.policies[0].1.to_string(), "a.yaml:1");
    assert_eq!(
        set.policies[2].0.scope,
        PolicyScope::Named(
            [NamedNetwork {
                namespace: "default".to_owned(),
                name: "blue".parse().unwrap(),
            }]
            .into()
        )
    );
    assert_eq!(set.namespaces["x"].len(), 2);
    assert_eq!(set.services[0].0.reference.to_string(), "default/s");
    assert_eq!(set.services[0].0.distribution, TrafficDistribution::Any);
    assert_eq!(
        (set.slices[0].0.namespace.as_str(), set.slices[0].0.ports[0].port),
        ("x", 8080)
    );
}

fn check_lost(text: &str, line: u32, field: &str) {
    let set = parse(text);
    let kept = (
        set.policies.len() - set.closed.len(),
        set.services.len(),
        set.slices.len(),
    );
    assert_eq!((kept, set.refused.len()), ((0, 0, 0), 1), "{text}");
    let refusal = &set.refused[0];
    let place = (refusal.line, refusal.field.as_deref());
    assert_eq!(place, (Some(line), Some(field)), "{text}\n{refusal}");
    assert!(refusal.reason.contains("no field of this kind"), "{refusal}");
}

#[test]
fn mistyped_fields_of_policies_are_refused_where_they_stand() {
    for (spec, line, field) in [
        ("  podSelector: {}\n  ingres: []\n", 7, "spec.ingres"),
        (
            "  podSelector:\n    matchlabels: {a: b}\n",
            7,
            "spec.podSelector.matchlabels",
        ),
        (
            "  ingress:\n  - from: []\n  - form:\n    - podSelector: {}\n",
            8,
            "spec.ingress[1].form",
        ),
        (
            "  ingress:\n  - from:\n    - podSelector: {}\n      namespaceselector: {}\n",
            9,
            "spec.ingress[0].from[0].namespaceselector",
        ),
        (
            "  ingress:\n  - ports:\n    - port: 1\n      endport: 2\n",
            9,
            "spec.ingress[0].ports[0].endport",
        ),
        ("  podSelector: {}\nrules: []\n", 7, "rules"),
    ] {
        check_lost(&policy("p", spec), line, field);
    }
    let namespace = policy("p", "  podSelector: {}\n").replace("  name: p", "  name: p\n  namspace: x");
    check_lost(&namespace, 5, "metadata.namspace");
}

#[test]
fn mistyped_fields_of_other_kinds_are_refused_where_they_stand() {
    let text = service("s", "10.96.0.1", "") + "  sesionAffinity: ClientIP\n";
    check_lost(&text, 9, "spec.sesionAffinity");
    let text = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: s\naddressType: IPv4\n\
                endpoints:\n- addresses: [10.0.0.1]\n  conditons: {ready: false}\n";
    check_lost(text, 8, "endpoints[0].conditons");
    let text = "apiVersion: kni.dev/v1alpha1\nkind: EgressPolicy\nmetadata:\n  name: e\nspec:\n  podSelector:\n    \
                matchLabel: {a: b}\n";
    check_lost(text, 7, "spec.podSelector.matchLabel");
    let text = "apiVersion: k8s.cni.cncf.io/v1beta2\nkind: MultiNetworkPolicy\nmetadata:\n  name: m\n  annotations: \
                {k8s.v1.cni.cncf.io/policy-for: blue}\nspec:\n  podSelector: {}\n  egres: []\n";
    check_lost(text, 8, "spec.egres");
}

#[test]
fn wrong_values_are_refused_where_they_stand() {
    for (text, line, field, why) in [
        (
            policy("p", "  ingress:\n  - from:\n    - ipBlock:\n        cidr: 10.0.0.0/8\n        except: [11.0.0.0/8]\n"),
            10,
            "spec.ingress[0].from[0].ipBlock.except[0]",
            "not a part of",
        ),
        (
            policy("p", "  ingress:\n  - ports:\n    - port: 80\n      protocol: tcp\n"),
            9,
            "spec.ingress[0].ports[0].protocol",
            "TCP, UDP or SCTP",
        ),
        (
            policy("p", "  podSelector:\n    matchLabels:\n      app.kubernetes.io/name: a b\n"),
            8,
            "spec.podSelector.matchLabels.app.kubernetes.io/name",
            "not a label value",
        ),
        (
            policy("p", "  podSelector:\n    matchLabels:\n      a: 1\n"),
            8,
            "spec.podSelector.matchLabels.a",
            "expected a string",
        ),
        (policy("p", "  policyTypes: Ingress\n"), 6, "spec.policyTypes", "invalid type"),
        (policy("P", "  podSelector: {}\n"), 4, "metadata.name", "DNS-1123"),
        (
            "apiVersion: k8s.cni.cncf.io/v1beta1\nkind: MultiNetworkPolicy\nmetadata:\n  name: m\n  annotations:\n    a: \
             b\n    k8s.v1.cni.cncf.io/policy-for: Blue\nspec: {podSelector: {}}\n"
                .to_owned(),
            7,
            "metadata.annotations.k8s.v1.cni.cncf.io/policy-for",
            "DNS-1123",
        ),
        (
            "apiVersion: kni.dev/v1alpha1\nkind: EgressPolicy\nmetadata:\n  name: e\nspec:\n  podSelector: {}\n  rules:\n  \
             - action: Deny\n    ports:\n    - port: http\n"
                .to_owned(),
            10,
            "spec.rules[0].ports[0].port",
            "invalid type",
        ),
        (service("s", "10.96.0.1", "kni.dev/network: A"), 5, "metadata.labels.kni.dev/network", "DNS-1123"),
    ] {
        let refusal = refused(&text);
        assert_eq!((refusal.line, refusal.field.as_deref()), (Some(line), Some(field)), "{text}\n{refusal}");
        assert!(refusal.reason.contains(why), "{refusal}");
    }
}

#[test]
fn fields_without_a_value_say_nothing() {
    let text = policy("p", "  podSelector: null\n  ingress:\n  egress: ~\n") + "status: {}\n";
    let text = text.replace("  name: p", "  name: p\n  creationTimestamp: null\n  annotations: {}\n  managedFields: [{manager: kubectl, fieldsV1: {a: {}}}]");
    let set = parse(&text);
    assert_eq!(set.refused, []);
    assert_eq!(set.policies[0].0.ingress, Some(Vec::new()));
}

#[test]
fn lists_are_unfolded() {
    let item = |text: String| {
        let indented: Vec<_> = text.lines().map(|line| format!("  {line}\n")).collect();
        format!("- {}", indented.concat().trim_start())
    };
    let list = |items: &[String]| {
        format!(
            "apiVersion: v1\nkind: List\nmetadata: {{resourceVersion: \"\"}}\nitems:\n{}",
            items.concat()
        )
    };
    let text = list(&[
        item(manifest("blue", "10.0.0.0/16")),
        item(policy("p", "  podSelectr: {}\n")),
        item(service("s", "10.96.0.1", "")),
    ]);
    let set = parse(&text);
    assert_eq!((names(&set), set.services.len()), (vec!["blue"], 1), "{text}");
    assert_eq!(set.services[0].1.to_string(), "a.yaml:17");
    assert_eq!(refused_of(&set), [(Some(16), "p", "spec.podSelectr")]);

    assert_eq!(parse("apiVersion: v1\nkind: List\nitems: []\n"), ManifestSet::default());
    assert_eq!(parse("apiVersion: v1\nkind: List\nitems:\n"), ManifestSet::default());
    for (text, field) in [
        ("apiVersion: v1\nkind: List\nitem: []\n".to_owned(), Some("item")),
        ("apiVersion: v1\nkind: List\n".to_owned(), Some("items")),
        ("apiVersion: v1\nkind: List\nitems: {}\n".to_owned(), Some("items")),
        ("apiVersion: v1\nkind: List\nitems: [a]\n".to_owned(), None),
        (
            list(&[item(list(&[item(manifest("blue", "10.0.0.0/16"))]))]),
            Some("kind"),
        ),
    ] {
        assert_eq!(refused(&text).field.as_deref(), field, "{text}");
    }
}

#[test]
fn names_are_taken_once_per_kind_and_namespace() {
    let in_x = |text: String| text.replacen("metadata:\n", "metadata:\n  namespace: x\n", 1);
    let multi = |version: &str| {
        format!(
            "apiVersion: k8s.cni.cncf.io/{version}\nkind: MultiNetworkPolicy\nmetadata:\n  name: p\n  annotations: \
             {{k8s.v1.cni.cncf.io/policy-for: blue}}\nspec: {{podSelector: {{}}}}\n"
        )
    };
    let one = policy("p", "  podSelector: {}\n");
    let default = one.replacen("metadata:\n", "metadata:\n  namespace: default\n", 1);
    let text = [one.clone(), in_x(one), multi("v1beta1"), multi("v1beta2"), default].join("---\n");
    let set = parse(&text);
    let kept: Vec<_> = set
        .policies
        .iter()
        .map(|(policy, _)| policy.reference.to_string())
        .collect();
    assert_eq!(
        kept,
        [
            "NetworkPolicy default/p",
            "NetworkPolicy x/p",
            "MultiNetworkPolicy default/p"
        ]
    );
    let lines: Vec<_> = refused_of(&set);
    assert_eq!(
        lines,
        [
            (Some(26), "default/p", "metadata.name"),
            (Some(34), "default/p", "metadata.name")
        ]
    );
    assert!(
        set.refused[1].reason.contains("defined at a.yaml:1"),
        "{}",
        set.refused[1]
    );
}

#[test]
fn somebody_elses_objects_are_valid_and_hold_their_name() {
    let headless = service("s", "None", "");
    let set = parse(&headless);
    assert_eq!(set, ManifestSet::default());
    let set = parse(&format!("{headless}---\n{}", service("s", "10.96.0.1", "")));
    assert_eq!(
        (set.services.len(), refused_of(&set)),
        (0, vec![(Some(13), "default/s", "metadata.name")])
    );
}

#[test]
fn an_address_belongs_to_one_service_of_a_network() {
    let text = [
        service("a", "10.96.0.1", ""),
        service("b", "10.96.0.1", "kni.dev/network: blue"),
        service("c", "10.96.0.1", ""),
        service("d", "10.96.0.1", "kni.dev/network: main"),
        manifest("main", "10.0.0.0/16") + "  default: true\n",
    ]
    .join("---\n");
    let set = parse(&text);
    let kept: Vec<_> = set
        .services
        .iter()
        .map(|(service, _)| service.reference.name.as_str())
        .collect();
    assert_eq!(kept, ["a", "b"]);
    assert_eq!(
        refused_of(&set),
        [
            (Some(26), "default/c", "spec.clusterIP"),
            (Some(35), "default/d", "spec.clusterIP")
        ]
    );
    assert!(
        set.refused[0].reason.contains("the Service at a.yaml:1"),
        "{}",
        set.refused[0]
    );
}

/// The number of rules that each policy has, by name, and whether it is closed.
fn rules(set: &ManifestSet) -> Vec<(String, usize, bool)> {
    let policies = set.policies.iter().map(|(policy, _)| {
        let rules = policy.ingress.as_ref().map_or(0, Vec::len);
        (
            policy.reference.to_string(),
            rules,
            set.closed.contains(&policy.reference),
        )
    });
    policies.collect()
}

#[test]
fn a_refused_policy_keeps_its_last_valid_version_or_allows_nothing() {
    let texts = |text: &str| vec![(PathBuf::from("a.yaml"), Ok(text.to_owned()))];
    let valid = policy("p", "  podSelector: {matchLabels: {app: a}}\n  ingress: [{}]\n");
    let invalid = valid.replace("[{}]", "[{from: [{}]}]");
    let lost = valid.replace("ingress", "ingres");
    let broken = valid.replace("  name: p", "\tname: p");
    let unknown = valid.replace("kind: NetworkPolicy", "kind: NetworkPolcy");
    let name = || "NetworkPolicy default/p".to_owned();
    for refused in [&invalid, &lost] {
        let first = folder::parse(&texts(refused), None);
        assert_eq!(rules(&first), [(name(), 0, true)], "{refused}");
        let selector = &first.policies[0].0.pods;
        assert_eq!(selector.requirements.len(), 1, "only the pods that it selects");
        let again = folder::parse(&texts(refused), Some(&first));
        assert_eq!(rules(&again), [(name(), 0, true)], "{refused}");
    }
    let good = folder::parse(&texts(&valid), None);
    assert_eq!(rules(&good), [(name(), 1, false)]);
    let mut former = good;
    for refused in [&invalid, &broken, &lost, &unknown] {
        former = folder::parse(&texts(refused), Some(&former));
        assert_eq!(rules(&former), [(name(), 1, false)], "{refused}");
        assert_eq!(former.refused.len(), 1, "{refused}");
    }
    let twice = [invalid, valid].join("---\n");
    assert_eq!(
        rules(&folder::parse(&texts(&twice), Some(&former))),
        [(name(), 1, false)],
        "one document is valid"
    );
    let deleted = folder::parse(&texts(""), Some(&former));
    assert_eq!(rules(&deleted), []);
}
