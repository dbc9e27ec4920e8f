//! Tests a pod's configuration, and that the pod has connectivity at once.

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use ipnet::IpNet;

use super::{NODE_V4, NODE_V6, Pod, on_node};
use crate::{Netlink, Netns, PodInterface, connection::Request, message, own, prepare_host_interface};

/// Less than duplicate address detection or one lost packet takes (1 s each).
const AT_ONCE: Duration = Duration::from_millis(800);

async fn give_node_addresses(node: &Netlink) {
    let add = |address| {
        let message = netlink_packet_route::RouteNetlinkMessage::NewAddress(message::address(1, address));
        Request::new(node.place("test"), message, message::PUT)
    };
    node.apply(vec![node.set_up_request(1), add(NODE_V4.into()), add(NODE_V6.into())])
        .await
        .unwrap();
}

async fn join_default_network(node: &Netlink, pod: &Pod) {
    node.set_up(pod.indexes.host).await.unwrap();
    prepare_host_interface(&pod.spec.host_name).await.unwrap();
    pod.inside.configure_pod(&pod.config()).await.unwrap();
    node.wait_for_carrier(pod.indexes.host).await.unwrap();
    for address in pod.addresses() {
        node.add_pod_neighbour(pod.indexes.host, address, pod.spec.pod_mac)
            .await
            .unwrap();
        node.add_pod_route(address, pod.indexes.host).await.unwrap();
    }
}

/// Connects from one namespace to a listener in another and checks that this listener answers.
async fn talk(client: &Netns, server: &Netns, address: IpAddr) {
    let listener = server
        .run(move || TcpListener::bind(SocketAddr::new(address, 4000)))
        .await
        .unwrap()
        .unwrap();
    let answering = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(address.to_string().as_bytes()).unwrap();
    });
    let start = Instant::now();
    let heard = client
        .run(move || {
            let mut stream = TcpStream::connect_timeout(&SocketAddr::new(address, 4000), AT_ONCE)?;
            let mut text = String::new();
            stream.read_to_string(&mut text).map(|_| text)
        })
        .await
        .unwrap();
    assert_eq!(
        heard.unwrap_or_else(|e| panic!("{address} after {:?}: {e}", start.elapsed())),
        address.to_string()
    );
    answering.join().unwrap();
}

async fn interface(netlink: &Netlink, name: &str) -> PodInterface {
    netlink
        .pod_interfaces()
        .await
        .unwrap()
        .into_iter()
        .find(|i| i.link.name == name)
        .unwrap()
}

fn without_link_local(interface: &PodInterface) -> Vec<IpNet> {
    let local: IpNet = "fe80::/10".parse().unwrap();
    interface
        .addresses
        .iter()
        .copied()
        .filter(|a| !local.contains(a))
        .collect()
}

#[test]
fn node_and_pod_reach_each_other_at_once() {
    on_node("node_and_pod_reach_each_other_at_once", async || {
        let node = Netlink::new().unwrap();
        give_node_addresses(&node).await;
        let here = Netns::current().unwrap();
        node.ensure_rules(&["10.1.0.0/16".parse().unwrap(), "fd01::/64".parse().unwrap()])
            .await
            .unwrap();
        let pod = Pod::new(&node, 5).await;
        join_default_network(&node, &pod).await;
        talk(&here, &pod.netns, pod.ipv6.into()).await;
        talk(&here, &pod.netns, pod.ipv4.into()).await;
        talk(&pod.netns, &here, NODE_V6.into()).await;
        talk(&pod.netns, &here, NODE_V4.into()).await;
    });
}

#[test]
fn two_pods_reach_each_other_through_the_node() {
    on_node("two_pods_reach_each_other_through_the_node", async || {
        let node = Netlink::new().unwrap();
        give_node_addresses(&node).await;
        node.ensure_rules(&["10.1.0.0/16".parse().unwrap(), "fd01::/64".parse().unwrap()])
            .await
            .unwrap();
        let (a, b) = (Pod::new(&node, 1).await, Pod::new(&node, 2).await);
        join_default_network(&node, &a).await;
        join_default_network(&node, &b).await;
        talk(&a.netns, &b.netns, b.ipv4.into()).await;
        // IPv6 is forwarded for one interface alone only where `force_forwarding` exists.
        if std::path::Path::new("/proc/sys/net/ipv6/conf/kni1/force_forwarding").exists() {
            talk(&a.netns, &b.netns, b.ipv6.into()).await;
        }
    });
}

#[test]
fn configuration_is_complete_and_idempotent() {
    on_node("configuration_is_complete_and_idempotent", async || {
        let node = Netlink::new().unwrap();
        let pod = Pod::new(&node, 5).await;
        node.set_up(pod.indexes.host).await.unwrap();
        let config = pod.config();
        pod.inside.configure_pod(&config).await.unwrap();
        let first = interface(&pod.inside, "eth0").await;
        pod.inside.configure_pod(&config).await.unwrap();
        let eth0 = interface(&pod.inside, "eth0").await;
        assert_eq!(first.routes, eth0.routes);
        assert_eq!(
            without_link_local(&eth0),
            ["10.1.0.5/32".parse().unwrap(), "fd01::5/128".parse().unwrap()]
        );
        assert!(eth0.link.up && interface(&pod.inside, "lo").await.link.up);
        for (any, gateway) in [
            ("0.0.0.0/0", IpAddr::V4(own::GATEWAY_V4)),
            ("::/0", own::GATEWAY_V6.into()),
        ] {
            let to = |text: &str| -> Vec<_> {
                let net: IpNet = text.parse().unwrap();
                eth0.routes
                    .iter()
                    .filter(|r| r.destination == net)
                    .map(|r| r.gateway)
                    .collect()
            };
            assert_eq!(to(any), [Some(gateway)]);
            assert_eq!(to(&IpNet::from(gateway).to_string()), [None]);
        }
    });
}

#[test]
fn a_second_interface_leaves_the_first_one_alone() {
    on_node("a_second_interface_leaves_the_first_one_alone", async || {
        let node = Netlink::new().unwrap();
        let pod = Pod::new(&node, 5).await;
        pod.inside.configure_pod(&pod.config()).await.unwrap();
        let before = interface(&pod.inside, "eth0").await;
        let second = super::VethSpec {
            pod_name: "net1".parse().unwrap(),
            ..super::spec(6)
        };
        let indexes = node.create_veth(&second, &pod.netns).await.unwrap();
        let config = super::PodInterfaceConfig {
            ifindex: indexes.pod,
            ipv4: Some(Ipv4Addr::new(10, 1, 0, 5)),
            ipv6: None,
            gateway_mac: second.host_mac,
            default_route: false,
            routes: vec!["10.9.0.0/16".parse().unwrap(), "fd09::/64".parse().unwrap()],
            ..pod.config()
        };
        pod.inside.configure_pod(&config).await.unwrap();
        let net1 = interface(&pod.inside, "net1").await;
        let gateways: Vec<_> = net1
            .routes
            .iter()
            .map(|r| (r.destination.to_string(), r.gateway))
            .collect();
        assert_eq!(gateways, [("10.9.0.0/16".to_owned(), Some(own::GATEWAY_V4.into()))]);
        assert_eq!(interface(&pod.inside, "eth0").await.routes, before.routes);

        let name = second.host_name.as_str();
        assert!(node.delete_link(indexes.host, name).await.unwrap());
        assert_eq!(pod.inside.get_link("net1").await.unwrap(), None);
        assert_eq!(interface(&pod.inside, "eth0").await, before);
    });
}
