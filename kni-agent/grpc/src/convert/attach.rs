//! Parses requests to create a namespace and to attach a sandbox.

use std::{collections::BTreeMap, path::PathBuf};

use kni_model::{
    AttachRequest, CniAttachment, NetworkSelection, PluginHints, PodRef, SandboxId, selection::SelectionError,
};
use kni_proto::kni::{AttachInterfaceRequest, CreateNetworkRequest, DnsConfig, Isolation};

use super::{
    Identity, bandwidth, bounds, cni, container_ports,
    error::{Refusal, RequestError},
    extradata, labels, ports, primary,
};

/// Annotation in which the kubelet passes the namespace path to the container runtime.
const NETNS_ANNOTATION: &str = "kni.dev/netns";

/// The pod that requests a namespace, and the requested prefix of its path (empty for the agent's choice).
pub(crate) fn create_request(request: CreateNetworkRequest) -> Result<(PodRef, String), RequestError> {
    let CreateNetworkRequest {
        name,
        uid,
        namespace,
        netns_path_prefix,
        labels,
        annotations,
        extradata,
    } = request;
    let identity = Identity {
        name: &name,
        namespace: &namespace,
        uid: &uid,
        labels: Some(&labels),
        extradata: Some(&extradata),
    };
    let pod = identity.pod();
    let check = || {
        identity.check(&pod)?;
        bounds::path_prefix("netns_path_prefix", &netns_path_prefix)?;
        maps(&labels, &annotations, &extradata)
    };
    check().map_err(|refusal| refusal.of(&pod, ""))?;
    Ok((pod, netns_path_prefix))
}

/// Sandbox and namespace of a request to attach, even if other fields are invalid.
pub(crate) fn claim(request: &AttachInterfaceRequest, annotation: NetnsAnnotation) -> Option<(SandboxId, PathBuf)> {
    let annotated = annotation.of(&request.annotations);
    let path = netns(&request.extradata, request.isolation.as_ref(), annotated).ok()?;
    Some((request.id.parse().ok()?, path))
}

fn invalid_selection(pod: &PodRef, sandbox: String, source: SelectionError) -> RequestError {
    RequestError::InvalidSelection {
        pod: Box::new(pod.clone()),
        sandbox,
        source: Box::new(source),
    }
}

/// An attach request, checked field by field; [`Extradata::merge_isolation`](super::Extradata::merge_isolation) comes
/// first. The kubelet applies the resolver settings itself; plugins that use them receive them.
pub(crate) fn attach_request(
    request: AttachInterfaceRequest,
    annotation: NetnsAnnotation,
) -> Result<AttachRequest, RequestError> {
    let (pod, check) = checked_pod(&request);
    let AttachInterfaceRequest {
        name: _,
        id,
        namespace: _,
        isolation,
        dns_config,
        port_mappings,
        labels,
        annotations,
        extradata,
    } = request;
    let fields = || {
        check?;
        let sandbox: SandboxId = id.parse().map_err(|invalid| Refusal::new("id", format!("{invalid}")))?;
        let netns = netns(&extradata, isolation.as_ref(), annotation.of(&annotations))?;
        let cni = cni::attachment(&extradata, &id)?;
        let mut primary = primary::selection(&annotations)?;
        if cni.is_some() {
            primary = cni::selection(&extradata, primary)?;
        }
        Ok((
            sandbox,
            netns,
            primary,
            cni,
            bandwidth::requested(&extradata, &annotations)?,
            labels::annotated(&labels, &annotations)?,
            ports::mappings(&port_mappings)?,
            container_ports::named(&annotations)?,
        ))
    };
    let (sandbox, netns, mut primary, cni, bandwidth, annotated_labels, port_mappings, container_ports) =
        fields().map_err(|refusal: Refusal| refusal.of(&pod, &id))?;
    // A CNI call that adds an additional interface implements one of the pod's annotations, so the annotations request
    // no further ones.
    let networks = if cni.as_ref().is_some_and(CniAttachment::is_additional) {
        Vec::new()
    } else {
        let parsed = NetworkSelection::parse_annotations(&annotations);
        let selections = parsed.map_err(|source| invalid_selection(&pod, id, source))?;
        primary = primary::or_selected(primary, selections.primary);
        selections.additional
    };
    Ok(AttachRequest {
        sandbox,
        pod,
        netns,
        labels,
        annotated_labels,
        primary,
        networks,
        port_mappings,
        container_ports,
        ifname: cni.as_ref().map(|cni| cni.ifname.clone()),
        cni,
        bandwidth,
        hints: hints(dns_config, annotations),
        parent: None,
    })
}

/// The pod, and whether the fields that identify it, the sizes and the kind of isolation are valid.
fn checked_pod(request: &AttachInterfaceRequest) -> (PodRef, Result<(), Refusal>) {
    let identity = Identity {
        name: &request.name,
        namespace: &request.namespace,
        uid: "",
        labels: Some(&request.labels),
        extradata: Some(&request.extradata),
    };
    let pod = identity.pod();
    let check = || {
        identity.check(&pod)?;
        maps(&request.labels, &request.annotations, &request.extradata)?;
        extradata::check_isolation(request.isolation.as_ref())
    };
    let checked = check();
    (pod, checked)
}

fn maps(
    labels: &BTreeMap<String, String>,
    annotations: &BTreeMap<String, String>,
    extradata: &BTreeMap<String, String>,
) -> Result<(), Refusal> {
    bounds::map("labels", labels)?;
    bounds::map("annotations", annotations)?;
    bounds::map("extradata", extradata)
}

fn hints(dns: Option<DnsConfig>, annotations: BTreeMap<String, String>) -> PluginHints {
    let DnsConfig {
        servers,
        searches,
        options,
    } = dns.unwrap_or_default();
    PluginHints {
        annotations,
        dns_servers: servers,
        dns_searches: searches,
        dns_options: options,
    }
}

/// Whether the namespace path of an annotation is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NetnsAnnotation {
    /// In a cluster: anyone who may create pods can write annotations, and the kubelet or the runtime names the path in
    /// the request.
    Ignored,
    /// Without a cluster, as the last source.
    Last,
}

impl NetnsAnnotation {
    fn of(self, annotations: &BTreeMap<String, String>) -> Option<&str> {
        match self {
            Self::Ignored => None,
            Self::Last => annotations.get(NETNS_ANNOTATION).map(String::as_str),
        }
    }
}

/// The namespace path. The kubelet sends it as `extradata`, containerd as `isolation`; both have it from the runtime.
/// The annotation, where it is read, has the lowest precedence because a pod's author can write annotations, and no
/// author may direct the agent to a namespace while the runtime names another. Several different paths are no error:
/// they may be names of one namespace.
fn netns(
    extradata: &BTreeMap<String, String>,
    isolation: Option<&Isolation>,
    annotated: Option<&str>,
) -> Result<PathBuf, Refusal> {
    let sources = [
        (
            "extradata[\"netns\"]",
            extradata.get(extradata::NETNS).map(String::as_str),
        ),
        ("isolation.path", isolation.map(|isolation| isolation.path.as_str())),
        ("annotations[\"kni.dev/netns\"]", annotated),
    ];
    for (field, value) in sources {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            return bounds::path(field, value);
        }
    }
    let reason = "no network namespace: neither extradata[\"netns\"] nor isolation.path is set, and annotation \
                  kni.dev/netns is read without a cluster only";
    Err(Refusal::new("netns", reason))
}
