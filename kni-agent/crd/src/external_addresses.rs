//! Reads the addresses of a `Service` that are none of the cluster's own.

use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{LoadBalancerIngress, Service as ServiceObject, ServiceSpec};
use kni_model::service::ExternalAddresses;

use super::cidr::{read_address, read_cidr_truncated};

/// The addresses outside of the cluster. They decide nothing about the validity of the Service: a text that is no
/// address of a host has no effect, and a range of clients that is none admits no client.
pub(super) fn read_external(object: &ServiceObject, spec: &ServiceSpec) -> ExternalAddresses {
    let status = object.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let ingress = status.and_then(|status| status.ingress.as_deref());
    // The API server removes the status of a Service whose type changes; until then it means nothing.
    let ingress = ingress.filter(|_| spec.type_.as_deref() == Some("LoadBalancer"));
    let balanced = ingress.unwrap_or_default().iter().filter(|entry| leads_here(entry));
    let balanced = balanced.filter_map(|entry| host(entry.ip.as_deref()?));
    let chosen = spec.external_ips.as_deref().unwrap_or_default();
    ExternalAddresses {
        balanced: balanced.collect(),
        clients: read_clients(spec),
        chosen: chosen.iter().filter_map(|text| host(text)).collect(),
    }
}

/// Whether the load balancer sends packets to the nodes with its own address as the destination. One that is a proxy
/// does more than that, such as terminating TLS: its connections have to pass it.
fn leads_here(entry: &LoadBalancerIngress) -> bool {
    matches!(entry.ip_mode.as_deref(), None | Some("" | "VIP"))
}

fn host(text: &str) -> Option<IpAddr> {
    read_address(text).ok()
}

/// The ranges, which the API server accepts with blanks around them.
fn read_clients(spec: &ServiceSpec) -> Option<Vec<IpNet>> {
    let ranges = spec.load_balancer_source_ranges.as_deref()?;
    let known = ranges.iter().filter_map(|text| read_cidr_truncated(text.trim()).ok());
    (!ranges.is_empty()).then(|| known.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> ExternalAddresses {
        let object: ServiceObject = serde_json::from_str(text).unwrap();
        read_external(&object, object.spec.as_ref().unwrap())
    }

    fn texts<T: ToString>(found: impl IntoIterator<Item = T>) -> Vec<String> {
        found.into_iter().map(|item| item.to_string()).collect()
    }

    #[test]
    fn addresses_of_load_balancers_and_of_writers_are_kept_apart() {
        let found = read(
            r#"{"spec": {"type": "LoadBalancer", "externalIPs": ["203.0.113.9", "::ffff:203.0.113.8", "x", "127.0.0.1"],
                "loadBalancerSourceRanges": [" 10.244.0.1/16 ", "everyone"]},
            "status": {"loadBalancer": {"ingress": [
                {"ip": "198.51.100.7"}, {"ip": "2001:db8::7", "ipMode": "VIP"}, {"ip": "198.51.100.7"},
                {"ip": "198.51.100.8", "ipMode": "Proxy"}, {"ip": "198.51.100.9", "ipMode": "Later"},
                {"hostname": "lb.example"}, {"ip": "224.0.0.5"}, {"ip": "0.0.0.0"}, {"ip": "nothing"}]}}}"#,
        );
        assert_eq!(texts(&found.balanced), ["198.51.100.7", "2001:db8::7"]);
        assert_eq!(texts(&found.chosen), ["203.0.113.9"]);
        assert_eq!(texts(found.clients.unwrap()), ["10.244.0.0/16"]);
    }

    #[test]
    fn a_service_of_another_type_has_no_load_balancer() {
        for of_type in ["", r#""type": "ClusterIP""#, r#""type": "NodePort""#] {
            let status = r#""status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.7"}]}}"#;
            let found = read(&format!(r#"{{"spec": {{{of_type}}}, {status}}}"#));
            assert_eq!(found, ExternalAddresses::default(), "{of_type}");
        }
    }

    #[test]
    fn ranges_of_which_none_is_valid_admit_no_client() {
        let clients = |ranges: &str| read(&format!(r#"{{"spec": {{"loadBalancerSourceRanges": {ranges}}}}}"#)).clients;
        assert_eq!(clients("[]"), None);
        assert_eq!(clients(r#"["everyone"]"#), Some(Vec::new()));
    }
}
