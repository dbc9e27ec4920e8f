//! Encodes a request of `AttachInterface` as one of `AttachNetwork`, in the layout of v0.0.6 and later.

use std::collections::BTreeMap;

use prost::Message as _;

use crate::kni::{AttachInterfaceRequest, AttachNetworkRequest, MapEntry};

impl From<AttachInterfaceRequest> for AttachNetworkRequest {
    fn from(request: AttachInterfaceRequest) -> Self {
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
        let dns_config = dns_config.iter().map(prost::Message::encode_to_vec);
        let port_mappings = port_mappings.iter().map(prost::Message::encode_to_vec);
        Self {
            name,
            id,
            namespace,
            isolation,
            dns_config_or_labels: dns_config.collect(),
            port_mappings_or_annotations: port_mappings.collect(),
            labels_or_extradata: entries(labels),
            annotations: entries(annotations),
            extradata: entries(extradata),
        }
    }
}

fn entries(map: BTreeMap<String, String>) -> Vec<Vec<u8>> {
    let encoded = map
        .into_iter()
        .map(|(key, value)| MapEntry { key, value }.encode_to_vec());
    encoded.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kni::{DnsConfig, PortMapping};

    #[test]
    fn both_messages_have_the_same_bytes() {
        let entries = |key: &str| BTreeMap::from([(key.to_owned(), "value".to_owned())]);
        let request = AttachInterfaceRequest {
            name: "web-0".to_owned(),
            id: "abc".to_owned(),
            namespace: "shop".to_owned(),
            isolation: None,
            dns_config: Some(DnsConfig {
                servers: vec!["10.96.0.10".to_owned()],
                ..DnsConfig::default()
            }),
            port_mappings: vec![
                PortMapping::default(),
                PortMapping {
                    host_port: 1,
                    ..PortMapping::default()
                },
            ],
            labels: entries("label"),
            annotations: entries("annotation"),
            extradata: entries("extradata"),
        };
        let bytes = request.encode_to_vec();
        assert_eq!(AttachNetworkRequest::from(request).encode_to_vec(), bytes);
    }
}
