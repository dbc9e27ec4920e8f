//! Tests containerd's pod network service with the calls of containerd.

use kni_proto::networking::{
    CheckHealthRequest, GetPodIPsRequest, GetPodNetworkRequest, GetPodResourcesRequest, NetworkInterface, PortMapping,
    SetupPodNetworkRequest, SetupPodNetworkResponse, TeardownPodNetworkRequest,
    pod_network_lifecycle_client::PodNetworkLifecycleClient, pod_network_management_client::PodNetworkManagementClient,
};
use tonic::Code;

use super::{Served, fake::Mood};

fn setup(id: &str) -> SetupPodNetworkRequest {
    SetupPodNetworkRequest {
        sandbox_id: id.to_owned(),
        netns_path: "/run/netns/cni-1".to_owned(),
        pod_name: "web-0".to_owned(),
        pod_namespace: "shop".to_owned(),
        pod_uid: "7f1c".to_owned(),
        ..SetupPodNetworkRequest::default()
    }
}

#[tokio::test]
async fn a_sandbox_is_set_up_asked_about_and_torn_down() {
    let served = Served::start().await;
    let mut client = PodNetworkLifecycleClient::new(served.connect("pods").await);
    let answer = client.setup_pod_network(setup("a")).await.unwrap().into_inner();
    let names: Vec<_> = answer.interfaces.iter().map(|interface| &interface.name).collect();
    assert_eq!(names, ["eth0", "net1"]);
    assert_eq!(answer.interfaces[0].addresses, ["10.1.0.2/32", "fd00::2/128"]);
    assert_eq!(answer.interfaces[0].mac_address, "02:00:00:00:00:01");
    assert_eq!(answer.interfaces[0].mtu, 1500);
    let routes: Vec<_> = answer
        .routes
        .iter()
        .map(|route| {
            (
                route.interface_name.as_str(),
                route.destination.as_str(),
                route.gateway.as_str(),
            )
        })
        .collect();
    assert_eq!(
        routes,
        [
            ("eth0", "0.0.0.0/0", "169.254.1.1"),
            ("eth0", "10.1.0.0/24", "169.254.1.1"),
            ("eth0", "::/0", "fe80::1"),
            ("eth0", "fd00::/64", "fe80::1"),
            ("net1", "10.1.0.0/24", ""),
            ("net1", "fd00::/64", "fe80::1"),
        ]
    );
    assert_eq!(served.backend.calls(), ["attach a shop/web-0"]);

    ask_about(&served, &answer).await;

    for id in ["a", "a", "never", "", "\u{7}"] {
        let request = TeardownPodNetworkRequest {
            sandbox_id: id.to_owned(),
            ..TeardownPodNetworkRequest::default()
        };
        client.teardown_pod_network(request).await.unwrap();
    }
    assert!(!served.backend.knows("a"));
    served.stop().await;
}

async fn ask_about(served: &Served, answer: &SetupPodNetworkResponse) {
    let mut ask = PodNetworkManagementClient::new(served.connect("pods").await);
    let sandbox_id = "a".to_owned();
    let found = ask
        .get_pod_resources(GetPodResourcesRequest { sandbox_id })
        .await
        .unwrap();
    assert_eq!(found.into_inner().pod_netns_path, "/run/netns/cni-1");
    let sandbox_id = "a".to_owned();
    let found = ask
        .get_pod_i_ps(GetPodIPsRequest { sandbox_id })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(found.interface_ips["eth0"].ips, ["10.1.0.2", "fd00::2"]);
    assert_eq!(found.routes, answer.routes);
    let sandbox_id = "a".to_owned();
    let found = ask.get_pod_network(GetPodNetworkRequest { sandbox_id }).await.unwrap();
    assert_eq!(found.into_inner().interfaces, answer.interfaces);
    let sandbox_id = "never".to_owned();
    let refused = ask
        .get_pod_network(GetPodNetworkRequest { sandbox_id })
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    assert!(refused.message().contains("never"), "{refused}");
}

#[tokio::test]
async fn what_earlier_services_made_comes_first_and_ours_is_not_told_twice() {
    let served = Served::start().await;
    let mut client = PodNetworkLifecycleClient::new(served.connect("pods").await);
    let theirs = NetworkInterface {
        name: "fast0".to_owned(),
        ..NetworkInterface::default()
    };
    let mut request = setup("a");
    request.prev_result = Some(SetupPodNetworkResponse {
        interfaces: vec![theirs.clone()],
        ..SetupPodNetworkResponse::default()
    });
    for _again in 0..2 {
        let answer = client.setup_pod_network(request.clone()).await.unwrap().into_inner();
        let names: Vec<_> = answer.interfaces.iter().map(|interface| &interface.name).collect();
        assert_eq!(names, ["fast0", "eth0", "net1"]);
        assert_eq!(answer.routes.len(), 6);
        request.prev_result = Some(answer);
    }
    served.stop().await;
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    let served = Served::start().await;
    let mut client = PodNetworkLifecycleClient::new(served.connect("pods").await);
    let port = |protocol: &str, container_port, host_ip: &str| PortMapping {
        protocol: protocol.to_owned(),
        container_port,
        host_port: 80,
        host_ip: host_ip.to_owned(),
    };
    for (port, field) in [
        (port("QUIC", 80, ""), "port_mappings[0].protocol"),
        (port("tcp", 70_000, ""), "port_mappings[0].container_port"),
        (port("tcp", u32::MAX, ""), "port_mappings[0].container_port"),
        (port("sctp", 80, "here"), "port_mappings[0].host_ip"),
    ] {
        let mut request = setup("a");
        request.port_mappings = vec![port];
        let refused = client.setup_pod_network(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        for named in [field, "shop/web-0", "sandbox a"] {
            assert!(refused.message().contains(named), "no {named} in {refused}");
        }
    }
    let mut request = setup("a");
    request.netns_path.clear();
    let refused = client.setup_pod_network(request).await.unwrap_err();
    assert!(refused.message().contains("netns"), "{refused}");
    assert!(served.backend.calls().is_empty());
    *served.backend.mood.lock().unwrap() = Mood::Exhausted;
    let refused = client.setup_pod_network(setup("a")).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    served.stop().await;
}

#[tokio::test]
async fn health_is_the_agents_readiness_and_the_socket_serves_nothing_else() {
    let served = Served::start().await;
    let channel = served.connect("pods").await;
    let mut client = PodNetworkLifecycleClient::new(channel.clone());
    let health = client.check_health(CheckHealthRequest {}).await.unwrap().into_inner();
    assert_eq!(
        (health.ready, health.message.as_str()),
        (true, "one manifest is refused")
    );
    let mut other = kni_proto::kni::kni_client::KniClient::new(channel);
    let refused = other
        .query_node_networks(kni_proto::kni::QueryNodeNetworksRequest {})
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    served.stop().await;
}
