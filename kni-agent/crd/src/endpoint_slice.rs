//! Validates an `EndpointSlice` and converts it into the backends of a Service.

use std::net::IpAddr;

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointPort, EndpointSlice as SliceObject};
use kni_model::{
    PodRef,
    service::{EndpointSlice, SliceEndpoint, SlicePort},
};

use super::{
    invalid::{FieldError, InvalidObject, at, read_each, shown},
    names::{NameRule, is_dns_label, of_object, read_names},
    ports::{read_port, read_protocol},
};

/// Label that names the Service.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Label of slices of headless Services.
const HEADLESS: &str = "service.kubernetes.io/headless";

/// The address family of a slice; all of its addresses are of one family.
#[derive(Clone, Copy)]
enum Family {
    V4,
    V6,
}

/// Reads an `EndpointSlice`. `None` if KNI does not serve it: it names no Service, belongs to a headless one, or holds
/// names instead of addresses.
pub fn read_endpoint_slice(object: &SliceObject) -> Result<Option<EndpointSlice>, InvalidObject> {
    convert(object).map_err(of_object("EndpointSlice", &object.metadata))
}

fn convert(object: &SliceObject) -> Result<Option<EndpointSlice>, FieldError> {
    let (namespace, name) = read_names(&object.metadata, NameRule::Subdomain)?;
    let labels = object.metadata.labels.as_ref();
    let label = |key: &str| labels.and_then(|labels| labels.get(key));
    let (Some(service), None) = (label(SERVICE_NAME), label(HEADLESS)) else {
        return Ok(None);
    };
    let family = match object.address_type.as_str() {
        "IPv4" => Family::V4,
        "IPv6" => Family::V6,
        "FQDN" => return Ok(None),
        other => {
            return Err(at(
                "addressType",
                format!("{:?} is not IPv4, IPv6 or FQDN", shown(other)),
            ));
        }
    };
    if !is_dns_label(service) {
        let reason = format!("{:?} is not a Service's name", shown(service));
        return Err(at(format!("metadata.labels.{SERVICE_NAME}"), reason));
    }
    let endpoints = object.endpoints.as_deref().unwrap_or_default();
    let endpoints = read_each("endpoints", endpoints, |path, endpoint| {
        read_endpoint(path, &namespace, family, endpoint)
    })?;
    Ok(Some(EndpointSlice {
        ports: read_ports(object.ports.as_deref().unwrap_or_default())?,
        service: service.clone(),
        endpoints,
        namespace,
        name,
    }))
}

fn read_ports(ports: &[EndpointPort]) -> Result<Vec<SlicePort>, FieldError> {
    let read = read_each("ports", ports, |path, port| {
        let protocol = read_protocol(&format!("{path}.protocol"), port.protocol.as_deref())?;
        let name = port.name.clone().unwrap_or_default();
        let number = port
            .port
            .map(|number| read_port(&format!("{path}.port"), number))
            .transpose()?;
        Ok((name, protocol, number))
    })?;
    for (index, (name, _, _)) in read.iter().enumerate() {
        if read.iter().take(index).any(|(earlier, _, _)| earlier == name) {
            let reason = format!("{:?} is the name of an earlier port", shown(name));
            return Err(at(format!("ports[{index}].name"), reason));
        }
    }
    let with_number = read
        .into_iter()
        .filter_map(|(name, protocol, number)| number.map(|port| SlicePort { name, protocol, port }));
    Ok(with_number.collect())
}

fn read_endpoint(
    field: &str,
    namespace: &str,
    family: Family,
    endpoint: &Endpoint,
) -> Result<SliceEndpoint, FieldError> {
    let addresses_field = format!("{field}.addresses");
    let addresses = read_each(&addresses_field, &endpoint.addresses, |path, text| {
        read_address(path, family, text)
    })?;
    if addresses.is_empty() {
        return Err(at(addresses_field, "has no entries"));
    }
    let conditions = endpoint.conditions.clone().unwrap_or_default();
    let ready = conditions.ready.unwrap_or(true);
    let hints = endpoint.hints.clone().unwrap_or_default();
    Ok(SliceEndpoint {
        addresses,
        ready,
        serving: conditions.serving.unwrap_or(ready),
        terminating: conditions.terminating.unwrap_or(false),
        node: endpoint.node_name.clone(),
        pod: read_pod(namespace, endpoint),
        for_zones: hints.for_zones.into_iter().flatten().map(|zone| zone.name).collect(),
        for_nodes: hints.for_nodes.into_iter().flatten().map(|node| node.name).collect(),
    })
}

/// The pod that an endpoint stands for. Its namespace is that of the slice if it names none.
fn read_pod(namespace: &str, endpoint: &Endpoint) -> Option<PodRef> {
    let target = endpoint.target_ref.as_ref()?;
    (target.kind.as_deref() == Some("Pod")).then(|| PodRef {
        namespace: target.namespace.clone().unwrap_or_else(|| namespace.to_owned()),
        name: target.name.clone().unwrap_or_default(),
        uid: target.uid.clone().unwrap_or_default(),
    })
}

fn read_address(field: &str, family: Family, text: &str) -> Result<IpAddr, FieldError> {
    let read = match family {
        Family::V4 => text.parse().map(IpAddr::V4).ok(),
        Family::V6 => text.parse().map(IpAddr::V6).ok(),
    };
    let name = match family {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    };
    read.filter(|address| !address.is_unspecified() && !address.is_loopback() && !address.is_multicast())
        .ok_or_else(|| {
            at(
                field,
                format!("{:?} is not an {name} address that a host may have", shown(text)),
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF_S: &str = r#""kubernetes.io/service-name":"s""#;

    fn read(labels: &str, fields: &str) -> Result<Option<EndpointSlice>, InvalidObject> {
        let json = format!(
            r#"{{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice",
            "metadata":{{"namespace":"x","name":"s-abc","labels":{{{labels}}}}},{fields}}}"#
        );
        read_endpoint_slice(&serde_json::from_str(&json).unwrap())
    }

    fn endpoint(fields: &str) -> SliceEndpoint {
        let slice = read(
            OF_S,
            &format!(r#""addressType":"IPv4","endpoints":[{{"addresses":["10.0.0.1"]{fields}}}]"#),
        );
        slice.unwrap().unwrap().endpoints.remove(0)
    }

    #[test]
    fn a_slice_keeps_everything_it_says() {
        let slice = read(
            OF_S,
            r#""addressType":"IPv6","ports":[{"name":"a","port":8080},{"name":"b","protocol":"UDP","port":53},{"name":"c"}],
            "endpoints":[{"addresses":["fd00::1","fd00::2"],"nodeName":"n","zone":"z1","conditions":{"ready":false,
            "serving":true,"terminating":true},"hints":{"forZones":[{"name":"z1"},{"name":"z2"}],"forNodes":[{"name":"n"}]},
            "targetRef":{"kind":"Pod","name":"p"}},{"addresses":["fd00::3"]}]"#,
        );
        let slice = slice.unwrap().unwrap();
        assert_eq!(
            (slice.namespace.as_str(), slice.name.as_str(), slice.service.as_str()),
            ("x", "s-abc", "s")
        );
        let ports: Vec<_> = slice
            .ports
            .iter()
            .map(|p| (p.name.as_str(), p.protocol, p.port))
            .collect();
        assert_eq!(ports, [("a", 6, 8080), ("b", 17, 53)]);
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let expect = SliceEndpoint {
            addresses: vec!["fd00::1".parse().unwrap(), "fd00::2".parse().unwrap()],
            ready: false,
            serving: true,
            terminating: true,
            node: Some("n".to_owned()),
            pod: Some(PodRef::named("x", "p")),
            for_zones: set(&["z1", "z2"]),
            for_nodes: set(&["n"]),
        };
        assert_eq!(slice.endpoints[0], expect);
        assert_eq!(slice.endpoints.len(), 2);
    }

    #[test]
    fn conditions_that_are_absent_have_a_meaning() {
        for (conditions, expect) in [
            ("", (true, true, false)),
            (r#","conditions":{}"#, (true, true, false)),
            (r#","conditions":{"ready":false}"#, (false, false, false)),
            (r#","conditions":{"ready":true}"#, (true, true, false)),
            (
                r#","conditions":{"ready":false,"serving":true,"terminating":true}"#,
                (false, true, true),
            ),
        ] {
            let read = endpoint(conditions);
            assert_eq!((read.ready, read.serving, read.terminating), expect, "{conditions}");
        }
    }

    #[test]
    fn those_of_others_are_left_alone() {
        for (labels, address_type) in [
            ("", "IPv4"),
            (
                r#""kubernetes.io/service-name":"s","service.kubernetes.io/headless":"""#,
                "IPv4",
            ),
            (OF_S, "FQDN"),
        ] {
            let slice = read(labels, &format!(r#""addressType":"{address_type}","endpoints":[]"#));
            assert_eq!(slice.unwrap(), None, "{labels} {address_type}");
        }
        assert_eq!(read(OF_S, r#""addressType":"IPv4""#).unwrap().unwrap().endpoints, []);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (fields, field) in [
            (r#""addressType":"ipv4""#, "addressType"),
            (r#""addressType":"IPv4","ports":[{"port":0}]"#, "ports[0].port"),
            (
                r#""addressType":"IPv4","ports":[{"port":1},{"port":2}]"#,
                "ports[1].name",
            ),
            (
                r#""addressType":"IPv4","ports":[{"port":1,"protocol":"X"}]"#,
                "ports[0].protocol",
            ),
            (
                r#""addressType":"IPv4","endpoints":[{"addresses":[]}]"#,
                "endpoints[0].addresses",
            ),
            (
                r#""addressType":"IPv4","endpoints":[{"addresses":["fd00::1"]}]"#,
                "endpoints[0].addresses[0]",
            ),
            (
                r#""addressType":"IPv6","endpoints":[{"addresses":["10.0.0.1"]}]"#,
                "endpoints[0].addresses[0]",
            ),
            (
                r#""addressType":"IPv4","endpoints":[{"addresses":["127.0.0.1"]}]"#,
                "endpoints[0].addresses[0]",
            ),
        ] {
            let error = read(OF_S, fields).unwrap_err();
            assert_eq!(
                (error.object.as_str(), error.field.as_str()),
                ("x/s-abc", field),
                "{fields}"
            );
        }
        let error = read(r#""kubernetes.io/service-name":"a.b""#, r#""addressType":"IPv4""#).unwrap_err();
        assert_eq!(error.field, "metadata.labels.kubernetes.io/service-name");
    }
}
