//! Reads the virtual addresses of a `Service`, whichever proxy serves it.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::Service as ServiceObject;

/// The virtual addresses of a Service, which the API server takes from its own range, sorted and without duplicates;
/// `None` if it has none. A text that is no address has no effect.
///
/// External addresses and those of load balancers are not among them: the writer of the Service or its status chooses
/// them.
pub fn read_service_addresses(object: &ServiceObject) -> Option<Vec<IpAddr>> {
    let spec = object.spec.as_ref()?;
    let texts = spec.cluster_ip.iter().chain(spec.cluster_ips.iter().flatten());
    let mut addresses: Vec<IpAddr> = texts.filter_map(|text| text.parse().ok()).collect();
    addresses.sort();
    addresses.dedup();
    (!addresses.is_empty()).then_some(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<Vec<String>> {
        let object: ServiceObject = serde_json::from_str(text).unwrap();
        let addresses = read_service_addresses(&object)?;
        Some(addresses.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn the_virtual_addresses_of_a_service_are_read_and_no_others() {
        let text = r#"{
            "spec": {"clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9", "fd96::9"], "externalIPs": ["192.0.2.8"]},
            "status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.7"}, {"hostname": "lb"}, {"ip": "192.0.2.8"}]}}
        }"#;
        let expected = ["10.96.0.9", "fd96::9"].map(str::to_owned);
        assert_eq!(read(text), Some(expected.into()));
    }

    #[test]
    fn a_service_without_addresses_is_none() {
        for text in [
            r#"{"spec": {"clusterIP": "None", "clusterIPs": ["None"]}}"#,
            r#"{"spec": {"type": "ExternalName", "externalName": "x"}}"#,
            r#"{"spec": {"clusterIP": "None", "externalIPs": ["192.0.2.8"]}}"#,
            r#"{"status": {"loadBalancer": {}}}"#,
            "{}",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
