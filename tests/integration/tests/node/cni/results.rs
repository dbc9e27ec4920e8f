use anyhow::Result;
use kni_integration::require;
use serde_json::{Value, json};

use super::scene::{Call, Scene};

const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .map(|object| object.keys().map(String::as_str).collect())
        .unwrap_or_default()
}

#[track_caller]
fn assert_only(value: &Value, required: &[&str], optional: &[&str]) {
    let keys = keys(value);
    for key in required {
        assert!(keys.contains(key), "{key} is missing in {value}");
    }
    for key in keys {
        assert!(
            required.contains(&key) || optional.contains(&key),
            "{key} does not belong in {value}"
        );
    }
}

/// The rules of the specification's section "Result Types", for each version.
fn assert_follows_the_specification(result: &Value, version: &str, call: &Call) {
    assert_eq!(result["cniVersion"], version);
    assert_only(result, &["cniVersion", "interfaces", "ips", "routes", "dns"], &[]);
    let interfaces = result["interfaces"].as_array().expect("a list");
    let new = version == "1.1.0";
    for interface in interfaces {
        let more: &[&str] = if new {
            &["mac", "mtu", "sandbox"]
        } else {
            &["mac", "sandbox"]
        };
        assert_only(interface, &["name"], more);
    }
    let asked: Vec<usize> = interfaces
        .iter()
        .enumerate()
        .filter(|(_, i)| i["name"] == call.ifname.as_str() && i["sandbox"] == call.netns.as_str())
        .map(|(index, _)| index)
        .collect();
    assert_eq!(asked.len(), 1, "{result}");
    let ips = result["ips"].as_array().expect("a list");
    assert!(ips.iter().any(|ip| ip["interface"] == asked[0]), "{result}");
    for ip in ips {
        let with_version = version.starts_with("0.");
        let required: &[&str] = if with_version {
            &["address", "interface", "version"]
        } else {
            &["address", "interface"]
        };
        assert_only(ip, required, &["gateway"]);
        let (address, prefix) = ip["address"]
            .as_str()
            .and_then(|text| text.split_once('/'))
            .expect("a CIDR");
        let address: std::net::IpAddr = address.parse().expect("an address");
        assert!(prefix.parse::<u8>().expect("a prefix") > 0);
        if with_version {
            assert_eq!(ip["version"], if address.is_ipv4() { "4" } else { "6" });
        }
        let gateway: std::net::IpAddr = ip["gateway"].as_str().expect("a gateway").parse().expect("an address");
        assert_eq!(gateway.is_ipv4(), address.is_ipv4());
        let index = usize::try_from(ip["interface"].as_u64().expect("a number")).expect("small");
        assert_eq!(
            interfaces[index]["sandbox"],
            call.netns.as_str(),
            "an address of the host's end"
        );
    }
    for route in result["routes"].as_array().expect("a list") {
        assert_only(route, &["dst"], &["gw"]);
        assert!(
            route["dst"]
                .as_str()
                .is_some_and(|dst| dst.parse::<ipnet::IpNet>().is_ok()),
            "{route}"
        );
    }
    assert_only(&result["dns"], &[], &["nameservers", "domain", "search", "options"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn b13_results_are_what_each_version_says() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("versions").await?;
    for (index, version) in VERSIONS.iter().enumerate() {
        let name = format!("pod{index}");
        let inside = scene.netns(&name)?;
        let call = Call::new(&name, &name)
            .with("cniVersion", json!(version))
            .with("dns", json!({"nameservers": ["10.96.0.10"], "search": ["svc"]}))
            .annotated(&json!({"kni.io/multi-network": "blue"}));
        let result = scene.add(&call)?;
        assert_follows_the_specification(&result, version, &call);
        // The result also matches the interface.
        let shown: Value = serde_json::from_str(&inside.run("ip", &["-j", "address"])?)?;
        for ifname in ["eth0", "net1"] {
            let interfaces = result["interfaces"].as_array().expect("a list");
            let position = interfaces
                .iter()
                .position(|i| i["name"] == ifname)
                .expect("an interface");
            let real = shown
                .as_array()
                .and_then(|all| all.iter().find(|link| link["ifname"] == ifname))
                .expect("a link");
            assert_eq!(interfaces[position]["mac"], real["address"]);
            let told = result["ips"]
                .as_array()
                .expect("a list")
                .iter()
                .filter(|ip| ip["interface"] == position);
            let has = |cidr: &str| {
                let mut addresses = real["addr_info"].as_array().expect("a list").iter();
                addresses
                    .any(|info| format!("{}/{}", info["local"].as_str().unwrap_or_default(), info["prefixlen"]) == cidr)
            };
            let told: Vec<&str> = told.filter_map(|ip| ip["address"].as_str()).collect();
            assert!(told.len() == 2 && told.iter().all(|cidr| has(cidr)), "{told:?} {real}");
        }
        let routes = inside.run("ip", &["route"])?;
        assert!(routes.contains("default via"), "{routes}");
        assert!(result["routes"].to_string().contains("0.0.0.0/0"), "{result}");
        if *version != "0.3.0" && *version != "0.3.1" {
            scene
                .call("CHECK", &call.clone().with("prevResult", result.clone()))?
                .assert_silent_success();
        } else {
            let error = scene
                .call("CHECK", &call.clone().with("prevResult", result.clone()))?
                .error(1);
            assert_eq!(error["cniVersion"], *version);
        }
        scene.del(&call.clone().with("prevResult", result))?;
    }
    Ok(())
}

#[expect(
    clippy::too_many_lines,
    reason = "one call after the other, each with what must come of it"
)]
#[tokio::test(flavor = "multi_thread")]
async fn verbs_that_a_version_lacks_and_broken_calls_have_their_codes() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("codes").await?;
    scene.netns("web-0")?;
    let call = Call::new("abc", "web-0");
    let old = call.clone().with("cniVersion", json!("1.0.0"));
    for verb in ["STATUS", "GC"] {
        assert_eq!(scene.call(verb, &old)?.error(1)["cniVersion"], "1.0.0");
    }
    scene
        .call("ADD", &call.clone().with("cniVersion", json!("2.0.0")))?
        .error(1);
    scene
        .call(
            "ADD",
            &Call {
                ifname: String::new(),
                ..call.clone()
            },
        )?
        .error(4);
    scene
        .call(
            "ADD",
            &Call {
                netns: String::new(),
                ..call.clone()
            },
        )?
        .error(4);
    scene
        .call(
            "ADD",
            &Call {
                container: "a/b".into(),
                ..call.clone()
            },
        )?
        .error(4);
    scene.call("UPDATE", &call)?.error(4);
    scene
        .call(
            "ADD",
            &Call {
                config: json!("text"),
                ..call.clone()
            },
        )?
        .error(6);
    scene.call("ADD", &call.clone().with("name", json!("")))?.error(7);
    scene.call("CHECK", &call)?.error(7);
    scene
        .call("ADD", &call.clone().with("network", json!("nowhere")))?
        .error(7);
    let chained = call
        .clone()
        .with("prevResult", json!({"cniVersion": "1.1.0", "interfaces": []}));
    scene.call("ADD", &chained)?.error(7);
    scene
        .call(
            "ADD",
            &Call {
                netns: "/run/netns/absent".into(),
                ..call.clone()
            },
        )?
        .error(8);
    let version = scene
        .call(
            "VERSION",
            &Call {
                config: json!({}),
                ..call.clone()
            },
        )?
        .result();
    assert_eq!(version, json!({"cniVersion": "1.1.0", "supportedVersions": VERSIONS}));
    assert_eq!(scene.used("default").await?, 0);
    Ok(())
}
