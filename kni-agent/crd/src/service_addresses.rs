//! Reads the addresses of a `Service`, whichever proxy serves it.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::Service as ServiceObject;

/// The addresses of a Service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServiceAddresses {
    /// Virtual addresses inside the cluster. The API server takes them from its own range.
    pub internal: Vec<IpAddr>,
    /// External addresses, and those of load balancers: chosen by the writer of the Service or its status.
    pub external: Vec<IpAddr>,
}

/// The addresses of a Service; `None` if it has none. A text that is no address has no effect.
pub fn read_service_addresses(object: &ServiceObject) -> Option<ServiceAddresses> {
    let spec = object.spec.as_ref();
    let internal = spec.iter().flat_map(|spec| {
        let first = spec.cluster_ip.iter();
        first.chain(spec.cluster_ips.iter().flatten())
    });
    let external = spec.iter().flat_map(|spec| spec.external_ips.iter().flatten());
    let status = object.status.as_ref();
    let balancer = status.and_then(|status| status.load_balancer.as_ref());
    let ingress = balancer.and_then(|balancer| balancer.ingress.as_ref());
    let ingress = ingress.into_iter().flatten().filter_map(|ingress| ingress.ip.as_ref());
    let addresses = ServiceAddresses {
        internal: addresses(internal),
        external: addresses(external.chain(ingress)),
    };
    (addresses != ServiceAddresses::default()).then_some(addresses)
}

/// Sorted, without duplicates.
fn addresses<'a>(texts: impl Iterator<Item = &'a String>) -> Vec<IpAddr> {
    let mut addresses: Vec<IpAddr> = texts.filter_map(|text| text.parse().ok()).collect();
    addresses.sort();
    addresses.dedup();
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<(Vec<String>, Vec<String>)> {
        let object: ServiceObject = serde_json::from_str(text).unwrap();
        let texts = |all: Vec<IpAddr>| all.iter().map(ToString::to_string).collect();
        let read = read_service_addresses(&object)?;
        Some((texts(read.internal), texts(read.external)))
    }

    #[test]
    fn every_address_of_a_service_is_read() {
        let text = r#"{
            "spec": {"clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9", "fd96::9"], "externalIPs": ["192.0.2.8"]},
            "status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.7"}, {"hostname": "lb"}, {"ip": "192.0.2.8"}]}}
        }"#;
        let texts = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let expected = (texts(&["10.96.0.9", "fd96::9"]), texts(&["192.0.2.8", "198.51.100.7"]));
        assert_eq!(read(text), Some(expected));
    }

    #[test]
    fn a_service_without_addresses_is_none() {
        for text in [
            r#"{"spec": {"clusterIP": "None", "clusterIPs": ["None"]}}"#,
            r#"{"spec": {"type": "ExternalName", "externalName": "x"}}"#,
            r#"{"status": {"loadBalancer": {}}}"#,
            "{}",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
