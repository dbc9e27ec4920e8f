//! Tests the node's configuration: only KNI's routes and rules and the settings of single interfaces change.

use std::{
    fs,
    net::{IpAddr, Ipv6Addr, SocketAddrV6},
    os::fd::AsRawFd,
    process::Command,
    time::Duration,
};

use ipnet::IpNet;
use netlink_packet_route::{AddressFamily as Family, route::RouteProtocol};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn6, sendto, setsockopt, socket,
    sockopt::Ipv6MulticastHops,
};

use super::{Pod, VethSpec, netns_path, on_node, on_node_with_ip, spec};
use crate::{Netlink, OurRoute, OurRule, netns, own, prepare_host_interface, prepare_pod_interface};

const MAIN: u32 = 254;

fn subnet(text: &str) -> IpNet {
    text.parse().unwrap()
}

#[test]
fn routes_land_in_our_table_only() {
    on_node("routes_land_in_our_table_only", async || {
        let node = Netlink::new().unwrap();
        assert_eq!(node.list_our_routes().await.unwrap(), [], "no table yet");
        let (a, b) = (Pod::new(&node, 1).await, Pod::new(&node, 2).await);
        for pod in [&a, &b] {
            node.set_up(pod.indexes.host).await.unwrap();
        }
        let main = async |family| node.dump_routes(family, MAIN, None).await.unwrap();
        let before = (main(Family::Inet).await, main(Family::Inet6).await);
        for _twice in 0..2 {
            for address in a.addresses() {
                node.add_pod_route(address, a.indexes.host).await.unwrap();
            }
        }
        let ours = |pod: &Pod| {
            pod.addresses().map(|x| OurRoute {
                destination: x.into(),
                ifindex: pod.indexes.host,
            })
        };
        assert_eq!(node.list_our_routes().await.unwrap(), ours(&a));

        // The address moves to another pod: the new route replaces the old one, whose removal then has no effect.
        for address in a.addresses() {
            node.add_pod_route(address, b.indexes.host).await.unwrap();
            node.del_pod_route(address, a.indexes.host).await.unwrap();
        }
        let moved = node.list_our_routes().await.unwrap();
        assert_eq!(moved.len(), 2, "{moved:?}");
        assert!(moved.iter().all(|route| route.ifindex == b.indexes.host), "{moved:?}");
        for _twice in 0..2 {
            for address in a.addresses() {
                node.del_pod_route(address, b.indexes.host).await.unwrap();
            }
        }
        assert_eq!(node.list_our_routes().await.unwrap(), []);
        assert_eq!((main(Family::Inet).await, main(Family::Inet6).await), before);
    });
}

fn ip(arguments: &[&str]) -> String {
    let output = Command::new("ip").args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

fn all_rules() -> String {
    ip(&["-4", "-N", "rule", "show"]) + &ip(&["-6", "-N", "rule", "show"])
}

#[test]
fn rules_follow_the_subnets() {
    on_node_with_ip("rules_follow_the_subnets", async || {
        let node = Netlink::new().unwrap();
        let before = all_rules();
        // A foreign rule that differs from KNI's only by its protocol.
        let foreign = [
            "rule",
            "add",
            "to",
            "10.9.0.0/16",
            "lookup",
            "19278",
            "priority",
            "1910",
        ];
        ip(&foreign);
        let rule = |text| OurRule {
            subnet: subnet(text),
            priority: own::RULE_PRIORITY,
        };
        let (v4, v6, other) = ("10.1.0.0/16", "fd01::/64", "10.2.0.0/16");
        for _twice in 0..2 {
            node.ensure_rules(&[subnet(v4), subnet(v6), subnet(v4)]).await.unwrap();
            assert_eq!(node.list_our_rules().await.unwrap(), [rule(v4), rule(v6)]);
        }
        assert!(
            all_rules().contains("1910:\tfrom all to 10.1.0.0/16 lookup 19278 proto 75"),
            "{}",
            all_rules()
        );
        node.ensure_rules(&[subnet(v6), subnet(other)]).await.unwrap();
        assert_eq!(node.list_our_rules().await.unwrap(), [rule(other), rule(v6)]);
        for _twice in 0..2 {
            node.remove_rules().await.unwrap();
            assert_eq!(node.list_our_rules().await.unwrap(), []);
        }
        assert!(
            all_rules().contains("1910:\tfrom all to 10.9.0.0/16 lookup 19278"),
            "the foreign rule stays: {}",
            all_rules()
        );
        let undo = [
            "rule",
            "del",
            "to",
            "10.9.0.0/16",
            "lookup",
            "19278",
            "priority",
            "1910",
        ];
        ip(&undo);
        assert_eq!(all_rules(), before);
    });
}

/// Every interface setting of the namespace, except those of one interface.
fn settings_without(ifname: &str) -> Vec<(String, String)> {
    let mut settings = Vec::new();
    for family in ["ipv4", "ipv6"] {
        for interface in fs::read_dir(format!("/proc/sys/net/{family}/conf")).unwrap() {
            let interface = interface.unwrap();
            if interface.file_name() == ifname {
                continue;
            }
            for file in fs::read_dir(interface.path()).unwrap() {
                let path = file.unwrap().path();
                // Some files cannot be read (stable_secret).
                if let Ok(value) = fs::read_to_string(&path) {
                    settings.push((path.display().to_string(), value));
                }
            }
        }
    }
    settings.sort();
    settings
}

#[test]
fn only_the_settings_of_that_interface_change() {
    on_node("only_the_settings_of_that_interface_change", async || {
        let node = Netlink::new().unwrap();
        let _other = Pod::new(&node, 1).await;
        let pod = Pod::new(&node, 2).await;
        let before = settings_without("kni2");
        assert!(
            before
                .iter()
                .any(|(path, _)| path == "/proc/sys/net/ipv6/conf/kni1/forwarding")
        );
        for _twice in 0..2 {
            let missing = prepare_host_interface(&pod.spec.host_name).await.unwrap();
            assert!(
                missing.iter().all(|setting| *setting == "ipv6/force_forwarding"),
                "{missing:?}"
            );
        }
        assert_eq!(settings_without("kni2"), before);
        let read = |file| fs::read_to_string(format!("/proc/sys/net/{file}")).unwrap();
        assert_eq!(read("ipv4/conf/kni2/forwarding").trim(), "1");
        assert_eq!(read("ipv6/conf/kni2/accept_ra").trim(), "0");
        assert_eq!(read("ipv4/ip_forward").trim(), "0");
        let missing = prepare_host_interface(&"kni99".parse().unwrap()).await.unwrap_err();
        assert_eq!(missing.errno(), Some(libc::ENODEV), "{missing}");
    });
}

/// Sends a router advertisement out of an interface of the calling thread's namespace.
fn advertise(ifindex: u32) -> nix::Result<usize> {
    let protocol = SockProtocol::IcmpV6;
    let raw = socket(AddressFamily::Inet6, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol).unwrap();
    setsockopt(&raw, Ipv6MulticastHops, &255).unwrap();
    let everyone = SocketAddrV6::new(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1), 0, 0, ifindex);
    let lifetime = 1800_u16.to_be_bytes();
    let advertisement = [134, 0, 0, 0, 64, 0, lifetime[0], lifetime[1], 0, 0, 0, 0, 0, 0, 0, 0];
    sendto(
        raw.as_raw_fd(),
        &advertisement,
        &SockaddrIn6::from(everyone),
        MsgFlags::empty(),
    )
}

#[test]
fn learned_default_routes_survive_a_new_pod() {
    on_node("learned_default_routes_survive_a_new_pod", async || {
        let node = Netlink::new().unwrap();
        let path = netns_path("router");
        netns::create(&path).await.unwrap();
        let router = netns::open(&path).unwrap();
        let uplink = VethSpec {
            host_name: "uplink".parse().unwrap(),
            pod_name: "lan".parse().unwrap(),
            ..spec(9)
        };
        let ends = node.create_veth(&uplink, &router).await.unwrap();
        prepare_pod_interface(&router, &uplink.pod_name).await.unwrap();
        fs::write("/proc/sys/net/ipv6/conf/uplink/addr_gen_mode", "0").unwrap();
        node.set_up(ends.host).await.unwrap();
        Netlink::in_namespace(&router)
            .await
            .unwrap()
            .set_up(ends.pod)
            .await
            .unwrap();
        let learned = async || {
            let all = node.dump_routes(Family::Inet6, MAIN, Some(ends.host)).await.unwrap();
            all.iter()
                .any(|r| r.header.protocol == RouteProtocol::Ra && r.header.destination_prefix_length == 0)
        };
        let mut tries = 0;
        while !learned().await {
            tries += 1;
            assert!(tries < 50, "the advertisement was never accepted");
            // Refused until the router has its own link-local address.
            router.run(move || advertise(ends.pod).ok()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let pod = Pod::new(&node, 1).await;
        node.set_up(pod.indexes.host).await.unwrap();
        prepare_host_interface(&pod.spec.host_name).await.unwrap();
        node.add_pod_route(IpAddr::V6(pod.ipv6), pod.indexes.host)
            .await
            .unwrap();
        assert!(learned().await, "the node lost its default route");
        // The agent does not write `ipv6/forwarding`, because that drops the route; the kernel does not guarantee this,
        // so the result is only printed.
        fs::write("/proc/sys/net/ipv6/conf/kni1/forwarding", "1").unwrap();
        let kept = learned().await;
        println!("learned default route after a write to ipv6/forwarding of another interface: {kept}");
    });
}
