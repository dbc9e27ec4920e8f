//! Tests connections of real pods on two nodes, through the tunnel devices of both.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use kni_common::IFINDEX_BASE;
use kni_dataplane::{EndpointConfig, FabricRows, Hop, NetworkFabric, TunnelEnds, Way};
use kni_integration::{
    Namespaces, Node,
    frames::Mac,
    programs::{Programs, object, publish_unrestricted, routes},
    require,
    wait::patience,
};
use kni_local_node::fabric::Fabric;
use kni_model::{EndpointId, MacAddr, NetworkId};
use nix::net::if_::if_nametoindex;

const NETWORK: u32 = 70_000;
const ENDPOINT: u32 = 1;
/// The network's number in the cluster.
const NUMBER: u32 = 8_000_000;
/// Bytes of each stream.
const LENGTH: usize = 2 << 20;
/// What fits the underlay's 1500 bytes behind the outer headers of IPv6.
const WAY_MTU: u32 = 1430;
/// The MTU of the nodes' uplinks, and of pods that were attached before their network had a tunnel.
const FORMER_MTU: u32 = 1500;
/// What passes the router between the nodes, which neither of them knows.
const NARROW_MTU: u32 = 1320;
const POD_MAC: Mac = [2, 0, 0, 0, 0, 1];
const HOST_MAC: Mac = [2, 0, 0, 0, 1, 1];

/// The pod's addresses on a node.
fn pod(number: u8) -> [IpAddr; 2] {
    [format!("10.0.{number}.2"), format!("fd00:0:0:{number}::2")].map(|text| text.parse().expect("an address"))
}

/// A node with its pod, and the dataplane's handles in it.
struct Member {
    node: Node,
    pod: Namespaces,
    number: u8,
}

impl Member {
    fn new(fabric: &Fabric, number: u8, pod_mtu: u32) -> Result<Self> {
        let node = Node::on(fabric, &format!("member{number}"), number)?;
        let pod = Namespaces::fresh_net(&format!("pod{number}"))?;
        let [v4, v6] = pod_texts(number);
        node.ip(&[
            "link add overlay0 type vxlan external dstport 4789",
            "link set overlay0 addrgenmode none up",
            &format!(
                "link add kni1 index {} address 02:00:00:00:01:01 type veth peer name eth0 address 02:00:00:00:00:01 netns {}",
                IFINDEX_BASE + ENDPOINT,
                pod.net_path().display()
            ),
            "link set kni1 addrgenmode none up",
        ])?;
        pod.ip(&[
            &format!("link set eth0 addrgenmode none mtu {pod_mtu} up"),
            "link set lo up",
            &format!("address add {v4}/32 dev eth0"),
            &format!("address add {v6}/128 dev eth0 nodad"),
            "neighbour add 169.254.1.1 lladdr 02:00:00:00:01:01 dev eth0 nud permanent",
            "neighbour add fe80::1 lladdr 02:00:00:00:01:01 dev eth0 nud permanent",
            "route add 169.254.1.1 dev eth0 scope link",
            "route add default via 169.254.1.1 dev eth0",
            "route add default via fe80::1 dev eth0",
        ])?;
        pod.wait_for_local("eth0", &format!("{v6} "))?;
        Ok(Self { node, pod, number })
    }

    /// Opens the dataplane, which lives while `work` runs.
    fn open(&self) -> Result<Programs> {
        self.node.enter(|| {
            let programs = Programs::open(1024)?;
            let dataplane = programs.dataplane();
            let network = NetworkId::try_from(NETWORK)?;
            let subnets = ["10.0.0.0/16".parse()?, "fd00::/48".parse()?];
            dataplane.set_routes(network, &routes(&subnets, false))?;
            let [IpAddr::V4(ipv4), IpAddr::V6(ipv6)] = pod(self.number) else {
                unreachable!("one address of each family")
            };
            publish_unrestricted(
                dataplane,
                &EndpointConfig {
                    endpoint: EndpointId(ENDPOINT),
                    network,
                    ipv4: Some(ipv4),
                    ipv6: Some(ipv6),
                    mac: MacAddr(POD_MAC),
                    host_mac: MacAddr(HOST_MAC),
                    host_access: false,
                    xdp: false,
                    plugin: None,
                    shaped: false,
                },
            )?;
            dataplane.attach("kni1", EndpointId(ENDPOINT))?;
            dataplane.attach_overlay("overlay0")?;
            Ok(programs)
        })?
    }

    /// Leads to the pod of the other member without a tunnel, by the router between their links.
    fn lead_by_router(&self, programs: &Programs, other: &Self) -> Result<()> {
        self.node.enter(|| {
            let ifindex = if_nametoindex("uplink0")?;
            let dataplane = programs.dataplane();
            dataplane.attach_uplink("uplink0", ifindex)?;
            let ways = gateways(&self.node)?.map(|underlay| Way {
                underlay,
                overlay: false,
            });
            let hop = Hop {
                ifindex: Some(ifindex),
                mtu: FORMER_MTU,
                stamp: 1,
            };
            let network = NetworkFabric {
                blocks: blocks(other)?.into_iter().zip(ways).collect(),
                exposed: true,
                ..NetworkFabric::default()
            };
            dataplane.set_fabric(&FabricRows {
                ways: ways.map(|way| (way, hop)).into(),
                networks: [(NetworkId::try_from(NETWORK)?, network)].into(),
                ..FabricRows::default()
            })?;
            Ok(())
        })?
    }

    /// Leads to the pod of the other member.
    fn lead(&self, programs: &Programs, other: &Self, v4: bool) -> Result<()> {
        self.node.enter(|| {
            let ends = |member: &Self| -> Result<(Ipv4Addr, Ipv6Addr)> {
                let [v4, v6] = member.node.addresses();
                Ok((v4.parse()?, v6.parse()?))
            };
            let ((own4, own6), (their4, their6)) = (ends(self)?, ends(other)?);
            let way = Way {
                underlay: if v4 { their4.into() } else { their6.into() },
                overlay: true,
            };
            let hop = Hop {
                ifindex: Some(if_nametoindex("overlay0")?),
                mtu: WAY_MTU,
                stamp: 1,
            };
            let network = NetworkFabric {
                number: Some(NUMBER),
                blocks: blocks(other)?.into_iter().map(|block| (block, way)).collect(),
                ..NetworkFabric::default()
            };
            programs.dataplane().set_fabric(&FabricRows {
                tunnel: Some(TunnelEnds {
                    ipv4: Some(own4),
                    ipv6: Some(own6),
                    port: 4789,
                    host_network: None,
                }),
                ways: [(way, hop)].into(),
                networks: [(NetworkId::try_from(NETWORK)?, network)].into(),
                egress: BTreeMap::new(),
            })?;
            Ok(())
        })?
    }
}

fn pod_texts(number: u8) -> [String; 2] {
    pod(number).map(|address| address.to_string())
}

/// The ranges of addresses of a member's pods.
fn blocks(member: &Member) -> Result<[IpNet; 2]> {
    let [v4, v6] = pod(member.number);
    Ok([IpNet::new(v4, 24)?.trunc(), IpNet::new(v6, 64)?.trunc()])
}

/// The router's addresses on the link of a node, by the node's own.
fn gateways(node: &Node) -> Result<[IpAddr; 2]> {
    let [v4, v6] = node.addresses().map(|own| own.strip_suffix('2'));
    let gateway = |start: Option<&str>| -> Result<IpAddr> {
        Ok(format!("{}1", start.context("an address of a node behind a router")?).parse()?)
    };
    Ok([gateway(v4)?, gateway(v6)?])
}

/// Lets the router forward only small packets to a member's node, and to its pods without a tunnel.
fn narrow(fabric: &Fabric, member: &Member) -> Result<()> {
    let [node4, node6] = member.node.addresses();
    let [block4, block6] = blocks(member)?;
    let port = format!("port{}", member.number);
    let limit = format!("mtu lock {NARROW_MTU}");
    fabric.inside().ip(&[
        &format!("route add {node4}/32 dev {port} {limit}"),
        &format!("route add {node6}/128 dev {port} {limit}"),
        &format!("route add {block4} via {node4} dev {port} {limit}"),
        &format!("route add {block6} via {node6} dev {port} {limit}"),
    ])
}

fn content(salt: u8) -> Vec<u8> {
    (0..=250).cycle().take(LENGTH).map(|byte: u8| byte ^ salt).collect()
}

/// A stream in each direction of one connection from the client's pod to the server's.
fn exchange(client: &Member, server: &Member, family: usize) -> Result<()> {
    let from = pod(client.number)[family];
    // Any port: a process that another thread starts may have the socket of the exchange before for a moment.
    let any = SocketAddr::new(pod(server.number)[family], 0);
    let listener = server.pod.enter(|| TcpListener::bind(any))??;
    let at = listener.local_addr()?;
    thread::scope(|scope| {
        let serving = scope.spawn(|| -> Result<()> {
            let (mut stream, peer) = listener.accept()?;
            ensure!(peer.ip() == from, "the server sees {peer}");
            stream.set_read_timeout(Some(patience()))?;
            let mut received = Vec::new();
            stream.read_to_end(&mut received)?;
            ensure!(received == content(1), "the server received other content");
            Ok(stream.write_all(&content(2))?)
        });
        let mut stream = client
            .pod
            .enter(|| TcpStream::connect_timeout(&at, patience()))?
            .with_context(|| format!("connect to {at}"));
        if let Ok(stream) = &mut stream {
            stream.set_read_timeout(Some(patience()))?;
            stream.write_all(&content(1))?;
            stream.shutdown(Shutdown::Write)?;
            let mut received = Vec::new();
            stream.read_to_end(&mut received)?;
            ensure!(received == content(2), "the client received other content");
        } else {
            // Ends the server's wait.
            server.pod.enter(|| TcpStream::connect(at))??;
        }
        let outcome = serving.join().expect("the server does not panic");
        stream?;
        outcome
    })
}

/// Bytes of the mean frame that a node's tunnel device has received.
fn mean_frame(member: &Member) -> Result<u64> {
    let read = |name: &str| -> Result<u64> {
        let path = format!("/sys/class/net/overlay0/statistics/{name}");
        Ok(fs::read_to_string(&path).context(path)?.trim().parse()?)
    };
    member.node.enter(|| {
        let (bytes, packets) = (read("rx_bytes")?, read("rx_packets")?);
        bytes.checked_div(packets).context("no frame came through the tunnel")
    })?
}

#[test]
fn pods_of_two_nodes_exchange_streams_through_the_tunnel() -> Result<()> {
    require!(root, netns, bpf, ip);
    streams_pass("two-nodes", WAY_MTU)
}

/// Each first segment of a connection is too big, as both ends have announced what fits their interfaces.
#[test]
fn pods_from_before_the_tunnel_learn_its_mtu() -> Result<()> {
    require!(root, netns, bpf, ip);
    streams_pass("two-nodes-mtu", FORMER_MTU)
}

/// The router's errors reach the pods.
#[test]
fn pods_learn_what_passes_a_router_between_the_nodes() -> Result<()> {
    require!(root, netns, bpf, ip);
    behind_a_router("two-nodes-router", FORMER_MTU, |one, two, first, second| {
        one.lead_by_router(first, two)?;
        two.lead_by_router(second, one)?;
        each_way(one, two)
    })
}

/// Makes two nodes with a router between them that forwards less than the nodes' uplinks take.
fn behind_a_router(
    name: &str,
    pod_mtu: u32,
    check: impl FnOnce(&Member, &Member, &Programs, &Programs) -> Result<()>,
) -> Result<()> {
    object()?;
    let runtime = runtime()?;
    let _reactor = runtime.enter();
    let fabric = Fabric::routed(name)?;
    let (one, two) = (Member::new(&fabric, 11, pod_mtu)?, Member::new(&fabric, 12, pod_mtu)?);
    let handle = runtime.handle();
    let open = |member: &Member| {
        let _reactor = handle.enter();
        member.open()
    };
    let (first, second) = (open(&one)?, open(&two)?);
    for member in [&one, &two] {
        narrow(&fabric, member)?;
    }
    check(&one, &two, &first, &second)
}

/// Streams of both families, from each member to the other one.
fn each_way(one: &Member, two: &Member) -> Result<()> {
    for family in [0, 1] {
        for (client, server) in [(one, two), (two, one)] {
            exchange(client, server, family)
                .with_context(|| format!("from {} to {}, family {family}", client.number, server.number))?;
        }
    }
    Ok(())
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?)
}

fn streams_pass(name: &str, pod_mtu: u32) -> Result<()> {
    object()?;
    let runtime = runtime()?;
    let _reactor = runtime.enter();
    let fabric = Fabric::new(name)?;
    let (one, two) = (Member::new(&fabric, 11, pod_mtu)?, Member::new(&fabric, 12, pod_mtu)?);
    let handle = runtime.handle();
    let open = |member: &Member| {
        let _reactor = handle.enter();
        member.open()
    };
    let (first, second) = (open(&one)?, open(&two)?);
    for v4 in [true, false] {
        one.lead(&first, &two, v4)?;
        two.lead(&second, &one, v4)?;
        each_way(&one, &two).with_context(|| format!("underlay of IPv4: {v4}"))?;
    }
    for member in [&one, &two] {
        // Acknowledgements are among them: without segmentation offload through the tunnel the mean is below one
        // segment.
        let mean = mean_frame(member)?;
        ensure!(
            mean > 2 * u64::from(WAY_MTU),
            "node {}: frames of {mean} bytes: nothing was offloaded",
            member.number
        );
    }
    Ok(())
}
