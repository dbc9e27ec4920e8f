//! Provides the answers of a node with two pods in overlapping networks.

use kni_proto::runtime::{
    Address, Counter, DropCount, DropEvent, GetStatusResponse, Interface, ListDropsResponse, ListInterfacesResponse,
    ListMapsResponse, ListNetworksResponse, Map, NetworkStatus, Program, RefusedManifest, Uplink,
};

use crate::fake::Answers;

pub(super) fn full() -> Answers {
    Answers {
        status: status(),
        networks: networks(),
        interfaces: ListInterfacesResponse {
            interfaces: vec![healthy(), broken()],
        },
        drops: ListDropsResponse {
            drops: vec![drop_count()],
        },
        maps: ListMapsResponse { maps: vec![map()] },
        events: vec![
            event(),
            DropEvent {
                time_ns: 2_000_000_000,
                lost: 3,
                ..event()
            },
        ],
        ..Answers::default()
    }
}

pub(super) fn status() -> GetStatusResponse {
    GetStatusResponse {
        version: "0.1.0".into(),
        pid: 4711,
        uptime_seconds: 3725,
        ready: true,
        reasons: vec![],
        kernel_release: "6.18.5".into(),
        hook: "tcx".into(),
        layout_version: 1,
        pin_path: "/sys/fs/bpf/kni/v1".into(),
        sockets: vec!["/run/kni/kni.sock".into(), "/tmp/kni.sock".into()],
        sandboxes: 3,
        attachments: 2,
        endpoints_capacity: 1024,
        warm_sandboxes: 8,
        pending_removals: 0,
        pending_links: 1,
        uplink: Some(Uplink {
            ifname: "uplink0".into(),
            ifindex: 2,
            sources: vec!["192.0.2.2".into(), "2001:db8::2".into()],
            dedicated: vec![],
            programs: vec![Program {
                name: "from_uplink".into(),
                id: 7,
                hook: "tcx/ingress".into(),
                link_id: 9,
            }],
            xdp: String::new(),
            host_ports: 3,
            warning: String::new(),
        }),
        features_core: vec!["addresses".into()],
        features_extended: vec!["policy".into(), "egress".into()],
        kni_methods: vec!["AttachInterface".into()],
    }
}

fn networks() -> ListNetworksResponse {
    let blue = NetworkStatus {
        name: "blue".into(),
        id: 1,
        default: true,
        ready: true,
        reason: String::new(),
        subnets: vec!["10.0.0.0/24".into(), "fd00::/64".into()],
        mtu: 1500,
        attachments: 1,
        total_addresses: "18446744073709551868".into(),
        used_addresses: "2".into(),
        origin: "blue.yaml:1".into(),
        provider: "Ebpf".into(),
        features: vec!["addresses".into(), "policy".into()],
        number: 7_340_033,
        number_problem: String::new(),
    };
    let red = NetworkStatus {
        name: "red".into(),
        id: 2,
        default: false,
        ready: false,
        reason: "no route table".into(),
        subnets: vec!["10.0.0.0/24".into()],
        total_addresses: "253".into(),
        origin: "red.yaml:1".into(),
        number: 0,
        number_problem: "number 7 is that of networks red and green".into(),
        ..blue.clone()
    };
    let refused = RefusedManifest {
        file: "green.yaml".into(),
        line: 7,
        field: "spec.mtu".into(),
        reason: "below 1280".into(),
    };
    ListNetworksResponse {
        networks: vec![blue, red],
        refused: vec![refused],
    }
}

pub(super) fn healthy() -> Interface {
    Interface {
        pod_namespace: "shop".into(),
        pod_name: "web-0".into(),
        pod_uid: "u-1".into(),
        sandbox_id: "5f2b".into(),
        network: "blue".into(),
        network_id: 1,
        endpoint_id: 11,
        ifname: "eth0".into(),
        ifindex: 2,
        host_ifname: "kni0a1b".into(),
        host_ifindex: 40,
        netns_path: "/run/netns/a".into(),
        netns_inode: 4_026_532_000,
        mac: "0a:58:0a:00:00:05".into(),
        host_mac: "0a:58:00:00:00:01".into(),
        mtu: 1500,
        addresses: vec![
            Address {
                family: "IPv4".into(),
                ip: "10.0.0.5".into(),
            },
            Address {
                family: "IPv6".into(),
                ip: "fd00::5".into(),
            },
        ],
        programs: vec![
            Program {
                name: "from_pod".into(),
                id: 70,
                hook: "tcx/ingress".into(),
                link_id: 7,
            },
            Program {
                name: "to_pod".into(),
                id: 71,
                hook: "tcx/egress".into(),
                link_id: 8,
            },
        ],
        from_pod: Some(Counter {
            packets: 12,
            bytes: 1536,
        }),
        to_pod: Some(Counter { packets: 9, bytes: 900 }),
        dropped: None,
        healthy: true,
        problems: vec![],
        default_route: true,
        host_access: true,
        kind: "veth".into(),
        policy_enforced: true,
    }
}

fn broken() -> Interface {
    Interface {
        pod_name: "db\u{1b}[2J\u{9b}0m".into(),
        sandbox_id: "77aa".into(),
        network: "red".into(),
        addresses: vec![],
        programs: vec![],
        dropped: Some(Counter { packets: 1, bytes: 60 }),
        healthy: false,
        policy_enforced: false,
        problems: vec!["from_pod is not attached".into(), "to_pod is not attached".into()],
        ..healthy()
    }
}

fn drop_count() -> DropCount {
    DropCount {
        network: "blue".into(),
        pod_namespace: "shop".into(),
        pod_name: "web-0".into(),
        ifname: "eth0".into(),
        direction: "from_pod".into(),
        reason: "source_mac".into(),
        count: Some(Counter {
            packets: 4,
            bytes: 4096,
        }),
        explanation: "the source MAC address is not the pod's (spoofed)".into(),
    }
}

pub(super) fn event() -> DropEvent {
    DropEvent {
        time_ns: 1_000_000_000,
        network: "blue".into(),
        pod_namespace: "shop".into(),
        pod_name: "web-0".into(),
        ifname: "eth0".into(),
        direction: "from_pod".into(),
        reason: "source_address".into(),
        source: "10.0.0.9".into(),
        destination: "10.0.0.6".into(),
        protocol: "TCP".into(),
        source_port: 1234,
        destination_port: 80,
        length: 74,
        lost: 0,
        ethertype: 0x0800,
        explanation: "spoofed".into(),
    }
}

fn map() -> Map {
    Map {
        name: "endpoints".into(),
        id: 33,
        kind: "Array".into(),
        key_size: 4,
        value_size: 64,
        max_entries: 1024,
        entries: 2,
        pin: "/sys/fs/bpf/kni/v1/maps/endpoints".into(),
        purpose: "one row per pod interface".into(),
    }
}
