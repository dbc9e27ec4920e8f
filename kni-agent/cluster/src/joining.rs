//! Derives the networks that a pod joins without a request of its own: its namespace's network, and its attachments.
//! Pure.

use kni_crd::{AttachmentFacts, PodFacts};
use kni_model::{
    AttachRequest, Bandwidth, IfName, NetworkName, NetworkSelection, PluginHints, PrimarySelection, Sandbox, SandboxId,
    policy::Labels, selection::assign_interface_names,
};
use kni_policy::matches;

use super::{networks::Networks, tables::Tables};

/// Names the primary network, in the notation of the Network Plumbing Working Group.
const DEFAULT_NETWORK_ANNOTATION: &str = "v1.multus-cni.io/default-network";

/// The attachments that select a pod, by name; the first of those with one interface name counts.
pub fn attachments<'a>(
    tables: &'a Tables,
    namespace: &str,
    labels: &Labels,
    taken: &[IfName],
) -> Vec<&'a AttachmentFacts> {
    let all = tables.attachments.rows().values();
    let living = all.filter(|row| row.object.metadata.deletion_timestamp.is_none());
    let mut found: Vec<&AttachmentFacts> = Vec::new();
    for facts in living.filter_map(|row| row.facts.as_ref().ok()) {
        let free = |name: &IfName| !taken.contains(name) && found.iter().all(|other| other.ifname != *name);
        if facts.namespace == namespace && matches(&facts.pods, labels) && free(&facts.ifname) {
            found.push(facts);
        }
    }
    found
}

/// Whether a request may name a definition of another tool. All others are complete without them.
pub fn may_name_definition(request: &AttachRequest) -> bool {
    !request.networks.is_empty() || request.hints.annotations.contains_key(DEFAULT_NETWORK_ANNOTATION)
}

/// Fills in the namespace's defaults, and replaces other tools' definitions by networks.
pub fn fill_in(request: &mut AttachRequest, tables: &Tables, networks: &Networks, namespace: &Labels) {
    let pod_namespace = request.pod.namespace.clone();
    for selection in &mut request.networks {
        let at = selection.namespace.as_deref().unwrap_or(&pod_namespace);
        if let Some(network) = tables.definitions.get(at, selection.network.as_str()) {
            selection.network = network.clone();
        }
    }
    if request.primary.none || request.primary.network.is_some() {
        return;
    }
    let asked = request.hints.annotations.get(DEFAULT_NETWORK_ANNOTATION);
    request.primary.network = asked
        .and_then(|asked| definition(tables, &pod_namespace, asked.trim()))
        .or_else(|| networks.default_of(namespace).cloned());
}

/// The network behind `name` or `namespace/name`.
fn definition(tables: &Tables, namespace: &str, asked: &str) -> Option<NetworkName> {
    let (namespace, name) = asked.split_once('/').unwrap_or((namespace, asked));
    let known = tables.definitions.get(namespace, name).cloned();
    known.or_else(|| name.parse().ok())
}

/// The interface names of a request.
pub fn names(request: &AttachRequest) -> Vec<IfName> {
    // Interfaces without a valid name are refused by the attach itself.
    let mut names = assign_interface_names(&request.networks).unwrap_or_default();
    names.extend(request.ifname.clone());
    names
}

/// The id of the sandbox that represents one additional interface; `None` where it would be too long.
pub fn child_id(parent: &SandboxId, ifname: &IfName) -> Option<SandboxId> {
    format!("{parent}~{ifname}").parse().ok()
}

/// The request for one additional interface of the sandbox that `of` requests.
pub fn additional(of: &AttachRequest, facts: &AttachmentFacts, default_route: bool) -> Option<AttachRequest> {
    Some(AttachRequest {
        sandbox: child_id(&of.sandbox, &facts.ifname)?,
        pod: of.pod.clone(),
        netns: of.netns.clone(),
        labels: of.labels.clone(),
        annotated_labels: Labels::new(),
        primary: PrimarySelection {
            network: Some(facts.network.clone()),
            none: false,
            ips: facts.ips.clone(),
            mac: facts.mac,
            default_route: Some(default_route),
        },
        ifname: Some(facts.ifname.clone()),
        cni: None,
        networks: Vec::new(),
        port_mappings: Vec::new(),
        container_ports: of.container_ports.clone(),
        bandwidth: Bandwidth::default(),
        hints: PluginHints::default(),
        parent: Some(of.sandbox.clone()),
    })
}

/// The request for one additional interface of a running sandbox.
pub fn additional_of(sandbox: &Sandbox, facts: &AttachmentFacts) -> Option<AttachRequest> {
    let of = AttachRequest {
        sandbox: sandbox.id.clone(),
        pod: sandbox.pod.clone(),
        netns: sandbox.netns.clone(),
        labels: sandbox.labels.clone(),
        annotated_labels: Labels::new(),
        primary: PrimarySelection::default(),
        networks: Vec::new(),
        port_mappings: Vec::new(),
        container_ports: sandbox.container_ports.clone(),
        ifname: None,
        cni: None,
        bandwidth: Bandwidth::default(),
        hints: PluginHints::default(),
        parent: None,
    };
    additional(&of, facts, false)
}

/// The networks that a pod which is assigned to the node will join: of those that it names, the ones that admit its
/// namespace. No other gives the node addresses for it.
pub fn networks_of(tables: &Tables, networks: &Networks, namespace: &str, pod: &PodFacts) -> Vec<NetworkName> {
    let mut joined = Vec::new();
    match pod.annotations.get(kni_api::NETWORK_ANNOTATION).map(|name| name.trim()) {
        Some(kni_api::NO_NETWORK) => {}
        Some(name) if !name.is_empty() => joined.extend(name.parse().ok()),
        Some(_) | None => {
            let empty = Labels::new();
            let labels = tables.namespaces.get("", namespace).unwrap_or(&empty);
            let asked = pod.annotations.get(DEFAULT_NETWORK_ANNOTATION);
            let asked = asked.and_then(|asked| definition(tables, namespace, asked.trim()));
            joined.extend(asked.or_else(|| networks.default_of(labels).or(networks.default_network()).cloned()));
        }
    }
    let selections = NetworkSelection::parse_annotations(&pod.annotations).unwrap_or_default();
    for selection in selections {
        let at = selection.namespace.as_deref().unwrap_or(namespace);
        let known = tables.definitions.get(at, selection.network.as_str()).cloned();
        joined.push(known.unwrap_or(selection.network));
    }
    let selected = attachments(tables, namespace, &pod.labels, &[]);
    joined.extend(selected.into_iter().map(|facts| facts.network.clone()));
    let labels = tables.namespace_labels(namespace).unwrap_or_default();
    joined.retain(|name| {
        networks
            .spec(name)
            .is_none_or(|spec| spec.admits(namespace, &labels).is_ok())
    });
    joined
}
