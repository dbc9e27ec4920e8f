use proptest::prelude::*;

use super::*;

type Entries = BTreeMap<String, String>;

/// A request up to v0.0.5, as its clients encode it.
#[derive(Debug, Clone, Default)]
struct Early {
    labels: Entries,
    annotations: Entries,
    extradata: Entries,
}

/// How a client encodes entries of maps: Go writes empty texts, prost omits them.
#[derive(Debug, Clone, Copy)]
enum Encoding {
    Go,
    Prost,
}

impl Encoding {
    fn entries(self, entries: &Entries) -> Vec<Vec<u8>> {
        let each = entries.iter().map(|(key, value)| self.entry(key, value));
        each.collect()
    }

    fn entry(self, key: &str, value: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (number, text) in [(1, key), (2, value)] {
            if matches!(self, Self::Go) || !text.is_empty() {
                prost::encoding::string::encode(number, &text.to_owned(), &mut bytes);
            }
        }
        bytes
    }
}

fn early(request: &Early, encoding: Encoding) -> AttachNetworkRequest {
    AttachNetworkRequest {
        id: "abc".to_owned(),
        dns_config_or_labels: encoding.entries(&request.labels),
        port_mappings_or_annotations: encoding.entries(&request.annotations),
        labels_or_extradata: encoding.entries(&request.extradata),
        ..AttachNetworkRequest::default()
    }
}

fn current(request: &AttachInterfaceRequest, encoding: Encoding) -> AttachNetworkRequest {
    AttachNetworkRequest {
        labels_or_extradata: encoding.entries(&request.labels),
        annotations: encoding.entries(&request.annotations),
        extradata: encoding.entries(&request.extradata),
        ..AttachNetworkRequest::from(request.clone())
    }
}

fn entries<const N: usize>(entries: [(&str, &str); N]) -> Entries {
    entries.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

prop_compose! {
    /// Entries of a client, with those that a kubelet always adds.
    fn some(always: &'static [&'static str])(
        own in prop::collection::btree_map("[a-zA-Z0-9./_-]{1,12}", "[ -~]{0,12}", 0..4),
        value in "[a-z0-9/]{1,8}",
    ) -> Entries {
        let added = always.iter().map(|key| ((*key).to_owned(), value.clone()));
        own.into_iter().chain(added).collect()
    }
}

const LABELS: &[&str] = &[
    "io.kubernetes.pod.name",
    "io.kubernetes.pod.namespace",
    "io.kubernetes.pod.uid",
];
const ANNOTATIONS: &[&str] = &["kni.dev/netns", "kubernetes.io/config.source"];
const EXTRADATA: &[&str] = &["netns"];

fn encoding() -> impl Strategy<Value = Encoding> {
    prop_oneof![Just(Encoding::Go), Just(Encoding::Prost)]
}

fn port_mapping() -> impl Strategy<Value = PortMapping> {
    (0..3_i32, 0..=65535_i32, 0..=65535_i32, "([0-9.]{7})?").prop_map(
        |(protocol, container_port, host_port, host_ip)| PortMapping {
            protocol,
            container_port,
            host_port,
            host_ip,
        },
    )
}

fn dns() -> impl Strategy<Value = Option<DnsConfig>> {
    let texts = || prop::collection::vec("[a-z0-9.:]{1,12}", 0..3);
    prop::option::of(
        (texts(), texts(), texts()).prop_map(|(servers, searches, options)| DnsConfig {
            servers,
            searches,
            options,
        }),
    )
}

proptest! {
    #[test]
    fn what_a_kubelet_sends_in_the_early_layout_is_read(
        labels in some(LABELS),
        annotations in some(ANNOTATIONS),
        extradata in some(EXTRADATA),
        encoding in encoding(),
    ) {
        let request = Early { labels, annotations, extradata };
        let read = attach_network(early(&request, encoding)).unwrap();
        prop_assert_eq!(read.labels, request.labels);
        prop_assert_eq!(read.annotations, request.annotations);
        prop_assert_eq!(read.extradata, request.extradata);
        prop_assert!(read.dns_config.is_none() && read.port_mappings.is_empty());
    }

    #[test]
    fn what_a_kubelet_sends_in_the_current_layout_is_read(
        labels in some(LABELS),
        annotations in some(ANNOTATIONS),
        extradata in some(EXTRADATA),
        port_mappings in prop::collection::vec(port_mapping(), 0..4),
        dns_config in dns(),
        encoding in encoding(),
    ) {
        let request = AttachInterfaceRequest {
            id: "abc".to_owned(),
            dns_config,
            port_mappings,
            labels,
            annotations,
            extradata,
            ..AttachInterfaceRequest::default()
        };
        prop_assert_eq!(attach_network(current(&request, encoding)).unwrap(), request);
    }

    /// Whatever a client sends, the answer is a request or an error.
    #[test]
    fn nothing_panics(fields in prop::array::uniform5(prop::collection::vec(prop::collection::vec(any::<u8>(), 0..24), 0..3))) {
        let [dns_config_or_labels, port_mappings_or_annotations, labels_or_extradata, annotations, extradata] = fields;
        let request = AttachNetworkRequest {
            dns_config_or_labels,
            port_mappings_or_annotations,
            labels_or_extradata,
            annotations,
            extradata,
            ..AttachNetworkRequest::default()
        };
        attach_network(request).ok();
    }
}

/// Clients other than a kubelet may send little.
#[test]
fn small_requests_are_recognised_by_their_texts() {
    let dns = |servers: &[&str], searches: &[&str]| AttachInterfaceRequest {
        dns_config: Some(DnsConfig {
            servers: servers.iter().map(|text| (*text).to_owned()).collect(),
            searches: searches.iter().map(|text| (*text).to_owned()).collect(),
            options: Vec::new(),
        }),
        ..AttachInterfaceRequest::default()
    };
    let labels = |entries: Entries| AttachInterfaceRequest {
        labels: entries,
        ..AttachInterfaceRequest::default()
    };
    for request in [
        AttachInterfaceRequest::default(),
        dns(&["10.96.0.10"], &["cluster.local"]),
        dns(&["fd00::a"], &[]),
        dns(&[], &["cluster.local"]),
        dns(&["resolver"], &[]),
        dns(&["resolver", "other"], &["cluster.local"]),
        dns(&[], &[]),
        labels(entries([("io.kubernetes.pod.name", "web-0")])),
        labels(entries([("app", "web")])),
        labels(entries([
            ("io.kubernetes.pod.name", "web-0"),
            ("netns", "of its author"),
        ])),
        AttachInterfaceRequest {
            port_mappings: vec![PortMapping::default()],
            ..AttachInterfaceRequest::default()
        },
        AttachInterfaceRequest {
            extradata: entries([("netns", "/n")]),
            ..dns(&["resolver"], &["cluster.local"])
        },
    ] {
        let read = attach_network(AttachNetworkRequest::from(request.clone())).unwrap();
        assert_eq!(read, request);
    }
}

#[test]
fn small_early_requests_are_recognised_by_their_texts() {
    for request in [
        Early {
            labels: entries([("app", "web")]),
            ..Early::default()
        },
        Early {
            labels: entries([("io.kubernetes.pod.name", "")]),
            ..Early::default()
        },
        Early {
            annotations: entries([("a", "")]),
            ..Early::default()
        },
        Early {
            extradata: entries([("netns", "/n"), ("more", "x")]),
            ..Early::default()
        },
    ] {
        for encoding in [Encoding::Go, Encoding::Prost] {
            let read = attach_network(early(&request, encoding)).unwrap();
            assert_eq!(
                (read.labels, read.annotations, read.extradata),
                (
                    request.labels.clone(),
                    request.annotations.clone(),
                    request.extradata.clone()
                )
            );
        }
    }
}

#[test]
fn contents_of_both_layouts_are_refused_by_name() {
    let both = |change: fn(&mut AttachNetworkRequest)| {
        let mut request = AttachNetworkRequest {
            name: "web-0".to_owned(),
            namespace: "shop".to_owned(),
            id: "abc".to_owned(),
            ..AttachNetworkRequest::default()
        };
        change(&mut request);
        attach_network(request).unwrap_err().to_string()
    };
    let error = both(|r| {
        r.port_mappings_or_annotations = vec![Encoding::Go.entry("a", "b")];
        r.annotations = vec![Encoding::Go.entry("a", "b")];
    });
    assert_eq!(
        error,
        "pod shop/web-0, sandbox abc: AttachNetworkRequest: contents of two layouts: annotations in field 6, as up to \
         v0.0.5, and the fields 8 and 9, as from v0.0.6 on; call AttachInterface, which has one layout"
    );
    let error = both(|r| {
        r.dns_config_or_labels = vec![Encoding::Go.entry("app", "web")];
        r.labels_or_extradata = vec![Encoding::Go.entry("io.kubernetes.pod.name", "web-0")];
    });
    assert!(
        error.contains("a label in field 5, as up to v0.0.5, and labels in field 7"),
        "{error}"
    );
    let error = both(|r| r.port_mappings_or_annotations = vec![vec![0xff]]);
    assert!(error.contains("field 6: cannot be decoded"), "{error}");
    let error = both(|r| r.annotations = vec![vec![0x0a, 1, 0xff]]);
    assert!(error.contains("annotations: cannot be decoded"), "{error}");
}
