//! Tests the methods of `kni.KNI` with real clients.

use std::collections::BTreeMap;

use kni_proto::kni::{
    AttachInterfaceRequest, CreateNetworkRequest, DeleteNetworkRequest, DetachInterfaceRequest, IpConfig,
    QueryNodeNetworksRequest, QueryPodNetworkRequest, SetupNodeNetworkRequest, kni_client::KniClient,
};
use tonic::{Code, transport::Channel};

use super::{Served, fake::Mood, soon, until};

async fn client(served: &Served) -> KniClient<Channel> {
    KniClient::new(served.connect("one").await)
}

pub(super) fn attach(id: &str) -> AttachInterfaceRequest {
    AttachInterfaceRequest {
        id: id.to_owned(),
        name: "web-0".to_owned(),
        namespace: "shop".to_owned(),
        extradata: BTreeMap::from([("netns".to_owned(), "/run/netns/a".to_owned())]),
        ..AttachInterfaceRequest::default()
    }
}

fn detach(id: &str) -> DetachInterfaceRequest {
    DetachInterfaceRequest {
        id: id.to_owned(),
        ..DetachInterfaceRequest::default()
    }
}

fn query(id: &str) -> QueryPodNetworkRequest {
    QueryPodNetworkRequest {
        id: id.to_owned(),
        ..QueryPodNetworkRequest::default()
    }
}

fn check_ipconfigs(ipconfigs: &BTreeMap<String, IpConfig>, extradata: &BTreeMap<String, String>) {
    assert_eq!(ipconfigs.keys().collect::<Vec<_>>(), ["eth0", "net1"]);
    let eth0 = &ipconfigs["eth0"];
    assert_eq!(eth0.ip, ["10.1.0.2", "fd00::2"], "bare, IPv4 first");
    assert_eq!(eth0.mac, "02:00:00:00:00:01");
    let expected = [
        ("default_route", "true"),
        ("gateway4", "169.254.1.1"),
        ("gateway6", "fe80::1"),
        ("host_ifindex", "1000001"),
        ("host_ifname", "kni1"),
        ("host_mac", "02:00:00:00:00:ff"),
        ("ifindex", "2"),
        ("mtu", "1500"),
        ("network", "pods"),
        (
            "routes",
            concat!(
                r#"[{"dst":"0.0.0.0/0","gw":"169.254.1.1"},{"dst":"10.1.0.0/24","gw":"169.254.1.1"},"#,
                r#"{"dst":"::/0","gw":"fe80::1"},{"dst":"fd00::/64","gw":"fe80::1"}]"#
            ),
        ),
    ];
    let found: Vec<(&str, &str)> = eth0
        .extradata
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    assert_eq!(found, expected);
    assert_eq!(ipconfigs["net1"].ip, ["fd00::2"]);
    assert!(!ipconfigs["net1"].extradata.contains_key("gateway4"));
    assert_eq!(
        (extradata["netns"].as_str(), extradata["netns_inode"].as_str()),
        ("/run/netns/a", "4026532000")
    );
}

#[tokio::test]
async fn create_and_delete_under_both_names() {
    let served = Served::start().await;
    let mut client = client(&served).await;
    let request = CreateNetworkRequest {
        name: "web-0".to_owned(),
        namespace: "shop".to_owned(),
        uid: "u1".to_owned(),
        netns_path_prefix: "/run/netns/x".to_owned(),
        ..CreateNetworkRequest::default()
    };
    let first = client.create_network(request.clone()).await.unwrap().into_inner();
    let second = client.create_isolation_domain(request).await.unwrap().into_inner();
    assert_eq!(first, second);
    assert_eq!(
        (first.netns_path.as_str(), first.extradata["netns"].as_str()),
        ("/run/netns/fresh", "/run/netns/fresh")
    );
    client.create_network(CreateNetworkRequest::default()).await.unwrap();
    let asked = "create shop/web-0 u1 /run/netns/x";
    assert_eq!(served.backend.calls(), [asked, asked, "create <unnamed>  "]);

    let by_id = DeleteNetworkRequest {
        id: "abc".to_owned(),
        ..DeleteNetworkRequest::default()
    };
    let by_name = DeleteNetworkRequest {
        name: "web-0".to_owned(),
        namespace: "shop".to_owned(),
        ..DeleteNetworkRequest::default()
    };
    client.delete_network(by_id).await.unwrap();
    client.delete_isolation_domain(by_name).await.unwrap();
    for nothing in ["", "a/b"] {
        let request = DeleteNetworkRequest {
            id: nothing.to_owned(),
            ..DeleteNetworkRequest::default()
        };
        client.delete_network(request).await.unwrap();
    }
    let expected = [
        "delete Some(SandboxId(\"abc\")) <unnamed> None",
        "delete None shop/web-0 None",
    ];
    assert_eq!(served.backend.calls(), expected, "what names nothing is not passed on");
    served.stop().await;
}

#[tokio::test]
async fn attach_query_detach_under_both_names() {
    let served = Served::start().await;
    let mut client = client(&served).await;
    let answer = client.attach_interface(attach("a1")).await.unwrap().into_inner();
    check_ipconfigs(&answer.ipconfigs, &answer.extradata);
    let answer = client.attach_network(attach("a2")).await.unwrap().into_inner();
    check_ipconfigs(&answer.ipconfigs, &answer.extradata);
    let answer = client.query_pod_network(query("a1")).await.unwrap().into_inner();
    check_ipconfigs(&answer.ipconfigs, &answer.extradata);
    client.detach_interface(detach("a1")).await.unwrap();
    client.detach_network(detach("a2")).await.unwrap();
    for nothing in ["", "a/b"] {
        client.detach_interface(detach(nothing)).await.unwrap();
    }
    assert_eq!(
        served.backend.calls(),
        ["attach a1 shop/web-0", "attach a2 shop/web-0", "detach a1", "detach a2"]
    );
    for unknown in ["a1", "never-seen", "", "a/b", "\n", &"x".repeat(10_000)] {
        let answer = client.query_pod_network(query(unknown)).await.unwrap().into_inner();
        assert!(answer.ipconfigs.is_empty() && answer.extradata.is_empty(), "{unknown}");
    }
    served.stop().await;
}

#[tokio::test]
async fn node_networks() {
    let served = Served::start().await;
    let mut client = client(&served).await;
    let networks = client
        .query_node_networks(QueryNodeNetworksRequest {})
        .await
        .unwrap()
        .into_inner()
        .networks;
    assert_eq!(
        networks.iter().map(|n| (n.name.as_str(), n.ready)).collect::<Vec<_>>(),
        [("pods", true), ("blue", false)]
    );
    let about: Vec<_> = networks[1]
        .extradata
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    let expected = [
        ("addresses_total", "340282366920938463463374607431768211455"),
        ("addresses_used", "6"),
        ("default", "false"),
        (
            "features",
            concat!(
                "addresses,ipv4,ipv6,mtu,mac,status,default-network,policy,services,egress,host-ports,isolation,",
                "xdp,bandwidth"
            ),
        ),
        ("id", "2"),
        ("mtu", "1500"),
        ("provider", "Ebpf"),
        ("reason", "disabled"),
        ("subnets", "10.1.0.0/24,fd00::/64"),
    ];
    assert_eq!(about, expected);
    assert!(!networks[0].extradata.contains_key("reason"));
    served.backend.networks.lock().unwrap().clear();
    let answer = client
        .query_node_networks(QueryNodeNetworksRequest {})
        .await
        .unwrap()
        .into_inner();
    assert!(answer.networks.is_empty());
    client.setup_node_network(SetupNodeNetworkRequest {}).await.unwrap();
    served.stop().await;
}

#[tokio::test]
async fn errors_carry_code_and_words() {
    let served = Served::start().await;
    let mut client = client(&served).await;
    let status = client
        .attach_interface(AttachInterfaceRequest::default())
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("id: sandbox id"), "{status}");
    *served.backend.mood.lock().unwrap() = Mood::Exhausted;
    let status = client.attach_interface(attach("a1")).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(
        status.message(),
        "pod shop/web-0, sandbox a1: all 7 endpoints of the node are in use"
    );
    served.stop().await;
}

#[tokio::test]
async fn a_panic_costs_one_call_and_no_connection() {
    let served = Served::start().await;
    let mut client = client(&served).await;
    *served.backend.mood.lock().unwrap() = Mood::Panicking;
    let status = client.attach_interface(attach("a1")).await.unwrap_err();
    assert_eq!(status.code(), Code::Internal, "{status}");
    *served.backend.mood.lock().unwrap() = Mood::Obliging;
    client.attach_interface(attach("a1")).await.unwrap();
    served.stop().await;
}

#[tokio::test]
async fn a_client_that_hangs_up_does_not_stop_the_work() {
    let served = Served::start().await;
    *served.backend.mood.lock().unwrap() = Mood::Gated;
    let mut hasty = client(&served).await;
    let call = tokio::spawn(async move { hasty.attach_interface(attach("a1")).await });
    let mut asked = Vec::new();
    until(|| {
        asked.extend(served.backend.calls());
        !asked.is_empty()
    })
    .await;
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled(), "the client is gone");
    // Another client is answered meanwhile on its own connection, so the server has noticed the disconnect.
    let mut patient = client(&served).await;
    patient.query_pod_network(query("a1")).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    assert!(!served.backend.knows("a1"));
    served.backend.gate.add_permits(1);
    until(|| served.backend.knows("a1")).await;
    served.stop().await;
}

#[tokio::test]
async fn two_hundred_calls_at_once_on_one_connection() {
    let served = Served::start().await;
    let client = client(&served).await;
    *served.backend.mood.lock().unwrap() = Mood::Gated;
    let calls: Vec<_> = (0..200)
        .map(|n| {
            let mut client = client.clone();
            tokio::spawn(async move { client.attach_interface(attach(&format!("s{n}"))).await })
        })
        .collect();
    let mut asked = 0;
    until(|| {
        asked += served.backend.calls().len();
        asked == 200
    })
    .await;
    // While all of them wait, a query on the same connection is answered.
    soon(client.clone().query_pod_network(query("x"))).await.unwrap();
    served.backend.gate.add_permits(200);
    for call in calls {
        soon(call).await.unwrap().unwrap();
    }
    served.stop().await;
}

#[tokio::test]
async fn a_request_above_the_limit_is_refused_and_the_connection_lives() {
    let served = Served::start().await;
    let mut client = client(&served).await;
    let mut large = attach("a1");
    large.annotations.insert("k".to_owned(), "x".repeat(5 * 1024 * 1024));
    let status = client.attach_interface(large).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    let mut legal = attach("a1");
    legal.annotations.insert("k".to_owned(), "x".repeat(256 * 1024));
    client.attach_interface(legal).await.unwrap();
    served.stop().await;
}
