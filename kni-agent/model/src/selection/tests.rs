//! Checks both annotations, both formats and the naming of interfaces.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn selections(pairs: &[(&str, &str)]) -> Result<Selections, SelectionError> {
    let annotations: BTreeMap<String, String> = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    NetworkSelection::parse_annotations(&annotations)
}

fn parse(pairs: &[(&str, &str)]) -> Result<Vec<NetworkSelection>, SelectionError> {
    selections(pairs).map(|found| found.additional)
}

fn primary(value: &str) -> Result<NetworkSelection, SelectionError> {
    selections(&[(DEFAULT_NETWORK_ANNOTATION, value)]).map(|found| found.primary.unwrap())
}

fn npwg(value: &str) -> Result<Vec<NetworkSelection>, SelectionError> {
    parse(&[(NETWORKS_ANNOTATION, value)])
}

fn plain(network: &str) -> NetworkSelection {
    NetworkSelection {
        network: network.parse().unwrap(),
        namespace: None,
        definition: None,
        ifname: None,
        ips: Vec::new(),
        mac: None,
        default_route: false,
    }
}

#[test]
fn comma_list() {
    let mut in_ns = plain("blue");
    in_ns.namespace = Some("tenant".to_owned());
    in_ns.ifname = Some("eth5".parse().unwrap());
    let mut named = plain("green");
    named.ifname = Some("g0".parse().unwrap());
    assert_eq!(
        npwg(" red, tenant/blue@eth5 ,green@g0").unwrap(),
        [plain("red"), in_ns, named]
    );
}

#[test]
fn blank_or_foreign_annotations_select_nothing() {
    assert_eq!(npwg("  ").unwrap(), []);
    assert_eq!(parse(&[("other", "a,b")]).unwrap(), []);
    assert_eq!(npwg("[]").unwrap(), []);
}

#[test]
fn json_list_with_every_field() {
    let value = r#"[{"name":"blue","namespace":"t","ips":["10.10.0.9/24","fd10::9"],"mac":"02:00:00:00:00:09",
        "interface":"b0","default-route":["10.10.0.1"]},{"name":"red","ips":null,"default-route":[]}]"#;
    let blue = NetworkSelection {
        network: "blue".parse().unwrap(),
        namespace: Some("t".to_owned()),
        definition: None,
        ifname: Some("b0".parse().unwrap()),
        ips: vec!["10.10.0.9".parse().unwrap(), "fd10::9".parse().unwrap()],
        mac: Some("02:00:00:00:00:09".parse().unwrap()),
        default_route: true,
    };
    assert_eq!(npwg(value).unwrap(), [blue, plain("red")]);
}

#[test]
fn both_annotations_are_joined_in_a_fixed_order() {
    let found = parse(&[(MULTI_NETWORK_ANNOTATION, "c,d@x0"), (NETWORKS_ANNOTATION, "a,b")]).unwrap();
    let names: Vec<_> = found.iter().map(|s| s.network.as_str()).collect();
    assert_eq!(names, ["a", "b", "c", "d"]);
}

#[test]
fn errors_name_annotation_item_and_field() {
    let cases: &[(&str, Option<usize>, &str, &str)] = &[
        ("a,,b", Some(1), "name", "empty"),
        ("a,Blue", Some(1), "name", "DNS-1123"),
        ("a@", Some(0), "interface", "interface name"),
        ("a@eth0", Some(0), "interface", "primary"),
        ("a@x,b@x", Some(1), "interface", "twice"),
        ("N/a", Some(0), "namespace", "namespace"),
        ("a/b/c", Some(0), "name", "DNS-1123"),
        (
            r#"[{"name":"a"},{"ips":["1.2.3.4"]}]"#,
            Some(1),
            "",
            "missing field `name`",
        ),
        (r#"[{"name":"a","ips":["1.2.3.400"]}]"#, Some(0), "ips", "1.2.3.400"),
        (r#"[{"name":"a","ips":["1.2.3.4/33"]}]"#, Some(0), "ips", "1.2.3.4/33"),
        (r#"[{"name":"a","ips":[7]}]"#, Some(0), "ips[0]", "expected a string"),
        (r#"[{"name":"a","mac":"01:00:00:00:00:00"}]"#, Some(0), "mac", "unicast"),
        (
            r#"[{"name":"a","default-route":["x"]}]"#,
            Some(0),
            "default-route",
            "\"x\"",
        ),
        (r#"[{"name":"a","colour":1}]"#, Some(0), "colour", "unknown field"),
        (r#"[{"name":"a","name":"b"}]"#, Some(0), "", "duplicate field `name`"),
        (r#"{"name":"a"}"#, None, "", "JSON list"),
        (r#"[{"name":"a"}] x"#, None, "", "JSON list"),
        (r#"["a""#, Some(0), "", "expected"),
    ];
    for (value, index, field, reason) in cases {
        let error = npwg(value).expect_err(value);
        assert_eq!(error.annotation, Some(NETWORKS_ANNOTATION));
        assert_eq!(
            (error.index, error.field.as_str()),
            (*index, *field),
            "{value}: {error}"
        );
        assert!(error.reason.contains(reason), "{value}: {error}");
    }
}

#[test]
fn the_network_of_the_primary_interface_is_named_in_both_formats() {
    let in_namespace = NetworkSelection {
        namespace: Some("t".to_owned()),
        ..plain("blue")
    };
    for value in [
        "blue",
        " blue@eth0 ",
        "t/blue",
        r#"[{"name":"blue"}]"#,
        r#"[{"name":"blue","namespace":"t"}]"#,
    ] {
        let NetworkSelection { ifname, .. } = primary(value).unwrap();
        let expected = if value.contains('t') && !value.contains("eth0") {
            &in_namespace
        } else {
            &plain("blue")
        };
        assert_eq!(
            primary(value).unwrap(),
            NetworkSelection {
                ifname,
                ..expected.clone()
            },
            "{value}"
        );
    }
    let chosen = primary(r#"[{"name":"blue","ips":["10.10.0.9/24"],"mac":"02:00:00:00:00:09"}]"#).unwrap();
    assert!(chosen.ips == ["10.10.0.9".parse::<IpAddr>().unwrap()] && chosen.mac.is_some());
    assert_eq!(selections(&[]).unwrap(), Selections::default());
}

#[test]
fn a_network_of_the_primary_interface_that_is_not_valid_is_refused_with_annotation_and_value() {
    for (value, reason) in [
        ("Blue Network", "DNS-1123"),
        ("a/b/c", "DNS-1123"),
        ("A/b", "DNS-1123"),
        ("", "names no network"),
        ("[]", "names no network"),
        ("a,b", "more than one"),
        (r#"[{"name":"a"},{"name":"b"}]"#, "more than one"),
        (r#"{"name":"blue"}"#, "not a JSON list"),
        (r#"[{"name":"blue""#, "EOF"),
        (r#"[{"name":"blue","colour":1}]"#, "unknown field"),
        ("blue@net1", "the primary interface is eth0"),
    ] {
        let error = primary(value).expect_err(value).to_string();
        let first = value.split(',').next().unwrap();
        let quoted = [value, first].map(|value| format!("{value:?}"));
        assert!(
            error.contains(DEFAULT_NETWORK_ANNOTATION) && error.contains(reason),
            "{value}: {error}"
        );
        assert!(
            value.is_empty() || quoted.iter().any(|quoted| error.contains(quoted)),
            "{value}: {error}"
        );
    }
    let routes = r#"[{"name":"a","default-route":["10.0.0.1"]}]"#;
    let twice = selections(&[(DEFAULT_NETWORK_ANNOTATION, routes), (NETWORKS_ANNOTATION, routes)]).unwrap_err();
    assert_eq!(twice.field, "default-route");
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    for (field, value) in [
        ("cni-args", "{}"),
        ("infiniband-guid", "\"c2:11\""),
        ("bandwidth", "{\"ingressRate\":1}"),
        ("portMappings", "[]"),
        ("ipam-claim-reference", "\"x\""),
    ] {
        let error = npwg(&format!(r#"[{{"name":"a","{field}":{value}}}]"#)).unwrap_err();
        assert_eq!((error.field.as_str(), error.reason.as_str()), (field, "not supported"));
        assert_eq!(
            error.to_string(),
            format!("annotation {NETWORKS_ANNOTATION}, item [0] \"a\", field {field}: not supported")
        );
    }
}

#[test]
fn rules_across_annotations() {
    let twice = parse(&[(NETWORKS_ANNOTATION, "a@x"), (MULTI_NETWORK_ANNOTATION, "b,c@x")]).unwrap_err();
    assert_eq!(
        (twice.annotation, twice.index),
        (Some(MULTI_NETWORK_ANNOTATION), Some(1))
    );
    let json = parse(&[(MULTI_NETWORK_ANNOTATION, "[]")]).unwrap_err();
    assert!(json.reason.contains("comma list"), "{json}");
    let routes = r#"[{"name":"a","default-route":["10.0.0.1"]},{"name":"b","default-route":["fd00::1"]}]"#;
    assert_eq!(npwg(routes).unwrap_err().field, "default-route");
}

#[test]
fn limits_hold() {
    let many = |n: usize| vec!["a"; n].join(",");
    assert_eq!(npwg(&many(MAX_NETWORKS)).unwrap().len(), MAX_NETWORKS);
    assert_eq!(npwg(&many(MAX_NETWORKS + 1)).unwrap_err().index, Some(MAX_NETWORKS));
    let both = parse(&[
        (NETWORKS_ANNOTATION, &many(MAX_NETWORKS)),
        (MULTI_NETWORK_ANNOTATION, "b"),
    ])
    .unwrap_err();
    assert_eq!((both.annotation, both.index), (Some(MULTI_NETWORK_ANNOTATION), Some(0)));
    assert!(
        npwg(&"a".repeat(MAX_ANNOTATION_BYTES + 1))
            .unwrap_err()
            .reason
            .contains("bytes long")
    );
}

#[test]
fn interface_names_count_by_position() {
    let named = |list: &str| -> Vec<String> {
        let selections = npwg(list).unwrap();
        assign_interface_names(&selections)
            .unwrap()
            .iter()
            .map(ToString::to_string)
            .collect()
    };
    assert_eq!(named("a,b,c"), ["net1", "net2", "net3"]);
    assert_eq!(named("a,b@x,c"), ["net1", "x", "net3"]);
    assert_eq!(named("a@net2,b,c"), ["net2", "net4", "net3"]);
    assert_eq!(named("a@net4,b@net1,c@net3,d"), ["net4", "net1", "net3", "net5"]);
    assert_eq!(assign_interface_names(&[]).unwrap(), []);
}

#[test]
fn interface_names_given_by_other_means_are_checked_too() {
    let mut a = plain("a");
    a.ifname = Some("x0".parse().unwrap());
    let error = assign_interface_names(&[a.clone(), a]).unwrap_err();
    assert_eq!((error.annotation, error.index), (None, Some(1)));
    let mut b = plain("b");
    b.ifname = Some(PRIMARY_IFNAME.parse().unwrap());
    assert!(assign_interface_names(&[b]).unwrap_err().reason.contains("primary"));
}

prop_compose! {
    fn selection()(
        network in "[a-z][a-z0-9]{0,8}", namespace in proptest::option::of("[a-z]{1,8}"),
        ips in proptest::collection::vec(any::<IpAddr>(), 0..3), mac in any::<[u8; 5]>(),
    ) -> NetworkSelection {
        let [b, c, d, e, f] = mac;
        NetworkSelection { namespace, ips, mac: Some(MacAddr([2, b, c, d, e, f])), ..plain(&network) }
    }
}

proptest! {
    #[test]
    fn any_text_names_the_primary_network_or_is_refused(value in ".{0,200}") {
        if let Err(error) = primary(&value) {
            prop_assert!(error.to_string().contains(DEFAULT_NETWORK_ANNOTATION));
        }
    }

    #[test]
    fn any_text_is_answered(value in ".{0,200}", multi in "[\\[{\"a-z0-9@/,: ]{0,80}") {
        match parse(&[(NETWORKS_ANNOTATION, &value), (MULTI_NETWORK_ANNOTATION, &multi)]) {
            Ok(found) => prop_assert_eq!(assign_interface_names(&found).unwrap().len(), found.len()),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn near_valid_text_is_answered(value in "\\[\\{\"(name|ips|mac|default-route)\":[\\[\\]{}\",:a-z0-9./]{0,40}") {
        if let Ok(found) = npwg(&value) {
            prop_assert!(!found.is_empty());
        }
    }

    #[test]
    fn what_is_written_is_read(selections in proptest::collection::vec(selection(), 0..8)) {
        let elements: Vec<_> = selections.iter().map(|s| serde_json::json!({
            "name": s.network, "namespace": s.namespace, "ips": s.ips, "mac": s.mac,
        })).collect();
        prop_assert_eq!(npwg(&serde_json::to_string(&elements).unwrap()).unwrap(), selections.clone());

        let names = assign_interface_names(&selections).unwrap();
        let comma: Vec<_> = selections.iter().zip(&names).map(|(s, n)| format!("{}@{n}", s.network)).collect();
        let read = npwg(&comma.join(",")).unwrap();
        prop_assert_eq!(assign_interface_names(&read).unwrap(), names);
    }
}
