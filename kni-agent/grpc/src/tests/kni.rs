//! Tests the methods of `kni.KNI` with real clients.

use std::collections::BTreeMap;

use kni_proto::kni::{
    AttachInterfaceRequest, AttachNetworkRequest, CreateNetworkRequest, DeleteNetworkRequest, DetachInterfaceRequest,
    IpConfig, Isolation, MapEntry, QueryNodeNetworksRequest, QueryPodNetworkRequest, SetupNodeNetworkRequest,
    kni_client::KniClient,
};
use prost::Message as _;
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
        (
            "addresses",
            concat!(
                r#"[{"family":"IPv4","gateway":"169.254.1.1","ip":"10.1.0.2","prefix":32},"#,
                r#"{"family":"IPv6","gateway":"fe80::1","ip":"fd00::2","prefix":128}]"#
            ),
        ),
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
    let answer = client
        .attach_network(AttachNetworkRequest::from(attach("a2")))
        .await
        .unwrap()
        .into_inner();
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

/// Up to v0.0.5 labels, annotations and extradata were the fields 5 to 7.
#[tokio::test]
async fn an_early_client_attaches() {
    let served = Served::start().await;
    let mut client = client(&served).await;
    let entry = |key: &str, value: &str| {
        let (key, value) = (key.to_owned(), value.to_owned());
        MapEntry { key, value }.encode_to_vec()
    };
    let request = AttachNetworkRequest {
        id: "a1".to_owned(),
        dns_config_or_labels: vec![
            entry("io.kubernetes.pod.name", "web-0"),
            entry("io.kubernetes.pod.namespace", "shop"),
        ],
        port_mappings_or_annotations: vec![entry("kni.dev/netns", "/run/netns/a")],
        labels_or_extradata: vec![entry("netns", "/run/netns/a"), entry("later", "")],
        ..AttachNetworkRequest::default()
    };
    let answer = client.attach_network(request.clone()).await.unwrap().into_inner();
    check_ipconfigs(&answer.ipconfigs, &answer.extradata);
    assert_eq!(served.backend.calls(), ["attach a1 shop/web-0"]);
    assert_eq!(served.unknown_keys.counts(), [("AttachNetwork", 1)]);
    let both = AttachNetworkRequest {
        extradata: vec![entry("netns", "/run/netns/a")],
        ..request
    };
    let status = client.attach_network(both).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("contents of two layouts"), "{status}");
    served.stop().await;
}

#[tokio::test]
async fn node_networks() {
    let served = Served::start().await;
    let mut client = client(&served).await;
    let request = QueryNodeNetworksRequest {};
    let answer = client.query_node_networks(request).await.unwrap().into_inner();
    assert_eq!(answer.extradata["features.core"], "addresses,ipv4,ipv6,mtu,mac,status");
    assert_eq!(
        answer.extradata["features.extended"],
        "default-network,policy,services,egress,host-ports,isolation,xdp,bandwidth"
    );
    let methods = &answer.extradata["kni.methods"];
    assert!(methods.starts_with("CreateNetwork,") && methods.split(',').count() == 11);
    let networks = answer.networks;
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
    served.stop().await;
}

#[tokio::test]
async fn setup_reports_each_part_in_metadata() {
    let served = Served::start().await;
    let mut client = client(&served).await;
    let (mut other, request) = (client.clone(), SetupNodeNetworkRequest {});
    let (one, two) = tokio::join!(client.setup_node_network(request), other.setup_node_network(request));
    for answer in [one.unwrap(), two.unwrap()] {
        let part = |name: &str| answer.metadata().get(name).unwrap().to_str().unwrap();
        assert_eq!(part("kni-setup-bpffs"), "ok");
        assert_eq!(part("kni-setup-pool"), "prepared");
        assert_eq!(part("kni-setup-uplink"), "no default route at all");
    }
    assert_eq!(served.backend.calls(), ["prepare", "prepare"]);
    served.stop().await;
}

/// A kubelet must distinguish "no address requested" from "unknown".
#[tokio::test]
async fn a_pod_without_primary_interface_is_not_an_unknown_one() {
    let served = Served::start().await;
    let mut client = client(&served).await;
    *served.backend.mood.lock().unwrap() = Mood::WithoutPrimary;
    let attached = client.attach_interface(attach("a1")).await.unwrap().into_inner();
    let queried = client.query_pod_network(query("a1")).await.unwrap().into_inner();
    assert_eq!(attached.extradata, queried.extradata);
    assert_eq!(queried.extradata["none"], "true");
    assert_eq!(queried.ipconfigs.keys().collect::<Vec<_>>(), ["net1"]);
    *served.backend.mood.lock().unwrap() = Mood::Obliging;
    let attached = client.attach_interface(attach("a2")).await.unwrap().into_inner();
    assert!(!attached.extradata.contains_key("none"));
    let unknown = client.query_pod_network(query("a3")).await.unwrap().into_inner();
    assert!(unknown.extradata.is_empty());
    served.stop().await;
}

#[tokio::test]
async fn unknown_extradata_is_counted_by_method() {
    let served = Served::start().await;
    let mut client = client(&served).await;
    let entries = |keys: &[&str]| -> BTreeMap<String, String> {
        keys.iter()
            .map(|key| ((*key).to_owned(), "secret".to_owned()))
            .collect()
    };
    let mut request = attach("a1");
    request.extradata.extend(entries(&["one", "attempt", "podUID"]));
    request.isolation = Some(Isolation {
        extradata: entries(&["two", "one"]),
        ..Isolation::default()
    });
    client.attach_interface(request.clone()).await.unwrap();
    client
        .attach_network(AttachNetworkRequest::from(request))
        .await
        .unwrap();
    let create = CreateNetworkRequest {
        extradata: entries(&["podUID", "attempt", "netns"]),
        ..CreateNetworkRequest::default()
    };
    client.create_network(create).await.unwrap();
    let gone = DetachInterfaceRequest {
        extradata: entries(&["cni.mac", "cni.network"]),
        ..detach("a1")
    };
    client.detach_interface(gone).await.unwrap();
    let delete = DeleteNetworkRequest {
        id: "a1".to_owned(),
        extradata: entries(&["podUID", "attempt"]),
        ..DeleteNetworkRequest::default()
    };
    client.delete_network(delete).await.unwrap();
    let expected = [
        ("AttachInterface", 2),
        ("AttachNetwork", 2),
        ("CreateNetwork", 1),
        ("DetachInterface", 1),
    ];
    assert_eq!(served.unknown_keys.counts(), expected);
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

/// Begins a call, and cancels it once the backend works on it.
async fn cancel<T: Send + 'static>(served: &Served, call: impl Future<Output = T> + Send + 'static) {
    served.backend.calls();
    let call = tokio::spawn(call);
    let backend = served.backend.clone();
    until(move || !backend.calls().is_empty()).await;
    call.abort();
    assert!(
        call.await.is_err_and(|ended| ended.is_cancelled()),
        "the client does not wait"
    );
}

/// The connection stays: the client resets the stream, as a kubelet does whose context ends.
#[tokio::test]
async fn every_cancelled_change_is_completed_and_may_be_repeated() {
    let served = Served::start().await;
    *served.backend.mood.lock().unwrap() = Mood::Gated;
    let client = client(&served).await;
    let delete = || DeleteNetworkRequest {
        id: "a1".to_owned(),
        ..DeleteNetworkRequest::default()
    };
    let mut each = client.clone();
    cancel(&served, async move {
        each.create_network(CreateNetworkRequest::default()).await
    })
    .await;
    let mut each = client.clone();
    cancel(&served, async move { each.attach_interface(attach("a1")).await }).await;
    let mut each = client.clone();
    cancel(&served, async move { each.detach_interface(detach("a2")).await }).await;
    let mut each = client.clone();
    cancel(&served, async move { each.delete_network(delete()).await }).await;
    assert_eq!(served.backend.passed(), [] as [&str; 0], "nothing is done yet");
    served.backend.gate.add_permits(4);
    until(|| served.backend.passed().len() == 4).await;
    let mut passed = served.backend.passed();
    passed.sort_unstable();
    assert_eq!(passed, ["attach", "create", "delete", "detach"]);

    // The same calls succeed once more on the same connection.
    *served.backend.mood.lock().unwrap() = Mood::Obliging;
    let mut again = client;
    let attached = again.attach_interface(attach("a1")).await.unwrap().into_inner();
    let queried = again.query_pod_network(query("a1")).await.unwrap().into_inner();
    assert_eq!(attached.ipconfigs, queried.ipconfigs);
    for _repetition in 0..2 {
        again.detach_interface(detach("a1")).await.unwrap();
        again.delete_network(delete()).await.unwrap();
    }
    assert!(!served.backend.knows("a1"));
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
