//! Tests containerd's draft: setup, health check, query, teardown.

use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};

use anyhow::{Context as _, Result};
use kni_integration::{Agent, AgentOptions, Kubelet, Manifest, Node, require};
use kni_proto::networking::{
    CheckHealthRequest, GetPodIPsRequest, PortMapping, SetupPodNetworkRequest, SetupPodNetworkResponse,
    TeardownPodNetworkRequest, pod_network_lifecycle_client::PodNetworkLifecycleClient,
    pod_network_management_client::PodNetworkManagementClient,
};
use tonic::transport::Channel;

use super::{RuntimeNetns, assert_connected};
use crate::watched::Watched;

const SOCKET: &str = "/run/kni/pod-network.sock";

async fn containerd(node: &Node) -> Result<Channel> {
    Ok(Kubelet::connect(node, SOCKET).await?.channel())
}

fn request(id: &str, netns: &RuntimeNetns) -> SetupPodNetworkRequest {
    SetupPodNetworkRequest {
        sandbox_id: id.into(),
        netns_path: netns.path(),
        pod_name: format!("pod-{id}"),
        pod_namespace: "team".into(),
        pod_uid: format!("uid-{id}"),
        labels: [("app".to_owned(), id.to_owned())].into(),
        ..SetupPodNetworkRequest::default()
    }
}

fn primary(answer: &SetupPodNetworkResponse) -> Result<&str> {
    let first = answer.interfaces.first().context("no interface")?;
    assert_eq!(first.name, "eth0");
    let address = first.addresses.first().context("no address")?;
    address.strip_suffix("/32").context("not an IPv4 host address")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_sets_up_checks_and_tears_down() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("draft").await?;
    let netns = [
        RuntimeNetns::new(&stage.node, "cni-a")?,
        RuntimeNetns::new(&stage.node, "cni-b")?,
    ];
    let before = stage.picture().await?;
    let mut client = PodNetworkLifecycleClient::new(containerd(&stage.node).await?);
    let health = client.check_health(CheckHealthRequest {}).await?.into_inner();
    assert!(health.ready, "{}", health.message);

    let mut with_port = request("a", &netns[0]);
    with_port.annotations = [("k8s.v1.cni.cncf.io/networks".to_owned(), "blue".to_owned())].into();
    with_port.port_mappings = vec![PortMapping {
        protocol: "tcp".into(),
        container_port: 8080,
        host_port: 30_080,
        host_ip: String::new(),
    }];
    let a = client.setup_pod_network(with_port.clone()).await?.into_inner();
    let b = client.setup_pod_network(request("b", &netns[1])).await?.into_inner();
    assert_eq!(a.interfaces.len(), 2, "{a:?}");
    assert_connected([(&netns[0].inside, primary(&a)?), (&netns[1].inside, primary(&b)?)])?;
    // The same request is answered again, with the same result.
    assert_eq!(client.setup_pod_network(with_port).await?.into_inner(), a);
    // The answer matches the pod's interfaces.
    let shown = netns[0].inside.run("ip", &["-o", "address", "show", "dev", "eth0"])?;
    for address in &a.interfaces[0].addresses {
        assert!(shown.contains(address.as_str()), "no {address} in {shown}");
    }
    let routes = netns[0].inside.run("ip", &["route"])? + &netns[0].inside.run("ip", &["-6", "route"])?;
    for route in &a.routes {
        let name = match route.destination.as_str() {
            "0.0.0.0/0" | "::/0" => "default",
            other => other,
        };
        let line = format!("{name} via {} dev {}", route.gateway, route.interface_name);
        assert!(routes.contains(&line), "no {line} in {routes}");
    }
    let mut management = PodNetworkManagementClient::new(containerd(&stage.node).await?);
    let sandbox_id = "a".to_owned();
    let ips = management
        .get_pod_i_ps(GetPodIPsRequest { sandbox_id })
        .await?
        .into_inner();
    assert_eq!(ips.interface_ips["eth0"].ips[0], primary(&a)?);

    for id in ["a", "b", "a", "unknown"] {
        let request = TeardownPodNetworkRequest {
            sandbox_id: id.into(),
            ..TeardownPodNetworkRequest::default()
        };
        client.teardown_pod_network(request).await?;
    }
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn health_tells_why_and_the_socket_is_for_root_alone() -> Result<()> {
    require!(root, netns, bpf, ip);
    let node = Node::new("draft-health")?;
    // There is no default network.
    let options = AgentOptions::new(vec![Manifest::network("blue", &["10.10.0.0/16"])], &[]);
    let agent = Agent::start(&node, options)?;
    let mut client = PodNetworkLifecycleClient::new(containerd(&node).await?);
    let health = client.check_health(CheckHealthRequest {}).await?.into_inner();
    assert!(!health.ready);
    assert!(
        health.message.contains("no network is the default one"),
        "{}",
        health.message
    );
    let status = node.enter(|| std::fs::symlink_metadata(SOCKET))??;
    assert!(status.file_type().is_socket());
    assert_eq!(status.permissions().mode() & 0o7777, 0o600);
    drop(agent);
    Ok(())
}
