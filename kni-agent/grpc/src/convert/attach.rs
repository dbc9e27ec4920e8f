//! Parses requests to create a namespace and to attach a sandbox.

use std::{collections::BTreeMap, path::PathBuf};

use kni_model::{AttachRequest, CniAttachment, NetworkSelection, PluginHints, PodRef, SandboxId};
use kni_proto::kni::{AttachInterfaceRequest, CreateNetworkRequest, DnsConfig, Isolation};

use super::{
    bandwidth, bounds, cni, container_ports,
    error::{Refusal, RequestError},
    identity, labels, ports, primary,
};

/// Key of the namespace path in `extradata`.
const NETNS_KEY: &str = "netns";
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
    let pod = identity::pod(name, namespace, uid, &labels);
    let check = || {
        identity::check(&pod)?;
        bounds::path_prefix("netns_path_prefix", &netns_path_prefix)?;
        maps(&labels, &annotations, &extradata)
    };
    check().map_err(|refusal| refusal.of(&pod, ""))?;
    Ok((pod, netns_path_prefix))
}

/// Sandbox and namespace of a request to attach, even if other fields are invalid.
pub(crate) fn claim(request: &AttachInterfaceRequest) -> Option<(SandboxId, PathBuf)> {
    let path = netns(&request.extradata, request.isolation.as_ref(), &request.annotations).ok()?;
    Some((request.id.parse().ok()?, path))
}

/// An attach request, checked field by field. The kubelet applies the resolver settings itself; plugins that use them
/// receive them.
pub(crate) fn attach_request(request: AttachInterfaceRequest) -> Result<AttachRequest, RequestError> {
    let AttachInterfaceRequest {
        name,
        id,
        namespace,
        isolation,
        dns_config,
        port_mappings,
        labels,
        annotations,
        extradata,
    } = request;
    let pod = identity::pod(name, namespace, String::new(), &labels);
    let fields = || {
        identity::check(&pod)?;
        maps(&labels, &annotations, &extradata)?;
        let sandbox: SandboxId = id.parse().map_err(|invalid| Refusal::new("id", format!("{invalid}")))?;
        let netns = netns(&extradata, isolation.as_ref(), &annotations)?;
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
    let (sandbox, netns, primary, cni, bandwidth, annotated_labels, port_mappings, container_ports) =
        fields().map_err(|refusal: Refusal| refusal.of(&pod, &id))?;
    // A CNI call that adds an additional interface implements one of the pod's annotations, so the annotations request
    // no further ones.
    let networks = if cni.as_ref().is_some_and(CniAttachment::is_additional) {
        Vec::new()
    } else {
        NetworkSelection::parse_annotations(&annotations).map_err(|source| RequestError::InvalidSelection {
            pod: Box::new(pod.clone()),
            sandbox: id,
            source: Box::new(source),
        })?
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

/// The namespace path. The kubelet sends it as `extradata`, containerd as `isolation`; both have it from the runtime.
/// The annotation has the lowest precedence because a pod's author can write annotations, and no author may direct the
/// agent to a namespace while the runtime names another. Several different paths are no error: they may be names of one
/// namespace.
fn netns(
    extradata: &BTreeMap<String, String>,
    isolation: Option<&Isolation>,
    annotations: &BTreeMap<String, String>,
) -> Result<PathBuf, Refusal> {
    let sources = [
        ("extradata[\"netns\"]", extradata.get(NETNS_KEY).map(String::as_str)),
        ("isolation.path", isolation.map(|isolation| isolation.path.as_str())),
        (
            "annotations[\"kni.dev/netns\"]",
            annotations.get(NETNS_ANNOTATION).map(String::as_str),
        ),
    ];
    for (field, value) in sources {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            return bounds::path(field, value);
        }
    }
    let reason =
        "no network namespace: neither extradata[\"netns\"], isolation.path nor annotation kni.dev/netns is set";
    Err(Refusal::new("netns", reason))
}
