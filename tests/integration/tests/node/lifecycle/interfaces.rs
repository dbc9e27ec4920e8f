use std::{collections::BTreeSet, net::IpAddr};

use anyhow::{Context as _, Result};
use kni_integration::{AgentOptions, Manifest, Pod, patience, require, traffic};
use serde_json::Value;

use crate::watched::{Watched, warm};

fn json(text: &str) -> Result<Value> {
    serde_json::from_str(text).with_context(|| text.to_owned())
}

/// `ip -j -d address` of one link in the pod.
fn link(pod: &Pod, ifname: &str) -> Result<Value> {
    Ok(json(&pod.inside.run("ip", &["-j", "-d", "address", "show", "dev", ifname])?)?[0].clone())
}

fn addresses(link: &Value) -> BTreeSet<String> {
    let infos = link["addr_info"].as_array().into_iter().flatten();
    let bare = infos.filter(|info| info["scope"] == "global");
    bare.map(|info| format!("{}/{}", info["local"].as_str().unwrap_or("?"), info["prefixlen"]))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_has_the_interfaces_that_its_annotations_ask_for() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("multi").await?;
    let before = stage.picture().await?;
    let json_list = r#"[
        {"name":"blue","namespace":"team","ips":["10.10.3.3/16","fd10::33"],"mac":"02:00:00:00:00:33",
         "interface":"data0","default-route":["169.254.1.1"]},
        {"name":"red"}
    ]"#;
    let annotations = [
        ("k8s.v1.cni.cncf.io/networks", json_list),
        ("kni.io/multi-network", "blue@x1, red"),
        ("kni.dev/ips", "10.244.7.7, fd00:244::77"),
        ("kni.dev/mac", "02:00:00:00:00:77"),
    ];
    let pod = stage.kubelet.run_pod("team", "web-0", &annotations).await?;
    let names: Vec<&str> = pod.interfaces.keys().map(String::as_str).collect();
    assert_eq!(names, ["data0", "eth0", "net2", "net4", "x1"]);
    assert_eq!(
        pod.interfaces["eth0"].ip,
        ["10.244.7.7", "fd00:244::77"],
        "IPv4 first, bare"
    );
    assert_eq!(pod.interfaces["data0"].ip, ["10.10.3.3", "fd10::33"]);
    assert_eq!(pod.interfaces["eth0"].mac, "02:00:00:00:00:77");
    assert_eq!(pod.interfaces["data0"].mac, "02:00:00:00:00:33");
    for (ifname, config) in &pod.interfaces {
        let link = link(&pod, ifname)?;
        assert_eq!(link["address"], config.mac.as_str(), "{ifname}");
        let expected = config
            .ip
            .iter()
            .map(|ip| format!("{ip}/{}", if ip.contains(':') { 128 } else { 32 }));
        assert_eq!(addresses(&link), expected.collect(), "{ifname}");
        assert!(config.ip[0].parse::<IpAddr>()?.is_ipv4() && config.ip[1].parse::<IpAddr>()?.is_ipv6());
    }
    for family in ["-4", "-6"] {
        let routes = json(&pod.inside.run("ip", &[family, "-j", "route", "show", "default"])?)?;
        let via: Vec<&Value> = routes
            .as_array()
            .into_iter()
            .flatten()
            .map(|route| &route["dev"])
            .collect();
        assert_eq!(via, ["data0"], "{routes}");
    }
    assert_eq!(
        json(&pod.inside.run("ip", &["-j", "link", "show", "dev", "lo"])?)?[0]["flags"][1],
        "UP"
    );
    stage.kubelet.kill_pod(pod).await?;
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_host_end_tells_whose_it_is() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    for sandboxes in [0, 2] {
        let stage = Watched::with("alias", warm(sandboxes)).await?;
        let pod = stage
            .kubelet
            .run_pod("team", "web-0", &[("kni.io/multi-network", "blue")])
            .await?;
        let interfaces = stage.interfaces().await?;
        assert_eq!(interfaces.len(), 2);
        for interface in interfaces {
            let host = stage
                .node
                .run("ip", &["-j", "-d", "link", "show", "dev", &interface.host_ifname])?;
            let host = &json(&host)?[0];
            let alias = host["ifalias"].as_str().context("no alias")?;
            for named in ["team/web-0", &interface.ifname, &interface.network] {
                assert!(alias.contains(named), "no {named} in {alias:?}");
            }
            assert!(interface.host_ifname.starts_with("kni"));
            assert_eq!(host["ifindex"], interface.host_ifindex);
            assert_eq!(host["address"], interface.host_mac.as_str());
            assert_eq!(link(&pod, &interface.ifname)?["ifindex"], interface.ifindex);
            assert_eq!(pod.interfaces[&interface.ifname].mac, interface.mac);
            assert_eq!(interface.sandbox_id, pod.id);
            assert_eq!(interface.pod_uid, pod.uid);
            assert!(interface.healthy && interface.problems.is_empty(), "{interface:?}");
            assert_eq!(interface.programs.len(), 2);
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_networks_mtu_is_on_both_ends() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    for sandboxes in [0, 2] {
        let options = AgentOptions {
            manifests: vec![
                Manifest::default_network("default", &["10.244.0.0/16", "fd00:244::/64"]).spec("mtu: 1400"),
                Manifest::network("jumbo", &["10.40.0.0/16"]).spec("mtu: 9000"),
            ],
            ..warm(sandboxes)
        };
        let stage = Watched::with("mtu", options).await?;
        let small = stage
            .kubelet
            .run_pod("team", "small", &[("kni.io/multi-network", "jumbo")])
            .await?;
        let large = stage
            .kubelet
            .run_pod("team", "large", &[("kni.dev/network", "jumbo")])
            .await?;
        for (pod, ifname, mtu) in [(&small, "eth0", 1400), (&small, "net1", 9000), (&large, "eth0", 9000)] {
            assert_eq!(link(pod, ifname)?["mtu"], mtu, "{} {ifname}", pod.name);
            let all = stage.interfaces().await?;
            let ours = all
                .iter()
                .find(|i| i.sandbox_id == pod.id && i.ifname == ifname)
                .context("not listed")?;
            let host = stage
                .node
                .run("ip", &["-j", "link", "show", "dev", &ours.host_ifname])?;
            assert_eq!(json(&host)?[0]["mtu"], mtu, "host end of {} {ifname}", pod.name);
            assert_eq!(ours.mtu, mtu);
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_of_one_family_gives_that_family_alone() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let options = AgentOptions {
        manifests: vec![
            Manifest::default_network("six", &["fd00:6::/64"]),
            Manifest::network("four", &["10.4.0.0/16"]),
        ],
        ..warm(0)
    };
    let stage = Watched::with("families", options).await?;
    let before = stage.picture().await?;
    for (network, v4) in [("six", false), ("four", true)] {
        let annotation = [("kni.dev/network", network)];
        let client = stage.kubelet.run_pod("team", "client", &annotation).await?;
        let server = stage.kubelet.run_pod("team", "server", &annotation).await?;
        assert_eq!((server.ips().len(), server.ips()[0].is_ipv4()), (1, v4));
        assert_eq!(addresses(&link(&server, "eth0")?).len(), 1);
        let servers = traffic::Servers::start(&server.inside, network, 8080)?;
        let answer = traffic::tcp_get(&client.inside, server.ips()[0], 8080, patience())?;
        assert_eq!(answer.identity, network);
        assert_eq!(answer.client.ip(), client.ips()[0]);
        if !v4 {
            let answer = traffic::udp_ask(&stage.node, server.ips()[0], 8080, patience())?;
            assert_eq!(answer.identity, network);
        }
        drop(servers);
        stage.kubelet.kill_pod(client).await?;
        stage.kubelet.kill_pod(server).await?;
    }
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_released_address_is_not_handed_out_again_at_once() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let options = AgentOptions {
        // Five addresses for pods.
        manifests: vec![Manifest::default_network("small", &["10.50.0.0/29"])],
        ..warm(0)
    };
    let stage = Watched::with("reuse", options).await?;
    let mut order = Vec::new();
    for index in 0..10 {
        let pod = stage.kubelet.run_pod("team", &format!("web-{index}"), &[]).await?;
        order.push(pod.ips()[0]);
        stage.kubelet.kill_pod(pod).await?;
    }
    let different: BTreeSet<&IpAddr> = order.iter().take(5).collect();
    assert_eq!(
        different.len(),
        5,
        "an address came back while others were fresh: {order:?}"
    );
    assert_eq!(order[..5], order[5..], "the one released longest ago comes first");
    Ok(())
}
