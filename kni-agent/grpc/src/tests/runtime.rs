//! Tests the methods of `kni.runtime.v1.Runtime`.

use kni_proto::{
    kni::kni_client::KniClient,
    runtime::{
        GetStatusRequest, Interface, ListDropsRequest, ListInterfacesRequest, ListMapsRequest, ListNetworksRequest,
        WatchDropsRequest, runtime_client::RuntimeClient,
    },
};
use tonic::transport::Channel;

use super::{Served, fake::event, kni::attach, soon};

async fn client(served: &Served) -> RuntimeClient<Channel> {
    RuntimeClient::new(served.connect("two").await)
}

#[tokio::test]
async fn status() {
    let served = Served::start().await;
    let status = client(&served)
        .await
        .get_status(GetStatusRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(status.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(status.pid, std::process::id());
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_eq!(status.kernel_release, release.trim());
    assert_eq!(
        status.sockets,
        ["one", "two", "pods"].map(|name| served.path(name).display().to_string())
    );
    assert_eq!(status.layout_version, kni_common::layout::LAYOUT_VERSION);
    assert!(status.ready && status.uptime_seconds < 60);
    let taken = format!("socket {}: a file", served.path("taken").display());
    assert_eq!(status.reasons.len(), 2, "{:?}", status.reasons);
    assert_eq!(status.reasons[0], "one manifest is refused");
    assert!(status.reasons[1].starts_with(&taken), "{:?}", status.reasons);
    assert_eq!(
        (status.hook.as_str(), status.pin_path.as_str()),
        ("tcx", "/sys/fs/bpf/kni/v1")
    );
    assert_eq!(
        (status.sandboxes, status.attachments, status.endpoints_capacity),
        (1, 2, 1023)
    );
    assert_eq!(
        (status.warm_sandboxes, status.pending_removals, status.pending_links),
        (8, 4, 2)
    );
    let uplink = status.uplink.unwrap();
    assert_eq!(
        (uplink.ifname.as_str(), uplink.ifindex, uplink.xdp.as_str()),
        ("uplink0", 2, "native")
    );
    assert_eq!(
        (uplink.sources, uplink.dedicated),
        (vec!["192.0.2.2".to_owned()], vec!["192.0.2.77".to_owned()])
    );
    assert_eq!((uplink.programs.len(), uplink.host_ports), (1, 3));
    served.stop().await;
}

#[tokio::test]
async fn networks_drops_and_maps() {
    let served = Served::start().await;
    let mut client = client(&served).await;
    let answer = client.list_networks(ListNetworksRequest {}).await.unwrap().into_inner();
    let (pods, blue) = (&answer.networks[0], &answer.networks[1]);
    assert_eq!(
        (pods.name.as_str(), pods.id, pods.default, pods.ready),
        ("pods", 1, true, true)
    );
    assert_eq!(
        (blue.ready, blue.reason.as_str(), blue.mtu, blue.attachments),
        (false, "disabled", 1500, 3)
    );
    assert_eq!(pods.subnets, ["10.1.0.0/24", "fd00::/64"]);
    assert_eq!(
        (pods.total_addresses.as_str(), pods.used_addresses.as_str()),
        ("340282366920938463463374607431768211455", "6")
    );
    assert_eq!(pods.origin, "networks.yaml:1");
    let refused = &answer.refused[0];
    let refused = (
        refused.file.as_str(),
        refused.line,
        refused.field.as_str(),
        refused.reason.as_str(),
    );
    assert_eq!(refused, ("bad.yaml", 3, "spec.mtu", "too small"));

    let drops = client.list_drops(ListDropsRequest {}).await.unwrap().into_inner().drops;
    let drop = &drops[0];
    assert_eq!(
        (
            drop.network.as_str(),
            drop.pod_namespace.as_str(),
            drop.pod_name.as_str()
        ),
        ("blue", "shop", "web-0")
    );
    assert_eq!(
        (drop.direction.as_str(), drop.reason.as_str()),
        ("from_pod", "source_address")
    );
    assert_eq!(drop.count.map(|c| (c.packets, c.bytes)), Some((2, 120)));
    assert!(drop.explanation.contains("spoofed"));

    let maps = client.list_maps(ListMapsRequest {}).await.unwrap().into_inner().maps;
    let map = &maps[0];
    assert_eq!(
        (map.name.as_str(), map.id, map.kind.as_str()),
        ("ENDPOINTS", 9, "array")
    );
    assert_eq!(
        (map.key_size, map.value_size, map.max_entries, map.entries),
        (4, 48, 1024, 2)
    );
    assert_eq!(
        (map.pin.as_str(), map.purpose.as_str()),
        ("/sys/fs/bpf/kni/v1/maps/ENDPOINTS", "endpoints")
    );
    served.stop().await;
}

fn check_interfaces(interfaces: &[Interface]) {
    let [eth0, net1] = interfaces else {
        panic!("{interfaces:?}")
    };
    assert_eq!(
        (
            eth0.pod_namespace.as_str(),
            eth0.pod_name.as_str(),
            eth0.sandbox_id.as_str()
        ),
        ("shop", "web-0", "a1")
    );
    assert_eq!(
        (eth0.network.as_str(), eth0.network_id, eth0.endpoint_id),
        ("pods", 1, 1)
    );
    assert_eq!(
        (
            eth0.ifname.as_str(),
            eth0.ifindex,
            eth0.host_ifname.as_str(),
            eth0.host_ifindex
        ),
        ("eth0", 2, "kni1", 1_000_001)
    );
    assert_eq!(
        (eth0.netns_path.as_str(), eth0.netns_inode),
        ("/run/netns/a", 4_026_532_000)
    );
    assert_eq!(
        (eth0.mac.as_str(), eth0.host_mac.as_str(), eth0.mtu),
        ("02:00:00:00:00:01", "02:00:00:00:00:ff", 1500)
    );
    check_details(eth0);
    assert_eq!(
        (net1.network.as_str(), net1.addresses.len(), net1.default_route),
        ("blue", 1, false)
    );
}

fn check_details(eth0: &Interface) {
    let addresses: Vec<_> = eth0
        .addresses
        .iter()
        .map(|a| (a.family.as_str(), a.ip.as_str()))
        .collect();
    assert_eq!(addresses, [("IPv4", "10.1.0.2"), ("IPv6", "fd00::2")]);
    let program = &eth0.programs[0];
    assert_eq!(
        (
            program.name.as_str(),
            program.id,
            program.hook.as_str(),
            program.link_id
        ),
        ("from_pod", 77, "tcx/ingress", 78)
    );
    assert_eq!(eth0.from_pod.map(|c| (c.packets, c.bytes)), Some((5, 500)));
    assert!(eth0.to_pod.is_some() && eth0.dropped.is_some());
    assert!(!eth0.healthy && eth0.default_route && eth0.host_access);
    assert_eq!(eth0.problems, ["the route is missing"]);
}

#[tokio::test]
async fn interfaces() {
    let served = Served::start().await;
    KniClient::new(served.connect("one").await)
        .attach_interface(attach("a1"))
        .await
        .unwrap();
    served.backend.calls();
    let filter = ListInterfacesRequest {
        pod_namespace: "a".to_owned(),
        pod_name: "b".to_owned(),
        network: "c".to_owned(),
        sandbox_id: "d".to_owned(),
    };
    let interfaces = client(&served)
        .await
        .list_interfaces(filter)
        .await
        .unwrap()
        .into_inner()
        .interfaces;
    let asked = r#"InterfaceFilter { pod_namespace: "a", pod_name: "b", network: "c", sandbox: "d" }"#;
    assert_eq!(served.backend.calls(), [asked]);
    check_interfaces(&interfaces);
    served.stop().await;
}

#[tokio::test]
async fn drop_events_count_what_was_lost_and_end_with_the_server() {
    let mut served = Served::start().await;
    let mut client = client(&served).await;
    let mut events = client.watch_drops(WatchDropsRequest {}).await.unwrap().into_inner();
    served.backend.events.send(event(1)).unwrap();
    let first = soon(events.message()).await.unwrap().unwrap();
    assert_eq!(
        (first.time_ns, first.lost, first.length, first.ethertype),
        (1, 0, 98, 0x0800)
    );
    assert_eq!((first.source.as_str(), first.source_port), ("10.9.9.9", 4000));
    assert_eq!((first.destination.as_str(), first.destination_port), ("10.1.0.3", 53));
    assert_eq!(
        (first.protocol.as_str(), first.network.as_str(), first.reason.as_str()),
        ("UDP", "blue", "source_address")
    );
    // The channel holds four; nothing reads it while this task sends without a pause.
    for time in 2..=21 {
        served.backend.events.send(event(time)).unwrap();
    }
    let mut seen = Vec::new();
    while seen.last() != Some(&21) {
        let event = soon(events.message()).await.unwrap().unwrap();
        let before = seen.last().copied().unwrap_or(1);
        assert_eq!(event.time_ns, before + event.lost + 1, "lost events are counted");
        seen.push(event.time_ns);
    }
    assert!(seen.len() < 20, "some were lost: {seen:?}");
    served.request_stop();
    assert_eq!(soon(events.message()).await.unwrap(), None, "the stream ends in order");
    soon(&mut served.server).await.unwrap().unwrap();
}
