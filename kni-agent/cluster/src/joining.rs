//! Derives the networks that a pod joins without a request of its own: its namespace's network, and its attachments.
//! Pure.

use kni_crd::{AttachmentFacts, Definition, PodFacts};
use kni_model::{
    AttachRequest, Bandwidth, Home, IfName, NetworkName, NetworkSelection, PluginHints, PrimarySelection, Sandbox,
    SandboxId, SelectionError, Selections,
    policy::Labels,
    selection::{DEFAULT_NETWORK_ANNOTATION, assign_interface_names},
};
use kni_policy::matches;

use super::{networks::Networks, tables::Tables};

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
pub const fn may_name_definition(request: &AttachRequest) -> bool {
    !request.networks.is_empty() || request.primary.selection.is_some()
}

/// Replaces other tools' definitions by networks. A pod that names no network gets the one of its namespace, whose home
/// is `home`.
pub fn fill_in(
    request: &mut AttachRequest,
    tables: &Tables,
    networks: &Networks,
    home: &Home,
) -> Result<(), SelectionError> {
    for selection in &mut request.networks {
        resolve(selection, (tables, networks), &request.pod.namespace)
            .map_err(|reason| refusal(None, selection, reason))?;
    }
    let primary = &mut request.primary;
    if let Some(selection) = &mut primary.selection {
        resolve(selection, (tables, networks), &request.pod.namespace)
            .map_err(|reason| refusal(Some(DEFAULT_NETWORK_ANNOTATION), selection, reason))?;
        primary.network = Some(selection.network.clone());
    }
    if !primary.none && primary.network.is_none() {
        primary.by_namespace = true;
        primary.network = home.network().cloned();
    }
    Ok(())
}

/// Replaces a definition that the selection of a pod of `namespace` names by its network.
fn resolve(
    selection: &mut NetworkSelection,
    (tables, networks): (&Tables, &Networks),
    namespace: &str,
) -> Result<(), String> {
    let namespace = selection.namespace.as_deref().unwrap_or(namespace);
    let Some(definition) = tables.definitions.get(namespace, selection.network.as_str()) else {
        return Ok(());
    };
    let name = format!("{namespace}/{}", selection.network);
    selection.network = match definition {
        Definition::Network(network) => network.clone(),
        Definition::Default => {
            let default = networks.default_network().cloned();
            default.ok_or_else(|| {
                format!("NetworkAttachmentDefinition {name} is for the default network: there is none")
            })?
        }
        Definition::Invalid(reason) => return Err(format!("NetworkAttachmentDefinition {name}: {reason}")),
    };
    selection.definition = Some(name);
    Ok(())
}

fn refusal(annotation: Option<&'static str>, selection: &NetworkSelection, reason: String) -> SelectionError {
    SelectionError {
        annotation,
        index: None,
        text: selection.network.to_string(),
        field: String::new(),
        reason,
    }
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
            ips: facts.ips.clone(),
            mac: facts.mac,
            default_route: Some(default_route),
            ..PrimarySelection::default()
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
/// namespace. No other gives the node addresses for it. None where the attach would be refused: the annotations are not
/// valid, or the network of the namespace is not known.
pub fn networks_of(tables: &Tables, networks: &Networks, namespace: &str, pod: &PodFacts) -> Vec<NetworkName> {
    let labels = tables.namespace_labels(namespace).unwrap_or_default();
    let mut joined = named_by(tables, networks, (namespace, &labels), pod).unwrap_or_default();
    let selected = attachments(tables, namespace, &pod.labels, &[]);
    joined.extend(selected.into_iter().map(|facts| facts.network.clone()));
    joined.retain(|name| {
        networks
            .spec(name)
            .is_none_or(|spec| spec.admits(namespace, &labels).is_ok())
    });
    joined
}

/// The networks of the interfaces that a pod has by its namespace and its annotations; `None` where one of them is not
/// known.
fn named_by(
    tables: &Tables,
    networks: &Networks,
    (namespace, labels): (&str, &Labels),
    pod: &PodFacts,
) -> Option<Vec<NetworkName>> {
    let Selections { primary, additional } = NetworkSelection::parse_annotations(&pod.annotations).ok()?;
    let target = |mut selection: NetworkSelection| {
        resolve(&mut selection, (tables, networks), namespace).ok()?;
        Some(selection.network)
    };
    let named = pod.annotations.get(kni_api::NETWORK_ANNOTATION).map(|name| name.trim());
    let first = match (named.filter(|name| !name.is_empty()), primary) {
        (Some(kni_api::NO_NETWORK), _) => None,
        (Some(name), _) => Some(name.parse().ok()?),
        (None, Some(selection)) => Some(target(selection)?),
        (None, None) => match networks.home(namespace, labels) {
            Home::Network(name) => Some(name),
            Home::Default => networks.default_network().cloned(),
            Home::Unknown(_) => return None,
        },
    };
    let additional: Option<Vec<NetworkName>> = additional.into_iter().map(target).collect();
    Some(first.into_iter().chain(additional?).collect())
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use kni_model::PodRef;
    use serde_json::{Value, json};

    use super::*;
    use crate::{HeldBlocks, table::Key};

    /// Networks default, red (of tenant a) and blue; definitions of namespace x; namespaces x and, of tenant a, y.
    fn cluster() -> Tables {
        let mut tables = Tables::default();
        let all = json!({ "namespaces": { "from": "All" } });
        let a = json!({ "matchLabels": { "tenant": "a" } });
        for (name, spec) in [
            ("default", json!({ "subnets": ["10.0.0.0/16"], "default": true })),
            (
                "red",
                json!({ "subnets": ["10.1.0.0/16"], "namespaceSelector": a, "access": all }),
            ),
            ("blue", json!({ "subnets": ["10.2.0.0/16"], "access": all })),
        ] {
            let object = json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": name }, "spec": spec,
            });
            let object = serde_json::from_value(object).unwrap();
            tables.networks.put(Key::new("", name), Some(Arc::new(object)));
        }
        for (name, definition) in [
            ("to-blue", Definition::Network("blue".parse().unwrap())),
            ("to-default", Definition::Default),
            ("bad", Definition::Invalid("spec.config: no plugin type".to_owned())),
        ] {
            tables.definitions.put(Key::new("x", name), Some(definition));
        }
        tables.namespaces.put(Key::new("", "x"), Some(Labels::new()));
        let tenant = [("tenant".to_owned(), "a".to_owned())].into();
        tables.namespaces.put(Key::new("", "y"), Some(tenant));
        tables
    }

    fn pod(annotations: &[(&str, &str)]) -> PodFacts {
        let annotations = annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        PodFacts {
            annotations: annotations.collect(),
            ..PodFacts::default()
        }
    }

    /// The networks of the interfaces of an attached pod, each with its definition.
    fn attached(
        namespace: &str,
        annotations: &[(&str, &str)],
    ) -> Result<Vec<(String, Option<String>)>, SelectionError> {
        let tables = cluster();
        let networks = Networks::of(&tables, &HeldBlocks::new());
        let home = networks.home(namespace, &tables.namespace_labels(namespace).unwrap());
        let selections = NetworkSelection::parse_annotations(&pod(annotations).annotations)?;
        let mut request = AttachRequest {
            sandbox: "s".parse().unwrap(),
            pod: PodRef::named(namespace, "web"),
            netns: "/run/netns/x".into(),
            labels: BTreeMap::new(),
            annotated_labels: BTreeMap::new(),
            primary: PrimarySelection {
                network: selections.primary.as_ref().map(|named| named.network.clone()),
                selection: selections.primary,
                ..PrimarySelection::default()
            },
            ifname: None,
            cni: None,
            networks: selections.additional,
            port_mappings: Vec::new(),
            container_ports: Vec::new(),
            bandwidth: Bandwidth::default(),
            hints: PluginHints::default(),
            parent: None,
        };
        fill_in(&mut request, &tables, &networks, &home)?;
        let primary = request.primary;
        let network = primary
            .network
            .map_or_else(|| "by default".to_owned(), |name| name.to_string());
        let mut all = vec![(network, primary.selection.and_then(|named| named.definition))];
        let additional = request.networks.into_iter();
        all.extend(additional.map(|named| (named.network.to_string(), named.definition)));
        Ok(all)
    }

    const DEFAULT: &str = DEFAULT_NETWORK_ANNOTATION;
    const MORE: &str = kni_model::selection::NETWORKS_ANNOTATION;

    #[test]
    fn both_annotations_of_multus_lead_to_networks_by_name_and_by_definition() {
        let none: [(&str, &str); 0] = [];
        for (namespace, annotations, expected) in [
            ("x", &none[..], vec![("by default", None)]),
            ("y", &none[..], vec![("red", None)]),
            ("y", &[(DEFAULT, r#"[{"name":"blue"}]"#)][..], vec![("blue", None)]),
            ("x", &[(DEFAULT, "to-blue")][..], vec![("blue", Some("x/to-blue"))]),
            ("y", &[(DEFAULT, "x/to-blue")][..], vec![("blue", Some("x/to-blue"))]),
            (
                "y",
                &[(DEFAULT, "x/to-default")][..],
                vec![("default", Some("x/to-default"))],
            ),
            (
                "x",
                &[(DEFAULT, r#"[{"name":"to-blue"}]"#), (MORE, "red,to-default@data0")][..],
                vec![
                    ("blue", Some("x/to-blue")),
                    ("red", None),
                    ("default", Some("x/to-default")),
                ],
            ),
        ] {
            let found = attached(namespace, annotations).unwrap();
            let found: Vec<_> = found.iter().map(|(name, by)| (name.as_str(), by.as_deref())).collect();
            assert_eq!(found, expected, "{namespace} {annotations:?}");
        }
    }

    #[test]
    fn what_names_no_network_is_refused_and_takes_no_addresses() {
        let tables = cluster();
        let networks = Networks::of(&tables, &HeldBlocks::new());
        for (annotation, value) in [
            (DEFAULT, "Blue Network"),
            (DEFAULT, "a/b/c"),
            (DEFAULT, ""),
            (DEFAULT, "bad"),
            (MORE, "Blue Network"),
            (MORE, r#"[{"name":"blue"}"#),
            (MORE, "bad@data0"),
        ] {
            let annotations = [(annotation, value)];
            let error = attached("x", &annotations).unwrap_err().to_string();
            let quoted = format!("{:?}", value.split('@').next().unwrap());
            assert!(value.is_empty() || error.contains(&quoted), "{value}: {error}");
            let joined = networks_of(&tables, &networks, "x", &pod(&annotations));
            assert!(joined.is_empty(), "{value}: {joined:?}");
        }
        let joined = networks_of(&tables, &networks, "x", &pod(&[(DEFAULT, "to-blue"), (MORE, "red")]));
        assert_eq!(joined, ["blue", "red"].map(|name| name.parse::<NetworkName>().unwrap()));
    }

    #[test]
    fn pods_of_a_namespace_whose_network_is_not_known_take_no_addresses_of_the_default_network() {
        let mut tables = cluster();
        let invalid: Value = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "red" },
            "spec": { "subnets": ["10.1.0.1/16"], "namespaceSelector": { "matchLabels": { "tenant": "a" } } },
        });
        let object = serde_json::from_value(invalid).unwrap();
        tables.networks.put(Key::new("", "red"), Some(Arc::new(object)));
        let networks = Networks::of(&tables, &HeldBlocks::new());
        assert!(networks_of(&tables, &networks, "y", &pod(&[])).is_empty());
        assert_eq!(
            networks_of(&tables, &networks, "x", &pod(&[])),
            ["default".parse::<NetworkName>().unwrap()]
        );
    }
}
