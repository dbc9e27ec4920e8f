//! Tests against the running kernel, each in its own network and mount namespaces.

mod costs;
mod host;
mod named_namespaces;
mod overlay;
mod pod;
mod source_routing;
mod veth;

use std::{
    env,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    panic::resume_unwind,
    path::PathBuf,
    process::Command,
    thread,
};

use kni_model::MacAddr;
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    unistd::geteuid,
};

use super::{Netlink, Netns, PodInterfaceConfig, VethIndexes, VethSpec, netns, prepare_pod_interface};

/// Addresses of the node itself, on its loopback interface.
const NODE_V4: Ipv4Addr = Ipv4Addr::new(10, 255, 0, 1);
const NODE_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xffff, 0, 0, 0, 0, 0, 1);

/// Runs `body` as a fresh node: new network namespace, private mounts, empty `/run`; all of it is removed with the
/// thread.
fn on_node(test: &str, body: impl AsyncFnOnce() + Send + 'static) {
    if geteuid().is_root() {
        run_on_node(body);
    } else {
        skip(test, "root");
    }
}

/// [`on_node`] of a test that executes `ip`, of iproute2.
fn on_node_with_ip(test: &str, body: impl AsyncFnOnce() + Send + 'static) {
    let is_there = Command::new("ip").arg("-V").output().is_ok();
    if is_there {
        on_node(test, body);
    } else {
        skip(test, "ip of iproute2");
    }
}

/// Skips a test; fails it where `KNI_REQUIRE` asks for its namespaces.
fn skip(test: &str, need: &str) {
    let required = env::var("KNI_REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|name| name.trim() == "netns"),
        "{test} needs {need} and KNI_REQUIRE asks for it"
    );
    println!("SKIP {test}: needs {need}");
}

fn run_on_node(body: impl AsyncFnOnce() + Send + 'static) {
    let node = thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).unwrap();
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        mount(Some("tmpfs"), "/run", Some("tmpfs"), MsFlags::empty(), none).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(body());
    });
    if let Err(panic) = node.join() {
        resume_unwind(panic);
    }
}

fn netns_path(name: &str) -> PathBuf {
    PathBuf::from("/run/netns").join(name)
}

fn mac(last: u16) -> MacAddr {
    let [high, low] = last.to_be_bytes();
    MacAddr([2, 0, 0, 0, high, low])
}

fn spec(number: u16) -> VethSpec {
    VethSpec {
        host_name: format!("kni{number}").parse().unwrap(),
        host_ifindex: Some(1000 + u32::from(number)),
        host_mac: mac(0x1000 + number),
        alias: format!("kni:default/pod-{number}/eth0"),
        pod_name: "eth0".parse().unwrap(),
        pod_mac: mac(0x2000 + number),
        mtu: 1450,
    }
}

/// A pod with one interface, of which only addresses and routes are missing.
struct Pod {
    netns: Netns,
    inside: Netlink,
    spec: VethSpec,
    indexes: VethIndexes,
    ipv4: Ipv4Addr,
    ipv6: Ipv6Addr,
}

impl Pod {
    async fn new(node: &Netlink, number: u16) -> Self {
        let path = netns_path(&format!("pod{number}"));
        netns::create(&path).await.unwrap();
        let netns = netns::open(&path).unwrap();
        let spec = spec(number);
        let indexes = node.create_veth(&spec, &netns).await.unwrap();
        let missing = prepare_pod_interface(&netns, &spec.pod_name).await.unwrap();
        assert!(missing.is_empty(), "{missing:?}");
        let [high, low] = number.to_be_bytes();
        Self {
            inside: Netlink::in_namespace(&netns).await.unwrap(),
            netns,
            spec,
            indexes,
            ipv4: Ipv4Addr::new(10, 1, high, low),
            ipv6: Ipv6Addr::new(0xfd01, 0, 0, 0, 0, 0, 0, number),
        }
    }

    fn addresses(&self) -> [IpAddr; 2] {
        [self.ipv4.into(), self.ipv6.into()]
    }

    fn config(&self) -> PodInterfaceConfig {
        PodInterfaceConfig {
            ifindex: self.indexes.pod,
            ipv4: Some(self.ipv4),
            ipv6: Some(self.ipv6),
            gateway_mac: self.spec.host_mac,
            mtu: 1450,
            default_route: true,
            routes: Vec::new(),
            route_metric: 0,
        }
    }
}
