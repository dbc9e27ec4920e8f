use std::{net::IpAddr, path::Path};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Pod, eventually,
    kubelet::Sandbox,
    node::NODE_V4,
    require,
    traffic::{self, Servers},
};
use kni_proto::{
    kni::{PortMapping, Protocol},
    runtime::ListNetworksRequest,
};
use tonic::Code;

use super::scene::{self, CACHE, CONF, address, ask, patience, wait_for_network};
use crate::watched::Watched;

const MULTI: &str = "k8s.v1.cni.cncf.io/networks";
const BRIDGED: &str = "kni.dev/network";

/// The bridge, and chains of iptables, which plugins never remove, already exist.
async fn stage(name: &str, manifests: Vec<Manifest>) -> Result<Watched> {
    let stage = Watched::with(name, scene::options(manifests)).await?;
    scene::write_chain(&stage.node)?;
    let network = wait_for_network(&stage, "bridged", true).await?;
    ensure!(network.provider == "CNI", "{network:?}");
    let first = run(&stage, "first", &[(BRIDGED, "bridged")], 18_080).await?;
    stage.kubelet.kill_pod(first).await?;
    scene::keep_bridge(&stage.node)?;
    Ok(stage)
}

/// Runs a pod whose port 8080 is also a port of the node.
async fn run(stage: &Watched, name: &str, annotations: &[(&str, &str)], host_port: u16) -> Result<Pod> {
    let edit = |request: &mut kni_proto::kni::AttachInterfaceRequest| {
        request.port_mappings = vec![PortMapping {
            protocol: Protocol::Tcp.into(),
            container_port: 8080,
            host_port: host_port.into(),
            host_ip: String::new(),
        }];
    };
    Ok(stage.kubelet.run_pod_with("team", name, annotations, edit).await?)
}

#[expect(clippy::too_many_lines, reason = "the life of two pods, in order")]
#[tokio::test(flavor = "multi_thread")]
async fn eth0_of_the_bridge_plugin_and_net1_of_ours_go_together() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool, cni_plugins);
    let mut stage = stage("together", scene::networks()).await?;
    let before = scene::picture(&stage).await?;
    let wish = [(BRIDGED, "bridged"), (MULTI, "default")];
    let one = run(&stage, "one", &wish, 18_080).await?;
    let two = run(&stage, "two", &wish, 18_081).await?;
    let servers = [
        Servers::start(&one.inside, "one", 8080)?,
        Servers::start(&two.inside, "two", 8080)?,
    ];
    let reach = |when: &str| -> Result<()> {
        for ifname in ["eth0", "net1"] {
            for v4 in [true, false] {
                let answer = ask(&one.inside, &address(&two, ifname, v4));
                ensure!(answer.as_deref() == Ok("two"), "{when}: {ifname} v4={v4}: {answer:?}");
            }
        }
        let node: IpAddr = NODE_V4.parse()?;
        let answer = traffic::tcp_get(stage.node.fabric(), node, 18_081, patience());
        let answer = answer.with_context(|| format!("{when}: host port"))?;
        ensure!(answer.identity == "two", "{when}: {answer:?}");
        Ok(())
    };
    reach("attached")?;
    let shown = stage.interface(&one, "eth0").await?;
    assert_eq!((shown.kind.as_str(), shown.healthy), ("cni", true), "{shown:?}");
    // The host end is found, although the plugin chose its name.
    let host = stage
        .node
        .run("ip", &["-o", "link", "show", "dev", &shown.host_ifname])?;
    assert!(
        host.contains("master cni0") && host.starts_with(&format!("{}:", shown.host_ifindex)),
        "{host}"
    );
    let inside = one.inside.run("ip", &["-o", "link", "show", "dev", "eth0"])?;
    assert!(
        inside.contains(&shown.mac) && inside.starts_with(&format!("{}:", shown.ifindex)),
        "{inside}"
    );
    assert_eq!(scene::leases(&stage.node)?.len(), 4);

    stage.agent.kill9()?;
    stage.restart().await?;
    assert_eq!(stage.kubelet.query(&one.id).await?.ipconfigs, one.interfaces);
    let answer = ask(&one.inside, &address(&two, "eth0", true));
    assert_eq!(answer.as_deref(), Ok("two"));
    drop(servers);

    // The configuration is removed before the pods.
    stage
        .node
        .enter(|| std::fs::remove_file(Path::new(CONF).join("10-chain.conflist")))??;
    let gone = wait_for_network(&stage, "bridged", false).await?;
    assert!(gone.reason.contains("configuration \"chain\" is not in"), "{gone:?}");
    stage.kubelet.kill_pod(one).await?;
    // A pod whose namespace has already been removed.
    let id = two.id.clone();
    stage
        .node
        .run("umount", &["-l", two.netns.to_str().context("UTF-8")?])?;
    drop(two);
    stage.kubelet.detach(&id).await?;
    stage.kubelet.delete_network(&id).await?;
    scene::assert_as(&stage, &before).await?;
    assert_eq!(scene::leases(&stage.node)?, Vec::<String>::new());
    assert_eq!(scene::files(&stage.node, CACHE)?, Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn net1_of_the_bridge_plugin_leaves_the_default_route_alone_beside_a_pair_made_ahead() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool, cni_plugins);
    let mut options = scene::options(scene::networks());
    options.args[1] = "2".to_owned();
    let stage = Watched::with("ahead", options).await?;
    scene::write_chain(&stage.node)?;
    wait_for_network(&stage, "bridged", true).await?;
    let pod = stage.kubelet.run_pod("team", "one", &[(MULTI, "bridged")]).await?;
    let routes = pod.inside.run("ip", &["-4", "route", "show", "default"])?;
    assert!(routes.lines().count() == 1 && routes.contains("dev eth0"), "{routes}");
    assert_eq!(stage.interface(&pod, "net1").await?.kind, "cni");
    // The other order: the prewarmed pair has to be removed first.
    stage.settled().await?;
    let other = stage
        .kubelet
        .run_pod("team", "two", &[(BRIDGED, "bridged"), (MULTI, "default")])
        .await?;
    let servers = Servers::start(&other.inside, "other", 8080)?;
    for (here, there) in [("net1", "eth0"), ("eth0", "net1")] {
        let (own, to) = (address(&pod, here, true), address(&other, there, true));
        assert_eq!(ask(&pod.inside, &to).as_deref(), Ok("other"), "{own} to {to}");
    }
    drop(servers);
    stage.kubelet.kill_pod(pod).await?;
    stage.kubelet.kill_pod(other).await?;
    stage.settled().await?;
    assert_eq!(scene::leases(&stage.node)?, Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_default_network_is_ready_when_its_configuration_and_plugins_are() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool, cni_plugins);
    let stage = Watched::unsettled("ready", scene::options(vec![scene::bridged("pods", true)])).await?;
    let status = stage.status().await?;
    assert!(!status.ready, "{status:?}");
    assert!(
        status
            .reasons
            .iter()
            .any(|reason| reason.contains("configuration \"chain\"")),
        "{status:?}"
    );
    let netns = stage.kubelet.create_network("team", "early").await?;
    let early = Sandbox::new("team", "early", &netns);
    let refused = stage.kubelet.attach(&early).await.expect_err("not ready");
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    let missing = r#"{ "cniVersion": "1.0.0", "name": "chain", "type": "my-plugin" }"#;
    scene::write(&stage.node, CONF, "10-chain.conflist", missing, 0o644)?;
    eventually(patience(), async || {
        let reason = wait_for_network(&stage, "pods", false).await?.reason;
        ensure!(
            reason.contains("plugin my-plugin is in none of"),
            "the reason stays {reason:?}"
        );
        Ok(())
    })
    .await?;
    scene::write_chain(&stage.node)?;
    wait_for_network(&stage, "pods", true).await?;
    assert!(stage.status().await?.ready);
    stage.kubelet.attach(&early).await?;
    stage.kubelet.detach(&early.id).await?;
    stage.kubelet.delete_network(&early.id).await?;
    // The type of a network with pods cannot change.
    let pod = stage.kubelet.run_pod("team", "one", &[]).await?;
    let ours = Manifest::default_network("pods", &["10.9.0.0/16"]);
    Manifest::apply(&[ours], &stage.node)?;
    eventually(patience(), async || {
        let listed = stage.kubelet.runtime().list_networks(ListNetworksRequest {}).await?;
        let listed = listed.into_inner();
        let refused = listed.refused.iter().any(|refused| refused.field == "spec.provider");
        ensure!(refused, "{listed:?}");
        assert_eq!(listed.networks[0].provider, "CNI");
        Ok(())
    })
    .await?;
    Ok(stage.kubelet.kill_pod(pod).await?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_fails_is_told_and_undone() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool, cni_plugins);
    let stage = stage("failing", scene::networks()).await?;
    let refuse = "#!/bin/sh\ncat > /dev/null\n[ $CNI_COMMAND = DEL ] && exit 0\n\
                  echo '{ \"cniVersion\": \"1.0.0\", \"code\": 117, \"msg\": \"no luck\", \"details\": \"a black cat\" }'\nexit 1\n";
    scene::write(&stage.node, "/run/cni/bin", "unlucky", refuse, 0o755)?;
    let chain = stage
        .node
        .enter(|| std::fs::read_to_string(Path::new(CONF).join("10-chain.conflist")))??;
    let unlucky = chain
        .replace("\"type\": \"portmap\"", "\"type\": \"unlucky\"")
        .replace("\"chain\"", "\"unlucky\"");
    scene::write(&stage.node, CONF, "20-unlucky.conflist", &unlucky, 0o644)?;
    let network = scene::bridged("unlucky", false);
    let network = Manifest {
        text: network.text.replace("confName: chain", "confName: unlucky"),
        ..network
    };
    Manifest::apply(&[network], &stage.node)?;
    wait_for_network(&stage, "unlucky", true).await?;
    let before = scene::picture(&stage).await?;
    let netns = stage.kubelet.create_network("team", "one").await?;
    let mut sandbox = Sandbox::new("team", "one", &netns);
    sandbox.annotate(&[(MULTI, "unlucky")]);
    let refused = stage.kubelet.attach(&sandbox).await.expect_err("it always refuses");
    let why = "network unlucky: unlucky: plugin unlucky: ADD: no luck: a black cat (code 117)";
    assert!(refused.message().contains(why), "{refused:?}");
    assert!(refused.message().contains("pod team/one"), "{refused:?}");
    // The earlier bridge plugin has reverted its part, and so has the agent.
    assert_eq!(
        scene::files(&stage.node, &format!("{}/unlucky", scene::LEASES))?
            .iter()
            .filter(|f| f.parse::<IpAddr>().is_ok())
            .count(),
        0
    );
    assert_eq!(scene::files(&stage.node, CACHE)?, Vec::<String>::new());
    stage.kubelet.delete_network(&sandbox.id).await?;
    scene::assert_as(&stage, &before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_plugins_keep_on_disk_goes_when_the_records_are_lost() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool, cni_plugins);
    let mut stage = stage("reboot", scene::networks()).await?;
    let pod = stage.kubelet.run_pod("team", "one", &[(BRIDGED, "bridged")]).await?;
    let entry = format!("{:.8}", pod.id);
    assert_eq!(scene::leases(&stage.node)?.len(), 2);
    assert!(
        scene::files(&stage.node, CACHE)?
            .iter()
            .any(|file| file.contains(&entry))
    );
    // As after a reboot: neither namespaces nor runtime state, in the file and in its copy; files on disk remain.
    stage.agent.kill9()?;
    for record in ["/run/kni/state.redb", "/sys/fs/bpf/kni/records"] {
        stage.node.enter(|| std::fs::remove_file(record))??;
    }
    stage
        .node
        .run("umount", &["-l", pod.netns.to_str().context("UTF-8")?])?;
    let id = pod.id.clone();
    drop(pod);
    stage.restart().await?;
    assert_eq!(scene::leases(&stage.node)?, Vec::<String>::new());
    assert_eq!(scene::files(&stage.node, CACHE)?, Vec::<String>::new());
    // The runtime's own call comes later, without a namespace.
    Ok(stage.kubelet.detach(&id).await?)
}
