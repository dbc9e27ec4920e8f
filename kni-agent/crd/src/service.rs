//! Reads a `Service`: the virtual addresses and ports that KNI serves.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use k8s_openapi::api::core::v1::{Service as ServiceObject, ServicePort as PortObject, ServiceSpec};
use kni_model::{
    NetworkName,
    service::{ExternalAddresses, Service, ServicePort, ServiceRef, TrafficDistribution},
};

use super::{
    cidr::read_addresses,
    external_addresses::read_external,
    invalid::{FieldError, InvalidObject, at, read_each, shown},
    names::{NameRule, is_dns_label, of_object, read_names},
    ports::{read_port, read_protocol},
};

/// Label of Services that another proxy serves.
const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// The value of this label for KNI.
const OUR_PROXY: &str = "kni";
/// Label of Services of a named network.
const NETWORK: &str = "kni.dev/network";
/// Annotation that enables zone hints. Takes precedence over `trafficDistribution`, as in the controllers that write
/// the hints.
const TOPOLOGY_MODE: &str = "service.kubernetes.io/topology-mode";
/// Default affinity in seconds (`sessionAffinityConfig.clientIP.timeoutSeconds`).
const DEFAULT_AFFINITY: i32 = 10_800;
const AFFINITY: std::ops::RangeInclusive<i32> = 1..=86_400;

/// Reads a Service. `None` if there is nothing to serve: it is headless, has no virtual address (yet), or is an alias
/// of an external name. Of a Service of another proxy only the addresses are read, because the other fields concern
/// that proxy alone.
pub fn read_service(object: &ServiceObject) -> Result<Option<Service>, InvalidObject> {
    let Some(spec) = &object.spec else {
        let missing = at("spec", "is missing");
        return Err(of_object("Service", &object.metadata)(missing));
    };
    convert(object, spec).map_err(of_object("Service", &object.metadata))
}

fn convert(object: &ServiceObject, spec: &ServiceSpec) -> Result<Option<Service>, FieldError> {
    let (namespace, name) = read_names(&object.metadata, NameRule::Label)?;
    let labels = object.metadata.labels.as_ref();
    let label = |key: &str| labels.and_then(|labels| labels.get(key));
    if spec.type_.as_deref() == Some("ExternalName") {
        return Ok(None);
    }
    let cluster_ips = read_cluster_ips(spec)?;
    if cluster_ips.is_empty() {
        return Ok(None);
    }
    let network = label(NETWORK)
        .map(|name| name.parse::<NetworkName>())
        .transpose()
        .map_err(|error| at(format!("metadata.labels.{NETWORK}"), error.to_string()))?;
    let foreign = Service {
        reference: ServiceRef { namespace, name },
        network,
        cluster_ips,
        foreign: true,
        ports: Vec::new(),
        affinity_seconds: None,
        local_only: false,
        distribution: TrafficDistribution::Any,
        external: ExternalAddresses::default(),
    };
    if label(PROXY_NAME).is_some_and(|proxy| proxy != OUR_PROXY) {
        return Ok(Some(foreign));
    }
    Ok(Some(Service {
        foreign: false,
        ports: read_ports(spec.ports.as_deref().unwrap_or_default())?,
        affinity_seconds: read_affinity(spec)?,
        local_only: read_local_only(spec)?,
        distribution: read_distribution(spec, object.metadata.annotations.as_ref())?,
        external: read_external(object, spec),
        ..foreign
    }))
}

/// Reads the virtual addresses; empty for a Service without any.
fn read_cluster_ips(spec: &ServiceSpec) -> Result<Vec<IpAddr>, FieldError> {
    let single = spec.cluster_ip.as_deref().unwrap_or_default();
    let list = spec.cluster_ips.as_deref().unwrap_or_default();
    let first = list.first().map_or(single, String::as_str);
    if first == "None" || first.is_empty() {
        return Ok(Vec::new());
    }
    if !single.is_empty() && single != first {
        let reason = format!("{:?} is not the first of spec.clusterIPs", shown(single));
        return Err(at("spec.clusterIP", reason));
    }
    if list.is_empty() {
        // The path of the single field is not the path of the list.
        return read_addresses("spec.clusterIP", &[single.to_owned()])
            .map_err(|(_, reason)| at("spec.clusterIP", reason));
    }
    read_addresses("spec.clusterIPs", list)
}

fn read_ports(ports: &[PortObject]) -> Result<Vec<ServicePort>, FieldError> {
    const FIELD: &str = "spec.ports";
    if ports.is_empty() {
        return Err(at(FIELD, "has no entries"));
    }
    let read = read_each(FIELD, ports, |path, port| {
        let name = port.name.clone().unwrap_or_default();
        if name.is_empty() && ports.len() > 1 {
            return Err(at(
                format!("{path}.name"),
                "is missing; it is required for more than one port",
            ));
        }
        if !name.is_empty() && !is_dns_label(&name) {
            return Err(at(
                format!("{path}.name"),
                format!("{:?} is not a DNS-1123 label", shown(&name)),
            ));
        }
        Ok(ServicePort {
            name,
            protocol: read_protocol(&format!("{path}.protocol"), port.protocol.as_deref())?,
            port: read_port(&format!("{path}.port"), port.port)?,
        })
    })?;
    let (mut names, mut numbers) = (BTreeSet::new(), BTreeSet::new());
    for (index, port) in read.iter().enumerate() {
        if !names.insert(&port.name) {
            let reason = format!("{:?} is the name of an earlier port", port.name);
            return Err(at(format!("{FIELD}[{index}].name"), reason));
        }
        if !numbers.insert((port.protocol, port.port)) {
            let reason = format!("{} of the same protocol is there already", port.port);
            return Err(at(format!("{FIELD}[{index}].port"), reason));
        }
    }
    Ok(read)
}

fn read_affinity(spec: &ServiceSpec) -> Result<Option<u32>, FieldError> {
    match spec.session_affinity.as_deref() {
        None | Some("" | "None") => return Ok(None),
        Some("ClientIP") => {}
        Some(other) => {
            let reason = format!("{:?} is not None or ClientIP", shown(other));
            return Err(at("spec.sessionAffinity", reason));
        }
    }
    let config = spec
        .session_affinity_config
        .as_ref()
        .and_then(|config| config.client_ip.as_ref());
    let seconds = config
        .and_then(|client_ip| client_ip.timeout_seconds)
        .unwrap_or(DEFAULT_AFFINITY);
    match u32::try_from(seconds) {
        Ok(valid) if AFFINITY.contains(&seconds) => Ok(Some(valid)),
        Ok(_) | Err(_) => {
            let reason = format!("{seconds} is not in {} to {}", AFFINITY.start(), AFFINITY.end());
            Err(at("spec.sessionAffinityConfig.clientIP.timeoutSeconds", reason))
        }
    }
}

fn read_local_only(spec: &ServiceSpec) -> Result<bool, FieldError> {
    match spec.internal_traffic_policy.as_deref() {
        None | Some("" | "Cluster") => Ok(false),
        Some("Local") => Ok(true),
        Some(other) => {
            let reason = format!("{:?} is not Cluster or Local", shown(other));
            Err(at("spec.internalTrafficPolicy", reason))
        }
    }
}

fn read_distribution(
    spec: &ServiceSpec,
    annotations: Option<&BTreeMap<String, String>>,
) -> Result<TrafficDistribution, FieldError> {
    let said = match spec.traffic_distribution.as_deref() {
        None | Some("") => TrafficDistribution::Any,
        Some("PreferClose" | "PreferSameZone") => TrafficDistribution::SameZone,
        Some("PreferSameNode") => TrafficDistribution::SameNode,
        Some(other) => {
            let reason = format!(
                "{:?} is not PreferClose, PreferSameZone or PreferSameNode",
                shown(other)
            );
            return Err(at("spec.trafficDistribution", reason));
        }
    };
    let mode = annotations.and_then(|annotations| annotations.get(TOPOLOGY_MODE));
    Ok(match mode.map(String::as_str) {
        Some("Auto" | "auto") => TrafficDistribution::SameZone,
        Some(_) | None => said,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(metadata: &str, spec: &str) -> ServiceObject {
        let json = format!(
            r#"{{"apiVersion":"v1","kind":"Service","metadata":{{"namespace":"x","name":"s"{metadata}}},"spec":{spec}}}"#
        );
        serde_json::from_str(&json).unwrap()
    }

    fn read(metadata: &str, spec: &str) -> Result<Option<Service>, InvalidObject> {
        read_service(&object(metadata, spec))
    }

    /// A Service with an address, a port, and these additional fields.
    fn with(fields: &str) -> Result<Option<Service>, InvalidObject> {
        read(
            "",
            &format!(r#"{{"clusterIP":"10.96.0.1","ports":[{{"port":80}}]{fields}}}"#),
        )
    }

    #[test]
    fn the_smallest_service_has_the_defaults() {
        let service = with("").unwrap().unwrap();
        let port = ServicePort {
            name: String::new(),
            protocol: 6,
            port: 80,
        };
        let expect = Service {
            reference: ServiceRef {
                namespace: "x".to_owned(),
                name: "s".to_owned(),
            },
            network: None,
            cluster_ips: vec!["10.96.0.1".parse().unwrap()],
            foreign: false,
            ports: vec![port],
            affinity_seconds: None,
            local_only: false,
            distribution: TrafficDistribution::Any,
            external: ExternalAddresses::default(),
        };
        assert_eq!(service, expect);
    }

    #[test]
    fn a_service_keeps_everything_it_says() {
        let service = read(
            r#","labels":{"kni.dev/network":"blue","service.kubernetes.io/service-proxy-name":"kni"}"#,
            r#"{"clusterIP":"10.96.0.1","clusterIPs":["10.96.0.1","fd00:96::1"],"selector":{"a":"b"},
            "ports":[{"name":"a","port":53,"protocol":"UDP","targetPort":"dns"},{"name":"b","port":53},
            {"name":"c","port":53,"protocol":"SCTP","nodePort":30000}],"type":"NodePort",
            "sessionAffinity":"ClientIP","sessionAffinityConfig":{"clientIP":{"timeoutSeconds":86400}},
            "internalTrafficPolicy":"Local","trafficDistribution":"PreferSameNode"}"#,
        );
        let service = service.unwrap().unwrap();
        assert_eq!(service.network, Some("blue".parse().unwrap()));
        assert_eq!((service.cluster_ips.len(), service.foreign), (2, false));
        let ports: Vec<_> = service
            .ports
            .iter()
            .map(|p| (p.name.as_str(), p.protocol, p.port))
            .collect();
        assert_eq!(ports, [("a", 17, 53), ("b", 6, 53), ("c", 132, 53)]);
        assert_eq!((service.affinity_seconds, service.local_only), (Some(86400), true));
        assert_eq!(service.distribution, TrafficDistribution::SameNode);
    }

    #[test]
    fn those_without_virtual_addresses_are_left_alone() {
        const OTHER: &str = r#","labels":{"service.kubernetes.io/service-proxy-name":"other"}"#;
        let port = r#""ports":[{"port":80}]"#;
        for (metadata, spec) in [
            ("", format!(r#"{{"clusterIP":"None",{port}}}"#)),
            ("", format!(r#"{{"clusterIP":"None","clusterIPs":["None"],{port}}}"#)),
            ("", r#"{"clusterIP":"None"}"#.to_owned()),
            ("", format!(r#"{{"clusterIP":"",{port}}}"#)),
            ("", format!("{{{port}}}")),
            ("", r#"{"type":"ExternalName","externalName":"a.example"}"#.to_owned()),
            (OTHER, format!(r#"{{"clusterIP":"None",{port}}}"#)),
            (
                OTHER,
                r#"{"type":"ExternalName","externalName":"a.example"}"#.to_owned(),
            ),
        ] {
            assert_eq!(read(metadata, &spec).unwrap(), None, "{metadata} {spec}");
        }
    }

    /// Only the addresses are validated: values that KNI refuses may be valid for the other proxy.
    #[test]
    fn of_another_proxys_service_the_addresses_are_kept() {
        let spec = r#"{"clusterIP":"10.96.0.1","clusterIPs":["10.96.0.1","fd00:96::1"],
            "ports":[{"port":1,"protocol":"ICMP"}],"sessionAffinity":"Theirs","internalTrafficPolicy":"Local"}"#;
        for (labels, network) in [
            (r#""service.kubernetes.io/service-proxy-name":"other""#, None),
            (r#""service.kubernetes.io/service-proxy-name":"""#, None),
            (
                r#""kni.dev/network":"blue","service.kubernetes.io/service-proxy-name":"other""#,
                Some("blue".parse().unwrap()),
            ),
        ] {
            let service = read(&format!(r#","labels":{{{labels}}}"#), spec).unwrap().unwrap();
            assert_eq!((service.foreign, service.ports.len()), (true, 0), "{labels}");
            assert_eq!(service.network, network, "{labels}");
            let addresses: Vec<_> = service.cluster_ips.iter().map(ToString::to_string).collect();
            assert_eq!(addresses, ["10.96.0.1", "fd00:96::1"], "{labels}");
        }
    }

    #[test]
    fn preferences_and_affinity() {
        let distribution = |metadata: &str, field: &str| {
            let spec = format!(r#"{{"clusterIP":"10.96.0.1","ports":[{{"port":80}}]{field}}}"#);
            read(metadata, &spec).unwrap().unwrap().distribution
        };
        let auto = r#","annotations":{"service.kubernetes.io/topology-mode":"Auto"}"#;
        let off = r#","annotations":{"service.kubernetes.io/topology-mode":"Disabled"}"#;
        for (metadata, field, expect) in [
            (
                "",
                r#","trafficDistribution":"PreferClose""#,
                TrafficDistribution::SameZone,
            ),
            (
                "",
                r#","trafficDistribution":"PreferSameZone""#,
                TrafficDistribution::SameZone,
            ),
            (auto, "", TrafficDistribution::SameZone),
            (
                auto,
                r#","trafficDistribution":"PreferSameNode""#,
                TrafficDistribution::SameZone,
            ),
            (off, "", TrafficDistribution::Any),
            (
                off,
                r#","trafficDistribution":"PreferSameNode""#,
                TrafficDistribution::SameNode,
            ),
        ] {
            assert_eq!(distribution(metadata, field), expect, "{metadata} {field}");
        }
        let affinity = |field: &str| with(field).unwrap().unwrap().affinity_seconds;
        assert_eq!(affinity(r#","sessionAffinity":"None""#), None);
        assert_eq!(affinity(r#","sessionAffinity":"ClientIP""#), Some(10_800));
        assert_eq!(
            affinity(r#","sessionAffinity":"ClientIP","sessionAffinityConfig":{"clientIP":{}}"#),
            Some(10_800)
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        let timeout = |seconds: i32| {
            format!(
                r#","sessionAffinity":"ClientIP","sessionAffinityConfig":{{"clientIP":{{"timeoutSeconds":{seconds}}}}}"#
            )
        };
        let timeout_field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds";
        for (fields, field) in [
            (r#","sessionAffinity":"Client""#.to_owned(), "spec.sessionAffinity"),
            (timeout(0), timeout_field),
            (timeout(-1), timeout_field),
            (timeout(86401), timeout_field),
            (
                r#","internalTrafficPolicy":"local""#.to_owned(),
                "spec.internalTrafficPolicy",
            ),
            (
                r#","trafficDistribution":"Near""#.to_owned(),
                "spec.trafficDistribution",
            ),
            (r#","clusterIPs":["10.96.0.2"]"#.to_owned(), "spec.clusterIP"),
            (
                r#","clusterIPs":["10.96.0.1","10.96.0.2"]"#.to_owned(),
                "spec.clusterIPs[1]",
            ),
        ] {
            let error = with(&fields).unwrap_err();
            assert_eq!(error.field, field, "{fields}");
            assert_eq!((error.kind, error.object.as_str()), ("Service", "x/s"));
        }
    }

    #[test]
    fn bad_addresses_ports_and_labels_are_named() {
        for (spec, field) in [
            (r#"{"clusterIP":"10.96.0.300","ports":[{"port":80}]}"#, "spec.clusterIP"),
            (r#"{"clusterIP":"127.0.0.1","ports":[{"port":80}]}"#, "spec.clusterIP"),
            (r#"{"clusterIP":"10.96.0.1"}"#, "spec.ports"),
            (
                r#"{"clusterIP":"10.96.0.1","ports":[{"port":0}]}"#,
                "spec.ports[0].port",
            ),
            (
                r#"{"clusterIP":"10.96.0.1","ports":[{"port":1,"protocol":"ICMP"}]}"#,
                "spec.ports[0].protocol",
            ),
            (
                r#"{"clusterIP":"10.96.0.1","ports":[{"port":1,"name":"A"}]}"#,
                "spec.ports[0].name",
            ),
            (
                r#"{"clusterIP":"10.96.0.1","ports":[{"port":1,"name":"a"},{"port":2}]}"#,
                "spec.ports[1].name",
            ),
            (
                r#"{"clusterIP":"10.96.0.1","ports":[{"port":1,"name":"a"},{"port":2,"name":"a"}]}"#,
                "spec.ports[1].name",
            ),
            (
                r#"{"clusterIP":"10.96.0.1","ports":[{"port":1,"name":"a"},{"port":1,"name":"b"}]}"#,
                "spec.ports[1].port",
            ),
        ] {
            assert_eq!(read("", spec).unwrap_err().field, field, "{spec}");
        }
        let network = r#","labels":{"kni.dev/network":"Blue"}"#;
        let error = read(network, r#"{"clusterIP":"10.96.0.1","ports":[{"port":1}]}"#).unwrap_err();
        assert_eq!(error.field, "metadata.labels.kni.dev/network");
        let mut without_spec = object("", r#"{"clusterIP":"10.96.0.1","ports":[{"port":1}]}"#);
        without_spec.spec = None;
        assert_eq!(read_service(&without_spec).unwrap_err().field, "spec");
    }
}
