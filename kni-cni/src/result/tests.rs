use super::*;

/// An interface as the agent describes it.
fn config(ips: &[&str], mac: &str, about: &[(&str, &str)]) -> IpConfig {
    IpConfig {
        ip: ips.iter().map(|ip| (*ip).to_owned()).collect(),
        mac: mac.to_owned(),
        extradata: about.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
    }
}

fn answer() -> BTreeMap<String, IpConfig> {
    let routes = r#"[{"dst":"0.0.0.0/0","gw":"169.254.1.1"},{"dst":"::/0","gw":"fe80::1"}]"#;
    let primary = config(
        &["10.244.0.5", "fd00::5"],
        "02:00:00:00:00:05",
        &[
            ("host_ifname", "kni5x1234"),
            ("host_mac", "02:00:00:00:01:05"),
            ("mtu", "1450"),
            ("gateway4", "169.254.1.1"),
            ("gateway6", "fe80::1"),
            ("routes", routes),
        ],
    );
    let second = config(&["10.9.0.5"], "02:00:00:00:00:09", &[("prefix4", "24")]);
    // "a" sorts before the requested interface.
    [("eth0".to_owned(), primary), ("a".to_owned(), second)].into()
}

fn made() -> CniResult {
    let dns = Dns {
        servers: vec!["10.0.0.53".into()],
        searches: vec!["example.com".into()],
        ..Dns::default()
    };
    CniResult::of_answer(&answer(), "eth0", "/run/netns/x", &dns)
}

fn printed(version: Version) -> Value {
    serde_json::from_str(&made().to_json(version)).unwrap()
}

#[test]
fn each_version_is_printed_as_its_specification_says() {
    for version in Version::ALL {
        let mut ips = json!([
            {"address": "10.244.0.5/32", "gateway": "169.254.1.1", "interface": 1},
            {"address": "fd00::5/128", "gateway": "fe80::1", "interface": 1},
            {"address": "10.9.0.5/24", "interface": 2},
        ]);
        if version < Version::V1_0_0 {
            for (ip, family) in ips.as_array_mut().unwrap().iter_mut().zip(["4", "6", "4"]) {
                ip["version"] = json!(family);
            }
        }
        let mut interfaces = json!([
            {"name": "kni5x1234", "mac": "02:00:00:00:01:05"},
            {"name": "eth0", "mac": "02:00:00:00:00:05", "sandbox": "/run/netns/x"},
            {"name": "a", "mac": "02:00:00:00:00:09", "sandbox": "/run/netns/x"},
        ]);
        if version == Version::V1_1_0 {
            interfaces[0]["mtu"] = json!(1450);
            interfaces[1]["mtu"] = json!(1450);
        }
        let expected = json!({
            "cniVersion": version.as_str(),
            "interfaces": interfaces,
            "ips": ips,
            "routes": [{"dst": "0.0.0.0/0", "gw": "169.254.1.1"}, {"dst": "::/0", "gw": "fe80::1"}],
            "dns": {"nameservers": ["10.0.0.53"], "search": ["example.com"]},
        });
        assert_eq!(printed(version), expected, "{version:?}");
    }
}

#[test]
fn what_is_printed_is_read_again() {
    for version in Version::ALL {
        let read: CniResult = serde_json::from_value(printed(version)).unwrap();
        assert_eq!((&read.ips, &read.routes), (&made().ips, &made().routes));
        let addresses: Vec<&str> = read.addresses_of("eth0").map(|ip| ip.cidr.as_str()).collect();
        assert_eq!(addresses, ["10.244.0.5/32", "fd00::5/128"]);
        assert_eq!(read.addresses_of("a").count(), 1);
        // The host's end has no addresses, even if a pod's interface has its name.
        assert_eq!(read.addresses_of("kni5x1234").count(), 0);
    }
}

#[test]
fn an_answer_without_anything_is_still_a_result() {
    let empty = CniResult::of_answer(&BTreeMap::new(), "eth0", "/n", &Dns::default());
    let expected = json!({"cniVersion": "1.0.0", "interfaces": [], "ips": [], "routes": [], "dns": {}});
    assert_eq!(
        serde_json::from_str::<Value>(&empty.to_json(Version::V1_0_0)).unwrap(),
        expected
    );
}

/// go-cni credits an address without an interface to eth0, and containerd requires one there.
#[test]
fn a_pod_without_primary_interface_has_the_dummy_address_only() {
    let mut second = answer();
    second.remove("eth0");
    let mut result = CniResult::of_answer(&second, "eth0", "/n", &Dns::default());
    result.add_dummy_address();
    let printed: Value = serde_json::from_str(&result.to_json(Version::V0_4_0)).unwrap();
    let expected = json!([
        {"version": "4", "address": "10.9.0.5/24", "interface": 0},
        {"version": "4", "address": "192.0.0.8/32"},
    ]);
    assert_eq!(printed["ips"], expected);
    assert_eq!(result.addresses_of("eth0").count(), 0);
    let none = |value: &str| has_no_primary_interface(&[(cni::NONE.to_owned(), value.to_owned())].into());
    assert!(none("true") && !none("") && !has_no_primary_interface(&BTreeMap::new()));
}
