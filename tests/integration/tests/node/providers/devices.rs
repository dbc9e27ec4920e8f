use anyhow::{Result, ensure};
use kni_integration::{
    Manifest, eventually_sync,
    kubelet::Sandbox,
    node::{FABRIC_V4, FABRIC_V6},
    require,
    traffic::Servers,
};
use kni_proto::{kni::QueryNodeNetworksRequest, runtime::ListNetworksRequest};

use super::scene::{self, WIRE_V4, WIRE_V6, address, ask};
use crate::watched::Watched;

const MULTI: &str = "k8s.v1.cni.cncf.io/networks";

#[tokio::test(flavor = "multi_thread")]
async fn macvlan_pods_reach_each_other_and_what_is_behind_the_parent() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut stage = Watched::with("macvlan", scene::options(scene::networks())).await?;
    let before = scene::picture(&stage).await?;
    let one = stage.kubelet.run_pod("team", "one", &[(MULTI, "lan")]).await?;
    // As the only interface of the pod.
    let two = stage
        .kubelet
        .run_pod("team", "two", &[("kni.dev/network", "lan")])
        .await?;
    let servers = [
        Servers::start(&two.inside, "two", 8080)?,
        Servers::start(stage.node.fabric(), "fabric", 8080)?,
        Servers::start(&one.inside, "one", 8080)?,
    ];
    for v4 in [true, false] {
        assert_eq!(ask(&one.inside, &address(&two, "eth0", v4)).as_deref(), Ok("two"));
        assert_eq!(
            ask(stage.node.fabric(), &address(&one, "net1", v4)).as_deref(),
            Ok("one")
        );
    }
    assert_eq!(ask(&one.inside, FABRIC_V4).as_deref(), Ok("fabric"));
    assert_eq!(ask(&two.inside, FABRIC_V6).as_deref(), Ok("fabric"));
    let shown = stage.interface(&one, "net1").await?;
    assert_eq!((shown.kind.as_str(), shown.policy_enforced), ("macvlan", false));
    assert!(shown.healthy && shown.host_ifname.is_empty(), "{shown:?}");
    assert!(stage.interface(&one, "eth0").await?.policy_enforced);

    stage.agent.kill9()?;
    stage.restart().await?;
    assert_eq!(ask(&one.inside, &address(&two, "eth0", true)).as_deref(), Ok("two"));
    assert_eq!(stage.kubelet.query(&one.id).await?.ipconfigs, one.interfaces);
    assert!(stage.interface(&two, "eth0").await?.healthy);
    two.inside.ip(&["link set eth0 down"])?;
    assert!(!stage.interface(&two, "eth0").await?.healthy);
    drop(servers);

    // The namespaces still exist, without any state of the agent.
    for pod in [&one, &two] {
        stage.kubelet.detach(&pod.id).await?;
    }
    stage.settled().await?;
    for pod in [&one, &two] {
        let links = pod.inside.run("ip", &["-o", "link"])?;
        assert!(!links.contains("macvlan") && links.lines().count() == 1, "{links}");
    }
    stage.kubelet.kill_pod(one).await?;
    stage.kubelet.kill_pod(two).await?;
    scene::assert_as(&stage, &before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_is_lent_to_one_pod_and_comes_back_as_it_was() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut stage = Watched::with("device", scene::options(scene::networks())).await?;
    scene::add_device(&stage)?;
    let before = scene::picture(&stage).await?;
    let wanted = [(MULTI, r#"[{"name":"nic","mac":"02:00:00:00:09:09"}]"#)];
    let pod = stage.kubelet.run_pod("team", "one", &wanted).await?;
    assert!(
        stage.node.run("ip", &["link", "show", "nic0"]).is_err(),
        "it is still on the node"
    );
    let link = pod.inside.run("ip", &["-o", "link", "show", "net1"])?;
    assert!(
        link.contains("mtu 1380") && link.contains("02:00:00:00:09:09"),
        "{link}"
    );
    let servers = Servers::start(stage.node.fabric(), "wire", 8080)?;
    for wire in [WIRE_V4, WIRE_V6] {
        assert_eq!(ask(&pod.inside, wire).as_deref(), Ok("wire"));
    }

    // No other pod gets it in the meantime, also not from the next agent.
    for _agent in 0..2 {
        let netns = stage.kubelet.create_network("team", "two").await?;
        let mut second = Sandbox::new("team", "two", &netns);
        second.annotate(&[(MULTI, "nic")]);
        let refused = stage.kubelet.attach(&second).await.expect_err("there is one device");
        let holder = format!("device nic0 belongs to pod team/one (sandbox {})", pod.id);
        assert!(refused.message().contains(&holder), "{refused:?}");
        stage.kubelet.delete_network(&second.id).await?;
        stage.agent.kill9()?;
        stage.restart().await?;
    }
    assert_eq!(ask(&pod.inside, WIRE_V4).as_deref(), Ok("wire"));
    let shown = stage.interface(&pod, "net1").await?;
    assert!(shown.healthy && shown.kind == "host-device", "{shown:?}");
    drop(servers);
    stage.kubelet.kill_pod(pod).await?;
    stage.node.wait_for_local("nic0", "fe80")?;
    scene::assert_as(&stage, &before).await?;

    // The next pod gets it.
    let next = stage.kubelet.run_pod("team", "three", &[(MULTI, "nic")]).await?;
    // Its namespace is removed before any detach; the kernel removes a veth in it.
    let (id, inside) = (next.id.clone(), next.inside.clone());
    stage.node.run("umount", &["-l", next.netns.to_str().expect("UTF-8")])?;
    drop((next, inside));
    eventually_sync(scene::patience(), || {
        let shown = stage.node.fabric().run("ip", &["link", "show", "wire0"]);
        ensure!(shown.is_err(), "its namespace still lives");
        Ok(())
    })?;
    stage.kubelet.detach(&id).await?;
    stage.kubelet.delete_network(&id).await?;
    stage.settled().await?;
    assert!(stage.interfaces().await?.is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_node_uses_is_not_lent_and_what_cannot_be_is_told() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut manifests = scene::networks();
    let network = |name: &str, provider: &str| Manifest::network(name, &["10.60.0.0/24"]).spec(provider);
    manifests.extend([
        network("up", "provider: { type: HostDevice, devices: [uplink0] }"),
        network("missing", "provider: { type: Macvlan, parent: nowhere0 }"),
        network(
            "large",
            "provider: { type: Macvlan, parent: uplink0, allowUplink: true }",
        )
        .spec("mtu: 9000"),
        network("wire", "provider: { type: Macvlan, parent: uplink0 }"),
    ]);
    let stage = Watched::with("refused", scene::options(manifests)).await?;
    let before = scene::picture(&stage).await?;
    for (network, why) in [
        ("up", "device uplink0 has a default route of the node"),
        ("nic", "device nic0 does not exist on the node"),
        ("missing", "parent nowhere0 does not exist on the node"),
        (
            "wire",
            "network wire: parent uplink0 has a default route of the node: frames of pods there bypass the node's programs \
             (spec.provider.allowUplink: true permits it)",
        ),
        ("large", "spec.mtu 9000 is above the 1500 of parent uplink0"),
        ("bridged", "configuration \"chain\" is not in /run/cni/net.d"),
    ] {
        let netns = stage.kubelet.create_network("team", "one").await?;
        let mut sandbox = Sandbox::new("team", "one", &netns);
        sandbox.annotate(&[(MULTI, network)]);
        let refused = stage.kubelet.attach(&sandbox).await.expect_err(network);
        assert!(refused.message().contains(why), "{network}: {refused:?}");
        assert!(refused.message().contains(&format!("network {network}")), "{refused:?}");
        stage.kubelet.delete_network(&sandbox.id).await?;
    }
    scene::assert_as(&stage, &before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tap_waits_for_its_machine_and_goes_with_the_pod() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut stage = Watched::with("tap", scene::options(scene::networks())).await?;
    let before = scene::picture(&stage).await?;
    let pod = stage.kubelet.run_pod("team", "vm", &[(MULTI, "vm")]).await?;
    let link: serde_json::Value =
        serde_json::from_str(&pod.inside.run("ip", &["-j", "-d", "address", "show", "net1"])?)?;
    let info = &link[0]["linkinfo"];
    assert_eq!(
        (&info["info_kind"], &info["info_data"]["type"]),
        (&"tun".into(), &"tap".into())
    );
    let data = &info["info_data"];
    assert_eq!((&data["user"], &data["group"]), (&107.into(), &108.into()), "{data}");
    assert_eq!(
        (&data["multi_queue"], &data["persist"]),
        (&true.into(), &true.into()),
        "{data}"
    );
    let own = pod.inside.run("ip", &["-4", "address", "show", "net1"])?;
    assert!(!own.contains("inet "), "{own}");
    assert_eq!(pod.interfaces["net1"].ip, ["10.50.0.2"]);
    assert_eq!(Some(pod.interfaces["net1"].mac.as_str()), link[0]["address"].as_str());
    stage.agent.kill9()?;
    stage.restart().await?;
    let shown = stage.interface(&pod, "net1").await?;
    assert!(shown.healthy && shown.kind == "tap", "{shown:?}");
    stage.kubelet.detach(&pod.id).await?;
    assert!(pod.inside.run("ip", &["link", "show", "net1"]).is_err());
    stage.kubelet.kill_pod(pod).await?;
    scene::assert_as(&stage, &before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn networks_say_what_can_be_had_of_them() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::with("features", scene::options(scene::networks())).await?;
    scene::write_chain(&stage.node)?;
    let listed = stage.kubelet.runtime().list_networks(ListNetworksRequest {}).await?;
    let listed = listed.into_inner().networks;
    let core = ["addresses", "ipv4", "ipv6", "mtu", "mac", "status"];
    for network in &listed {
        assert!(network.features.iter().take(core.len()).eq(core), "{network:?}");
        let ours = ["Ebpf", "CNI"].contains(&network.provider.as_str());
        assert_eq!(
            network.features.iter().any(|feature| feature == "policy"),
            ours,
            "{network:?}"
        );
    }
    let answer = stage
        .kubelet
        .kni()
        .query_node_networks(QueryNodeNetworksRequest::default())
        .await?;
    let answer = answer.into_inner().networks;
    assert_eq!(answer.len(), listed.len());
    for network in answer {
        let known = listed.iter().find(|known| known.name == network.name).expect("listed");
        assert_eq!(network.extradata["provider"], known.provider);
        assert_eq!(network.extradata["features"], known.features.join(","));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn cleanup_takes_back_what_every_provider_made() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool, cni_plugins);
    let mut stage = Watched::with("cleanup", scene::options(scene::networks())).await?;
    scene::add_device(&stage)?;
    scene::write_chain(&stage.node)?;
    let device = stage.node.run("ip", &["-o", "link", "show", "nic0"])?;
    let pod = stage
        .kubelet
        .run_pod("team", "one", &[(MULTI, "lan,nic,vm,bridged")])
        .await?;
    assert_eq!(pod.interfaces.len(), 5);
    assert_eq!(scene::leases(&stage.node)?.len(), 2);
    stage.agent.terminate()?;
    let cleaned = stage.agent.cleanup()?;
    assert!(cleaned.status.success(), "{cleaned:?}");
    let links = pod.inside.run("ip", &["-o", "link"])?;
    assert_eq!(links.lines().count(), 1, "{links}");
    let back = stage.node.run("ip", &["-o", "link", "show", "nic0"])?;
    let settings = |text: &str| {
        let words = ["mtu 1400", "02:00:00:00:07:07", "alias rack-7", "UP"];
        words.map(|word| text.contains(word))
    };
    assert_eq!((settings(&device), settings(&back)), ([true; 4], [true; 4]), "{back}");
    assert_eq!(scene::leases(&stage.node)?, Vec::<String>::new());
    assert_eq!(scene::files(&stage.node, scene::CACHE)?, Vec::<String>::new());
    Ok(())
}
