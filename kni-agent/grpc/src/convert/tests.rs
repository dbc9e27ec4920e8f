use std::{collections::BTreeMap, net::IpAddr, path::Path};

use kni_model::{AttachRequest, PodRef, PortProtocol};
use kni_proto::kni::{AttachInterfaceRequest, CreateNetworkRequest, DeleteNetworkRequest, Isolation, PortMapping};

use super::*;

type Entries = BTreeMap<String, String>;

fn entries<const N: usize>(entries: [(&str, &str); N]) -> Entries {
    entries.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

/// A request as the kubelet sends it.
fn request() -> AttachInterfaceRequest {
    AttachInterfaceRequest {
        name: "web-0".to_owned(),
        id: "abc123".to_owned(),
        namespace: "shop".to_owned(),
        labels: entries([("io.kubernetes.pod.uid", "uid-1"), ("app", "web")]),
        extradata: entries([("netns", "/run/netns/a"), ("cgroupPath", "/kubepods")]),
        ..AttachInterfaceRequest::default()
    }
}

fn attach(change: impl FnOnce(&mut AttachInterfaceRequest)) -> Result<AttachRequest, String> {
    let mut request = request();
    change(&mut request);
    request.merge_isolation();
    attach_request(request, NetnsAnnotation::Last).map_err(|error| error.to_string())
}

#[test]
fn a_kubelets_request() {
    let request = attach(|_| {}).unwrap();
    assert_eq!(request.sandbox.as_str(), "abc123");
    let pod = PodRef {
        namespace: "shop".to_owned(),
        name: "web-0".to_owned(),
        uid: "uid-1".to_owned(),
    };
    assert_eq!(request.pod, pod);
    assert_eq!(request.netns, Path::new("/run/netns/a"));
    assert_eq!(request.labels["app"], "web");
    assert!(request.networks.is_empty() && request.port_mappings.is_empty());
    assert_eq!(request.primary, kni_model::PrimarySelection::default());
}

#[test]
fn the_namespace_comes_from_whoever_is_nearest_to_the_runtime() {
    let (e, i, a) = ("/run/netns/extradata", "/run/netns/isolation", "/run/netns/annotation");
    for (extradata, isolation, annotation, expected) in [
        (Some(e), Some(i), Some(a), Some(e)),
        (Some(e), None, None, Some(e)),
        (None, Some(i), Some(a), Some(i)),
        (None, Some(i), None, Some(i)),
        (None, None, Some(a), Some(a)),
        (Some(""), Some(""), Some(a), Some(a)),
        (Some(""), Some(""), Some(""), None),
        (None, None, None, None),
    ] {
        let found = attach(|request| {
            request.extradata = extradata.map(|path| entries([("netns", path)])).unwrap_or_default();
            request.isolation = isolation.map(|path| Isolation {
                path: path.to_owned(),
                ..Isolation::default()
            });
            request.annotations = annotation
                .map(|path| entries([("kni.dev/netns", path)]))
                .unwrap_or_default();
        });
        if let Some(path) = expected {
            assert_eq!(found.unwrap().netns, Path::new(path));
        } else {
            let error = found.unwrap_err();
            assert!(
                error.starts_with("pod shop/web-0, sandbox abc123: netns: no network namespace"),
                "{error}"
            );
        }
    }
}

#[test]
fn a_cluster_has_no_namespace_in_annotations() {
    let mut request = request();
    request.extradata.clear();
    request.annotations = entries([("kni.dev/netns", "/run/netns/a")]);
    assert_eq!(claim(&request, NetnsAnnotation::Ignored), None);
    assert!(claim(&request, NetnsAnnotation::Last).is_some());
    let error = attach_request(request, NetnsAnnotation::Ignored)
        .unwrap_err()
        .to_string();
    assert!(error.contains("netns: no network namespace"), "{error}");
}

#[test]
fn isolation_is_a_network_namespace_and_its_extradata_is_read() {
    let isolated = |kind: &str, extradata: &[(&str, &str)]| Isolation {
        path: "/run/netns/isolation".to_owned(),
        r#type: kind.to_owned(),
        extradata: extradata
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect(),
    };
    for kind in ["", "namespace", "netns", "network"] {
        attach(|r| r.isolation = Some(isolated(kind, &[]))).unwrap();
    }
    for kind in ["Namespace", "vm", " "] {
        let error = attach(|r| r.isolation = Some(isolated(kind, &[]))).unwrap_err();
        let start = format!("pod shop/web-0, sandbox abc123: isolation.type: {kind:?} is none of");
        assert!(error.starts_with(&start), "{error}");
    }
    let found = attach(|r| {
        r.extradata.clear();
        r.isolation = Some(isolated(
            "netns",
            &[("netns", "/run/netns/further"), ("podUID", "uid-1")],
        ));
    });
    assert_eq!(found.unwrap().netns, Path::new("/run/netns/further"));
    let found = attach(|r| r.isolation = Some(isolated("", &[("netns", "/run/netns/other")])));
    assert_eq!(
        found.unwrap().netns,
        Path::new("/run/netns/a"),
        "the request's own entry takes precedence"
    );
}

#[test]
fn the_uid_of_extradata_fills_and_never_contradicts() {
    let uid = |label: Option<&str>, pod_uid: &str| {
        attach(|r| {
            r.labels = label
                .map(|uid| entries([("io.kubernetes.pod.uid", uid)]))
                .unwrap_or_default();
            r.extradata.insert("podUID".to_owned(), pod_uid.to_owned());
            r.extradata.insert("attempt".to_owned(), "1".to_owned());
        })
        .map(|request| request.pod.uid)
    };
    assert_eq!(uid(None, "u1").unwrap(), "u1");
    assert_eq!(uid(Some("u1"), "u1").unwrap(), "u1");
    assert_eq!(uid(Some("u1"), "").unwrap(), "u1");
    let error = uid(Some("u2"), "u1").unwrap_err();
    assert!(
        error.contains("extradata[\"podUID\"]: \"u1\" is not the UID of label io.kubernetes.pod.uid, \"u2\""),
        "{error}"
    );
    let create = |uid: &str| {
        create_request(CreateNetworkRequest {
            uid: uid.to_owned(),
            extradata: entries([("podUID", "u1")]),
            ..Default::default()
        })
    };
    assert_eq!(create("").unwrap().0.uid, "u1");
    assert!(create("u2").unwrap_err().to_string().contains("UID of field uid"));
}

/// A container runtime that is itself the client sends its own name of the sandbox as `name`.
#[test]
fn names_of_sandboxes_are_names_of_pods() {
    let (pod, namespace, uid) = (long(253), long(63), "0f0f0f0f-0000-4000-8000-000000000000");
    let name = format!("{pod}_{namespace}_{uid}_4294967295");
    let labels = entries([
        ("io.kubernetes.pod.name", pod.as_str()),
        ("io.kubernetes.pod.namespace", namespace.as_str()),
        ("io.kubernetes.pod.uid", uid),
    ]);
    let expected = PodRef {
        namespace: namespace.clone(),
        name: pod,
        uid: uid.to_owned(),
    };
    for (labels, field) in [
        (labels.clone(), ""),
        (labels, namespace.as_str()),
        (Entries::new(), namespace.as_str()),
        (Entries::new(), ""),
    ] {
        let found = attach(|r| {
            (r.name, r.namespace, r.labels) = (name.clone(), field.to_owned(), labels);
        });
        assert_eq!(found.unwrap().pod, expected);
    }
    let delete = |name: &str| {
        delete_request(DeleteNetworkRequest {
            id: "abc".to_owned(),
            name: name.to_owned(),
            ..DeleteNetworkRequest::default()
        })
    };
    assert_eq!(delete(&name).unwrap().pod, expected);
    assert_eq!(
        delete(&long(394)).unwrap().pod,
        PodRef::default(),
        "teardown goes by the id"
    );
    // Labels name the pod of a sandbox with any name, as long as no Kubernetes name could be longer.
    let labelled = |name: String| {
        attach(|r| {
            r.name = name;
            r.labels = entries([("io.kubernetes.pod.name", "web-0")]);
        })
    };
    assert_eq!(labelled(long(393)).unwrap().pod.name, "web-0");
    let error = labelled(long(394)).unwrap_err();
    assert!(error.contains("name: 394 bytes long, more than 393"), "{error}");
    // Parts that are not those of a sandbox's name are one name.
    for other in ["a_shop_u", "a_shop_u_x", "a_other_u_0", "a__u_0", "a_shop_u_0_1"] {
        let found = attach(|r| r.name = other.to_owned()).unwrap().pod;
        assert_eq!((found.name.as_str(), found.namespace.as_str()), (other, "shop"));
    }
}

#[test]
fn names_come_from_labels_where_the_request_is_silent() {
    let labels = [
        ("io.kubernetes.pod.name", "label-name"),
        ("io.kubernetes.pod.namespace", "label-namespace"),
        ("io.kubernetes.pod.uid", "label-uid"),
    ];
    let silent = attach(|request| {
        request.labels = entries(labels);
        request.name.clear();
        request.namespace.clear();
    });
    let pod = silent.unwrap().pod;
    assert_eq!(
        (pod.to_string().as_str(), pod.uid.as_str()),
        ("label-namespace/label-name", "label-uid")
    );
    let create = CreateNetworkRequest {
        uid: "own".to_owned(),
        labels: entries(labels),
        ..Default::default()
    };
    let (pod, prefix) = create_request(create).unwrap();
    assert_eq!(
        (pod.name.as_str(), pod.uid.as_str(), prefix.as_str()),
        ("label-name", "own", "")
    );
    let (pod, _) = create_request(CreateNetworkRequest::default()).unwrap();
    assert_eq!(pod, PodRef::default(), "an empty request is legal");
}

fn long(bytes: usize) -> String {
    "x".repeat(bytes)
}

fn one(key: &str, value: String) -> Entries {
    Entries::from([(key.to_owned(), value)])
}

fn many(count: usize) -> Entries {
    (0..count).map(|n| (n.to_string(), String::new())).collect()
}

type Change = fn(&mut AttachInterfaceRequest);

/// Each changed request is refused with an error that contains the text.
fn refused(cases: &[(&str, Change)]) {
    for (expected, change) in cases {
        let error = attach(change).expect_err(expected);
        assert!(error.contains(expected), "{error}\n does not contain\n{expected}");
        assert!(error.starts_with("pod "), "{error}");
    }
}

#[test]
fn refused_names_and_paths() {
    refused(&[
        ("id: sandbox id \"\" is not valid", |r| r.id.clear()),
        ("id: sandbox id", |r| r.id = "a/b".to_owned()),
        ("id: sandbox id", |r| r.id = long(254)),
        ("name: 254 bytes long, more than 253", |r| r.name = long(254)),
        ("name: \"a\\nb\" holds control", |r| r.name = "a\nb".to_owned()),
        ("namespace: 300 bytes", |r| r.namespace = long(300)),
        ("namespace: \"\\0\" holds", |r| r.namespace = "\0".to_owned()),
        ("uid: 300 bytes", |r| r.labels = one("io.kubernetes.pod.uid", long(300))),
        ("extradata[\"netns\"]: \"run\" is not an absolute path", |r| {
            r.extradata = entries([("netns", "run")]);
        }),
        ("extradata[\"netns\"]: \"/run\\u{1b}\" holds", |r| {
            r.extradata = entries([("netns", "/run\u{1b}")]);
        }),
        ("extradata[\"netns\"]: 4096 bytes", |r| {
            r.extradata = one("netns", format!("/{}", long(4095)));
        }),
    ]);
}

#[test]
fn refused_sizes() {
    refused(&[
        ("labels: 278529 bytes", |r| r.labels = one("k", long(272 * 1024))),
        ("annotations: 278529 bytes", |r| {
            r.annotations = one("k", long(272 * 1024));
        }),
        ("extradata: 278529 bytes", |r| r.extradata = one("k", long(272 * 1024))),
        ("labels: 16385 entries", |r| r.labels = many(16385)),
    ]);
}

#[test]
fn refused_annotations() {
    refused(&[
        ("annotations[\"kni.dev/network\"]: network name \"Blue\"", |r| {
            r.annotations = entries([("kni.dev/network", "Blue")]);
        }),
        ("annotations[\"kni.dev/ips\"]: \"10.0.0.1/24\" is not an address", |r| {
            r.annotations = entries([("kni.dev/ips", "10.0.0.1/24")]);
        }),
        ("annotations[\"kni.dev/ips\"]: \"\" is not", |r| {
            r.annotations = entries([("kni.dev/ips", "10.0.0.1,,")]);
        }),
        ("annotations[\"kni.dev/ips\"]: fd00::1 is requested twice", |r| {
            r.annotations = entries([("kni.dev/ips", "fd00::1,fd00:0::1")]);
        }),
        ("annotations[\"kni.dev/ips\"]: more than 16", |r| {
            let list: Vec<String> = (1..=17).map(|n| format!("10.0.0.{n}")).collect();
            r.annotations = one("kni.dev/ips", list.join(","));
        }),
        ("annotations[\"kni.dev/mac\"]: MAC address \"01:00:00:00:00:01\"", |r| {
            r.annotations = entries([("kni.dev/mac", "01:00:00:00:00:01")]);
        }),
        ("annotation k8s.v1.cni.cncf.io/networks", |r| {
            r.annotations = entries([("k8s.v1.cni.cncf.io/networks", "Not A Name")]);
        }),
        (
            "annotation v1.multus-cni.io/default-network, item [0] \"Blue Network\"",
            |r| {
                r.annotations = entries([("v1.multus-cni.io/default-network", "Blue Network")]);
            },
        ),
        ("annotation v1.multus-cni.io/default-network, item [0] \"a/b/c\"", |r| {
            r.annotations = entries([
                ("v1.multus-cni.io/default-network", "a/b/c"),
                ("kni.dev/network", "blue"),
            ]);
        }),
    ]);
}

#[test]
fn limits_let_their_own_value_pass() {
    let request = attach(|r| {
        r.id = long(253);
        r.name = long(253);
        r.namespace = long(253);
        r.annotations = one("k", long(272 * 1024 - 1));
        r.labels = many(16384);
        r.extradata = one("netns", format!("/{}", long(4094)));
    });
    request.unwrap();
}

#[test]
fn annotations_choose_the_primary_and_further_networks() {
    let request = attach(|r| {
        r.annotations = entries([
            ("kni.dev/network", " blue "),
            ("kni.dev/ips", "10.0.0.7, fd00::7"),
            ("kni.dev/mac", "02:00:00:00:00:07"),
            ("k8s.v1.cni.cncf.io/networks", "red@net1"),
            ("kni.io/multi-network", "green"),
        ]);
    })
    .unwrap();
    assert_eq!(request.primary.network.unwrap().as_str(), "blue");
    assert_eq!(
        request.primary.ips,
        ["10.0.0.7", "fd00::7"].map(|ip| ip.parse::<IpAddr>().unwrap())
    );
    assert_eq!(request.primary.mac.unwrap().to_string(), "02:00:00:00:00:07");
    let networks: Vec<&str> = request.networks.iter().map(|n| n.network.as_str()).collect();
    assert_eq!(networks, ["red", "green"]);
    let blank =
        attach(|r| r.annotations = entries([("kni.dev/network", ""), ("kni.dev/ips", " "), ("kni.dev/mac", "")]));
    assert_eq!(blank.unwrap().primary, kni_model::PrimarySelection::default());
}

#[test]
fn the_annotation_of_multus_chooses_the_primary_network_where_no_other_does() {
    let value = r#"[{"name":"blue","namespace":"t","ips":["10.0.0.7"],"mac":"02:00:00:00:00:07"}]"#;
    let multus = ("v1.multus-cni.io/default-network", value);
    let of = |more: &[(&str, &str)]| {
        let all: BTreeMap<String, String> = more
            .iter()
            .chain([&multus])
            .map(|(k, v)| ((*k).into(), (*v).into()))
            .collect();
        attach(|r| r.annotations = all.into_iter().collect()).unwrap().primary
    };
    let primary = of(&[]);
    assert_eq!(primary.network.unwrap().as_str(), "blue");
    assert_eq!(primary.selection.unwrap().namespace.as_deref(), Some("t"));
    assert_eq!(primary.ips, ["10.0.0.7".parse::<IpAddr>().unwrap()]);
    assert!(primary.mac.is_some());
    let named = of(&[("kni.dev/network", "red")]);
    assert_eq!(named.network.unwrap().as_str(), "red");
    assert!(named.selection.is_none() && named.ips.is_empty());
    assert!(of(&[("kni.dev/network", "none")]).none);
    assert_eq!(
        of(&[("kni.dev/ips", "10.0.0.9")]).ips,
        ["10.0.0.9".parse::<IpAddr>().unwrap()]
    );
}

#[test]
fn port_mappings() {
    let mapping = |protocol, container_port, host_port, host_ip: &str| {
        let wire = PortMapping {
            protocol,
            container_port,
            host_port,
            host_ip: host_ip.to_owned(),
        };
        let first = PortMapping {
            container_port: 80,
            ..PortMapping::default()
        };
        attach(|r| r.port_mappings = vec![first, wire]).map(|request| request.port_mappings[1].clone())
    };
    for (protocol, expected) in [(0, PortProtocol::Tcp), (1, PortProtocol::Udp), (2, PortProtocol::Sctp)] {
        let found = mapping(protocol, 65535, 0, "").unwrap();
        assert_eq!(
            (found.protocol, found.container_port, found.host_port),
            (expected, 65535, 0)
        );
        assert_eq!(found.host_ip, None);
    }
    assert_eq!(
        mapping(0, 80, 8080, "::1").unwrap().host_ip,
        Some("::1".parse().unwrap())
    );
    for (result, expected) in [
        (
            mapping(3, 80, 80, ""),
            "port_mappings[1].protocol: 3 is none of TCP (0), UDP (1) and SCTP (2)",
        ),
        (mapping(-1, 80, 80, ""), "port_mappings[1].protocol: -1"),
        (
            mapping(0, 65536, 80, ""),
            "port_mappings[1].container_port: 65536 is not a port",
        ),
        (mapping(0, -1, 80, ""), "port_mappings[1].container_port: -1"),
        (mapping(0, 80, 70000, ""), "port_mappings[1].host_port: 70000"),
        (
            mapping(0, 80, 80, "localhost"),
            "port_mappings[1].host_ip: \"localhost\" is not an address",
        ),
    ] {
        let error = result.unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    let many = attach(|r| r.port_mappings = vec![PortMapping::default(); 16 * 1024 + 1]).unwrap_err();
    assert!(many.contains("port_mappings: 16385 entries"), "{many}");
}

#[test]
fn teardown_is_never_refused() {
    assert!(sandbox_id("").is_none() && sandbox_id("a/b").is_none() && sandbox_id(&long(254)).is_none());
    assert_eq!(sandbox_id("abc").unwrap().as_str(), "abc");
    let delete = |id: &str, name: &str, namespace: &str, netns_path: &str| {
        delete_request(DeleteNetworkRequest {
            id: id.to_owned(),
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            netns_path: netns_path.to_owned(),
            extradata: Entries::default(),
        })
    };
    assert!(delete("", "", "", "").is_none());
    assert!(delete("a/b", "bad\nname", "ns", "relative").is_none());
    let by_name = delete("", "web-0", "shop", "").unwrap();
    assert_eq!(
        (by_name.sandbox, by_name.pod.to_string(), by_name.netns),
        (None, "shop/web-0".to_owned(), None)
    );
    let with_uid = |uid: String| {
        let request = DeleteNetworkRequest {
            name: "web-0".to_owned(),
            extradata: one("podUID", uid),
            ..DeleteNetworkRequest::default()
        };
        delete_request(request).unwrap().pod
    };
    assert_eq!(with_uid("u1".to_owned()).uid, "u1");
    let ignored = with_uid(long(300));
    assert_eq!((ignored.name.as_str(), ignored.uid.as_str()), ("web-0", ""));
    let by_path = delete("", "", "", "/run/netns/a").unwrap();
    assert_eq!(
        (by_path.sandbox, by_path.netns.unwrap().as_path()),
        (None, Path::new("/run/netns/a"))
    );
    let by_id = delete("abc", "", "", "").unwrap();
    assert_eq!((by_id.sandbox.unwrap().as_str(), by_id.pod), ("abc", PodRef::default()));
}

fn container_ports(value: &str) -> Result<Vec<(String, u8, u16)>, String> {
    let request = attach(|request| request.annotations = one("kni.dev/container-ports", value.to_owned()))?;
    let ports = request.container_ports.into_iter();
    Ok(ports.map(|port| (port.name, port.protocol, port.port)).collect())
}

#[test]
fn container_ports_are_those_of_the_pod_spec() {
    let spec = r#"[{"name":"http","containerPort":80},
        {"name":"dns","containerPort":53,"protocol":"UDP","hostPort":53,"hostIP":""},
        {"containerPort":9000},
        {"name":"s","containerPort":65535,"protocol":"SCTP"}]"#;
    let expected = [
        ("http".to_owned(), 6, 80),
        ("dns".to_owned(), 17, 53),
        ("s".to_owned(), 132, 65535),
    ];
    assert_eq!(container_ports(spec).unwrap(), expected);
    for nothing in ["", "  ", "[]"] {
        assert_eq!(container_ports(nothing).unwrap(), []);
    }
    assert!(attach(|_| {}).unwrap().container_ports.is_empty());
}

#[test]
fn container_ports_that_make_no_sense_are_refused() {
    for (value, field, reason) in [
        ("http", "", "is no JSON list of ports: "),
        ("{}", "", "is no JSON list of ports: "),
        (
            r#"[{"name":"a"}]"#,
            "",
            "is no JSON list of ports: missing field `containerPort`",
        ),
        (r#"[{"containerPort":-1}]"#, "", "is no JSON list of ports: "),
        (
            r#"[{"containerPort":0}]"#,
            "[0].containerPort",
            "0 is not a port (1 to 65535)",
        ),
        (
            r#"[{"containerPort":65536}]"#,
            "[0].containerPort",
            "65536 is not a port",
        ),
        (
            r#"[{"containerPort":1},{"containerPort":1,"protocol":"tcp"}]"#,
            "[1].protocol",
            "\"tcp\" is none of TCP, UDP and SCTP",
        ),
        (
            r#"[{"name":"abcdefghijklmnop","containerPort":1}]"#,
            "[0].name",
            "\"abcdefghijklmnop\" is no port name: at most 15",
        ),
        (
            r#"[{"name":"80","containerPort":1}]"#,
            "[0].name",
            "\"80\" is no port name",
        ),
        (
            r#"[{"name":"a--b","containerPort":1}]"#,
            "[0].name",
            "\"a--b\" is no port name",
        ),
        (
            r#"[{"name":"A","containerPort":1}]"#,
            "[0].name",
            "\"A\" is no port name",
        ),
        (
            r#"[{"name":"a","containerPort":1},{"name":"a","containerPort":2,"protocol":"UDP"}]"#,
            "[1].name",
            "\"a\" is used twice",
        ),
    ] {
        let error = container_ports(value).unwrap_err();
        let start =
            format!("pod shop/web-0, sandbox abc123: annotations[\"kni.dev/container-ports\"]{field}: {reason}");
        assert!(error.starts_with(&start), "{error}\n{start}");
    }
    let entries = vec![r#"{"containerPort":1}"#; 1025].join(",");
    let error = container_ports(&format!("[{entries}]")).unwrap_err();
    assert!(error.ends_with("1025 entries, more than 1024"), "{error}");
}
