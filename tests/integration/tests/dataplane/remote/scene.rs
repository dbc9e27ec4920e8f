//! Provides a node with pods, a tunnel device and an uplink, and the sockets of a host in place of other nodes.

use std::{
    cell::Cell,
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    path::Path,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, MapError, lpm_trie::Key};
use ipnet::IpNet;
use kni_common::{
    Direction, IFINDEX_BASE, Verdict,
    address::{AddressKey, AddressValue, from_ip, words},
    endpoint::EndpointRow,
    event::FlowEvent,
    flow::{EndPorts, FlowEnd, FlowKey4, FlowKey6, FlowValue, NodeRow, is_second, scope},
    overlay::Overlay,
    policy::{IDENTITY_ANY, IdentityData, IdentityValue, PORTS_ALL, PORTS_NONE, PolicyKey, PolicyValue},
    route::{
        ACTION_REMOTE, ACTION_STACK, ACTION_UNREACHABLE, FULL_PREFIX, ROUTE_NODE, ROUTE_OVERLAY, ROUTE_OWNED,
        RouteData, RouteValue,
    },
    uplink::{EGRESS_NUMBER, OUTSIDE},
};
use kni_dataplane::{Dataplane, EndpointConfig, FlowRecord, SupposedTunnel, TunnelEnds};
use kni_integration::{
    Namespaces, Node, eventually_sync,
    frames::{Ip, Link, Mac, PacketSocket, Payload, TcpFlags},
    model::Seen,
    node::{FABRIC_V4, FABRIC_V6, NODE_V4, NODE_V6},
    programs::{Programs, action_of, hex, routes, runnable},
    wait::patience,
};
use kni_model::{EndpointId, Enforcement, MacAddr, NetworkId, PolicyStep};
use nix::net::if_::if_nametoindex;

/// Two networks with the same addresses.
pub(super) const BLUE: u32 = 1;
pub(super) const RED: u32 = 2;
/// Pods: two of the blue network; one of the red network with the first one's addresses.
pub(super) const A: u32 = 1;
pub(super) const B: u32 = 2;
pub(super) const RED_A: u32 = 3;
/// Numbers of other nodes: the one that has the blue network's remote pods, and another one.
pub(super) const NODE: u32 = 7;
pub(super) const OTHER: u32 = 8;
/// Addresses of [`A`] and [`RED_A`], of [`B`], of a pod on [`NODE`], and of no pod; each of both families.
pub(super) const LOCAL: [IpAddr; 2] = pod(0, 2);
pub(super) const SECOND: [IpAddr; 2] = pod(0, 3);
pub(super) const REMOTE: [IpAddr; 2] = pod(1, 2);
pub(super) const UNUSED: [IpAddr; 2] = pod(0, 99);
/// Protocol number of TCP.
pub(super) const TCP: u8 = 6;
/// Ports of the local and of the remote pod.
pub(super) const OWN: u16 = 4000;
pub(super) const THEIRS: u16 = 80;
/// The largest packet towards other nodes.
pub(super) const MTU: u32 = 1400;
/// Identity of remote pods for policies, and policy sets.
pub(super) const FRIEND: u32 = 40;
pub(super) const STRANGER: u32 = 41;
pub(super) const ONLY_FRIENDS: u32 = 20;
pub(super) const NOTHING: u32 = 21;

/// The subnets of both networks.
const SUBNETS: [&str; 2] = ["10.0.0.0/16", "fd00::/48"];
/// Added to the id of a network, its number in the cluster.
const NUMBERS: u32 = 4096;
pub(super) const OVERLAY: &str = "overlay0";
/// The port of all nodes' tunnels.
pub(super) const VXLAN_PORT: u16 = 4789;
/// How long to look for what must not come, once something else shows that the packet was processed.
const GLANCE: Duration = Duration::from_millis(20);
/// The generation of the first row of a node.
const FIRST: u32 = 1000;

const fn pod(block: u8, host: u8) -> [IpAddr; 2] {
    [
        IpAddr::V4(Ipv4Addr::new(10, 0, block, host)),
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, block as u16, 0, 0, 0, host as u16)),
    ]
}

fn mac(id: u32) -> Mac {
    [2, 0, 0, 0, 0, u8::try_from(id).expect("a small number")]
}

fn text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn host_mac(id: u32) -> Mac {
    [2, 0, 0, 0, 1, u8::try_from(id).expect("a small number")]
}

/// The number of a network in the cluster. No network has the id 0.
const fn number_of(network: u32) -> u32 {
    if network == 0 { EGRESS_NUMBER } else { network + NUMBERS }
}

/// Whether a run of a program takes the frame as an interface would, which moves a tag out of it.
fn can_explain(frame: &[u8]) -> bool {
    runnable(frame) && frame.get(12..14) != Some(&[0x81, 0x00])
}

/// What came through the tunnel.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tunnelled {
    /// The sender's address.
    pub(super) from: IpAddr,
    /// Number of the virtual network.
    pub(super) network: u32,
    /// The packet, without its Ethernet header.
    pub(super) packet: Vec<u8>,
}

/// A flow's row from the point of view of the local pod.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) local: (u8, FlowEnd),
    pub(super) remote: (u8, FlowEnd),
    pub(super) flags: u16,
}

/// A node with its tables.
pub(super) struct Scene<'a> {
    node: &'a Node,
    programs: Programs,
    nodes: Array<MapData, NodeRow>,
    routes: LpmTrie<MapData, RouteData, RouteValue>,
    addresses: HashMap<MapData, AddressKey, AddressValue>,
    identities: LpmTrie<MapData, IdentityData, IdentityValue>,
    endpoints: Array<MapData, EndpointRow>,
    flows4: HashMap<MapData, FlowKey4, FlowValue>,
    flows6: HashMap<MapData, FlowKey6, FlowValue>,
    pods: BTreeMap<u32, PacketSocket>,
    /// The uplink, as processes of the node send by it.
    uplink: PacketSocket,
    /// The other end of the uplink.
    pub(super) fabric: PacketSocket,
    /// Sockets of [`NODE`] and [`OTHER`], for tunnels over both families.
    tunnels: BTreeMap<IpAddr, UdpSocket>,
    generation: u32,
    /// What the dry run gave for the packet that was sent last.
    explained: Cell<Option<Verdict>>,
}

/// The addresses of [`NODE`] and [`OTHER`] in the underlay.
pub(super) fn underlay(node: u32, v4: bool) -> IpAddr {
    let text = match (node, v4) {
        (NODE, true) => FABRIC_V4,
        (NODE, false) => FABRIC_V6,
        (_, true) => "198.51.100.3",
        (_, false) => "2001:db8:100::3",
    };
    text.parse().expect("an address")
}

/// The node's own address in the underlay.
pub(super) fn own_underlay(v4: bool) -> IpAddr {
    let text = if v4 { NODE_V4 } else { NODE_V6 };
    text.parse().expect("an address")
}

/// The node's ends of the tunnel.
pub(super) fn tunnel_ends() -> TunnelEnds {
    let (IpAddr::V4(ipv4), IpAddr::V6(ipv6)) = (own_underlay(true), own_underlay(false)) else {
        unreachable!("one address of each family")
    };
    TunnelEnds {
        ipv4: Some(ipv4),
        ipv6: Some(ipv6),
        port: VXLAN_PORT,
        host_network: None,
    }
}

fn open<T: TryFrom<Map, Error = MapError>>(folder: &Path, name: &str, of: fn(MapData) -> Map) -> Result<T> {
    let data = MapData::from_pin(folder.join(name)).with_context(|| name.to_owned())?;
    T::try_from(of(data)).with_context(|| name.to_owned())
}

/// Gives both networks their numbers, and the node its ends of the tunnel.
fn write_numbers(folder: &Path) -> Result<()> {
    let mut numbers: HashMap<MapData, u32, u32> = open(folder, "NUMBERS", Map::HashMap)?;
    let mut networks: HashMap<MapData, u32, u32> = open(folder, "NETWORKS", Map::HashMap)?;
    for network in [BLUE, RED] {
        numbers.insert(network, network + NUMBERS, 0)?;
        networks.insert(network + NUMBERS, network, 0)?;
    }
    let mut overlay: Array<MapData, Overlay> = open(folder, "OVERLAY", Map::Array)?;
    let (IpAddr::V4(ipv4), IpAddr::V6(ipv6)) = (own_underlay(true), own_underlay(false)) else {
        unreachable!("one address of each family")
    };
    let row = Overlay {
        ipv4: ipv4.octets(),
        ipv6: ipv6.octets(),
        port: VXLAN_PORT.to_be_bytes(),
        forwards_egress: 0,
        host_network: 0,
    };
    Ok(overlay.set(0, row, 0)?)
}

/// Makes the node and passes it to `work`, which runs inside.
pub(super) fn inside(name: &str, work: impl FnOnce(&mut Scene<'_>) -> Result<()> + Send) -> Result<()> {
    kni_integration::programs::object()?;
    let node = Node::new(name)?;
    for v4 in [true, false] {
        let length = if v4 { 24 } else { 64 };
        node.fabric()
            .add_address("fabric0", &format!("{}/{length}", underlay(OTHER, v4)))?;
    }
    let mut commands = vec![
        format!("link add {OVERLAY} type vxlan external dstport {VXLAN_PORT}"),
        format!("link set {OVERLAY} addrgenmode none up"),
    ];
    // `bpf_redirect_peer` does not deliver within one namespace.
    let pods = Namespaces::fresh_net(&format!("{name}-pods"))?;
    for id in [A, B, RED_A] {
        let (index, there) = (IFINDEX_BASE + id, pods.net_path());
        commands.extend([
            format!(
                "link add kni{id} index {index} type veth peer name peer{id} netns {}",
                there.display()
            ),
            format!("link set kni{id} addrgenmode none up"),
        ]);
    }
    node.ip(&commands.iter().map(String::as_str).collect::<Vec<_>>())?;
    for id in [A, B, RED_A] {
        pods.ip(&[&format!("link set peer{id} addrgenmode none up")])?;
    }
    node.enter(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let _reactor = runtime.enter();
        work(&mut Scene::new(&node, &pods, Programs::open(1024)?)?)
    })?
}

impl<'a> Scene<'a> {
    fn new(node: &'a Node, pods: &Namespaces, programs: Programs) -> Result<Self> {
        let dataplane = programs.dataplane();
        let subnets = [SUBNETS[0].parse()?, SUBNETS[1].parse()?];
        for network in [BLUE, RED] {
            dataplane.set_routes(NetworkId::try_from(network)?, &routes(&subnets, false))?;
        }
        for set in [ONLY_FRIENDS, NOTHING] {
            let row = |identity, direction, ports| {
                let key = PolicyKey {
                    set,
                    identity,
                    direction,
                };
                (key, PolicyValue { ports, rule: 1 })
            };
            let friends = if set == ONLY_FRIENDS { PORTS_ALL } else { PORTS_NONE };
            let rows = [0, 1].into_iter().flat_map(|direction| {
                [
                    row(IDENTITY_ANY, direction, PORTS_NONE),
                    row(FRIEND, direction, friends),
                ]
            });
            dataplane.apply_policy(&[PolicyStep::PutPolicy(rows.collect())])?;
        }
        for (id, network, addresses) in [(A, BLUE, LOCAL), (B, BLUE, SECOND), (RED_A, RED, LOCAL)] {
            enforce(dataplane, id, 0)?;
            publish(dataplane, id, network, addresses, false)?;
            dataplane.attach(&format!("kni{id}"), EndpointId(id))?;
        }
        dataplane.attach_overlay(OVERLAY)?;
        dataplane.attach_uplink("uplink0", if_nametoindex("uplink0")?)?;
        let folder = dataplane.pin_path();
        write_numbers(&folder)?;
        let mut tunnels = BTreeMap::new();
        for node_number in [NODE, OTHER] {
            for v4 in [true, false] {
                let address = underlay(node_number, v4);
                let socket = node.fabric().enter(|| UdpSocket::bind((address, VXLAN_PORT)))??;
                tunnels.insert(address, socket);
            }
        }
        Ok(Self {
            node,
            nodes: open(&folder, "NODES", Map::Array)?,
            routes: open(&folder, "ROUTES", Map::LpmTrie)?,
            addresses: open(&folder, "ADDRESSES", Map::HashMap)?,
            identities: open(&folder, "IDENTITIES", Map::LpmTrie)?,
            endpoints: open(&folder, "ENDPOINTS", Map::Array)?,
            flows4: open(&folder, "FLOWS4", Map::LruHashMap)?,
            flows6: open(&folder, "FLOWS6", Map::LruHashMap)?,
            pods: [A, B, RED_A]
                .into_iter()
                .map(|id| Ok((id, PacketSocket::open(pods, &format!("peer{id}"))?)))
                .collect::<Result<_>>()?,
            uplink: PacketSocket::open(node, "uplink0")?,
            fabric: PacketSocket::open(node.fabric(), "fabric0")?,
            tunnels,
            programs,
            generation: FIRST,
            explained: Cell::new(None),
        })
    }

    pub(super) fn dataplane(&self) -> &Arc<Dataplane> {
        self.programs.dataplane()
    }

    /// Empties the row of the tunnel, as it is after a boot.
    pub(super) fn without_tunnel(&self) -> Result<()> {
        let mut overlay: Array<MapData, Overlay> = open(&self.dataplane().pin_path(), "OVERLAY", Map::Array)?;
        Ok(overlay.set(0, Overlay::default(), 0)?)
    }

    /// The row of the tunnel.
    pub(super) fn overlay(&self) -> Result<Overlay> {
        let overlay: Array<MapData, Overlay> = open(&self.dataplane().pin_path(), "OVERLAY", Map::Array)?;
        Ok(overlay.get(&0, 0)?)
    }

    /// Leads to the remote blue pods through the tunnel, or through the uplink, to a node at this address, with a new
    /// generation.
    pub(super) fn lead(&mut self, number: u32, address: IpAddr, overlay: bool) -> Result<()> {
        self.place(number, address, overlay)?;
        self.route(BLUE, number, overlay)
    }

    /// Writes the row of a node with a new generation.
    pub(super) fn place(&mut self, number: u32, address: IpAddr, overlay: bool) -> Result<()> {
        self.generation += 1;
        let row = NodeRow {
            underlay: from_ip(address),
            generation: self.generation,
            mtu: MTU,
            ifindex: if_nametoindex(if overlay { OVERLAY } else { "uplink0" })?,
            reserved: 0,
        };
        Ok(self.nodes.set(number, row, 0)?)
    }

    /// Changes nothing but the generation of a node.
    pub(super) fn renew(&mut self, number: u32) -> Result<()> {
        self.generation += 1;
        let row = NodeRow {
            generation: self.generation,
            ..self.nodes.get(&number, 0)?
        };
        Ok(self.nodes.set(number, row, 0)?)
    }

    /// Empties the row of a node.
    pub(super) fn remove_node(&mut self, number: u32) -> Result<()> {
        Ok(self.nodes.set(number, NodeRow::default(), 0)?)
    }

    /// Routes the network's packets for remote pods to a node.
    pub(super) fn route(&mut self, network: u32, number: u32, overlay: bool) -> Result<()> {
        for net in ["10.0.1.0/24", "fd00:0:0:1::/64"] {
            let (length, data) = prefix(network, net.parse()?);
            let value = RouteValue {
                action: ACTION_REMOTE,
                flags: if overlay { ROUTE_OVERLAY } else { 0 },
                node: number,
            };
            self.routes.insert(&Key::new(length, data), value, 0)?;
        }
        Ok(())
    }

    /// Routes the blue network's packets for the addresses of [`NODE`] to it, through the tunnel.
    pub(super) fn route_node(&mut self) -> Result<()> {
        for v4 in [true, false] {
            let (length, data) = prefix(BLUE, IpNet::from(underlay(NODE, v4)));
            let value = RouteValue {
                action: ACTION_REMOTE,
                flags: ROUTE_OVERLAY | ROUTE_NODE,
                node: NODE,
            };
            self.routes.insert(&Key::new(length, data), value, 0)?;
        }
        Ok(())
    }

    /// Lets the pods of the blue network exchange packets with the node's stack, by its own addresses.
    pub(super) fn route_own(&mut self) -> Result<()> {
        let mut overlay: Array<MapData, Overlay> = open(&self.dataplane().pin_path(), "OVERLAY", Map::Array)?;
        let row = Overlay {
            host_network: BLUE,
            ..overlay.get(&0, 0)?
        };
        overlay.set(0, row, 0)?;
        for v4 in [true, false] {
            let (length, data) = prefix(BLUE, IpNet::from(own_underlay(v4)));
            let value = RouteValue {
                action: ACTION_STACK,
                flags: ROUTE_NODE,
                node: 0,
            };
            self.routes.insert(&Key::new(length, data), value, 0)?;
        }
        Ok(())
    }

    /// Only nodes have addresses of the blue network: no host may send with them.
    pub(super) fn own_subnets(&mut self) -> Result<()> {
        for net in SUBNETS {
            let (length, data) = prefix(BLUE, net.parse()?);
            let value = RouteValue {
                action: ACTION_UNREACHABLE,
                flags: ROUTE_OWNED,
                node: 0,
            };
            self.routes.insert(&Key::new(length, data), value, 0)?;
        }
        Ok(())
    }

    /// Gives [`A`] access from the node, whose stack routes to it, and to the remote pods through the tunnel. It drops
    /// no packet for its source.
    pub(super) fn route_by_stack(&self) -> Result<()> {
        publish(self.dataplane(), A, BLUE, LOCAL, true)?;
        for interface in ["all", "default", "uplink0", "overlay0"] {
            std::fs::write(format!("/proc/sys/net/ipv4/conf/{interface}/rp_filter"), "0")?;
        }
        let mut commands = Vec::new();
        for family in 0..2 {
            let (to, mac) = (LOCAL[family], text(mac(A)));
            commands.push(format!("neighbour replace {to} lladdr {mac} dev kni{A}"));
            commands.push(format!("route replace {to} dev kni{A}"));
            let (to, mac) = (REMOTE[family], text(host_mac(77)));
            commands.push(format!("neighbour replace {to} lladdr {mac} dev {OVERLAY}"));
            commands.push(format!("route replace {to} dev {OVERLAY}"));
        }
        self.node.ip(&commands.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// What becomes of a packet to [`A`] that the node's stack got by the interface with that index, 0 for the node
    /// itself, as the program explains it. It does the same.
    pub(super) fn by_stack(&self, ingress: u32, packet: &[u8]) -> Result<Verdict> {
        let (seen, frame) = (Seen::to_pod(A, ingress), Link::new(host_mac(A), mac(A)).frame(packet));
        let code = self.programs.explain(seen, &frame)?.event.verdict;
        let explained = Verdict::from_code(code).context("a verdict")?;
        let action = self.programs.run_as(seen, &frame, 0)?.action;
        ensure!(
            action == action_of(explained),
            "explained as {}, but it did {action}",
            explained.as_str()
        );
        Ok(explained)
    }

    /// Lets packets that come without a tunnel find a pod.
    pub(super) fn expose(&mut self, id: u32, addresses: [IpAddr; 2]) -> Result<()> {
        let incarnation = self.endpoints.get(&id, 0)?.incarnation;
        for address in addresses {
            let key = AddressKey {
                network: OUTSIDE,
                address: from_ip(address),
            };
            let value = AddressValue {
                endpoint: id,
                incarnation,
            };
            self.addresses.insert(key, value, 0)?;
        }
        Ok(())
    }

    /// Sets the identity of remote blue pods without a new epoch: flows are not evaluated again.
    pub(super) fn identify(&mut self, identity: u32) -> Result<()> {
        self.identify_at(REMOTE, identity)
    }

    /// The same for any addresses of the blue network.
    pub(super) fn identify_at(&mut self, addresses: [IpAddr; 2], identity: u32) -> Result<()> {
        for address in addresses {
            let data = IdentityData {
                network: BLUE.to_be_bytes(),
                address: from_ip(address),
            };
            let key = Key::new(FULL_PREFIX, data);
            self.identities.insert(&key, IdentityValue { identity }, 0)?;
        }
        Ok(())
    }

    /// Enforces a policy set at a pod, 0 for none.
    pub(super) fn enforce(&self, id: u32, policy: u32) -> Result<()> {
        enforce(self.dataplane(), id, policy)
    }

    /// Publishes a blue pod again, which gives it new generations.
    pub(super) fn withdraw(&self, id: u32) -> Result<()> {
        Ok(self.dataplane().withdraw(EndpointId(id))?)
    }

    /// Expected generation of the remote end of a pod's flows.
    pub(super) fn remote_generation(&self, id: u32, number: u32) -> Result<u32> {
        let (endpoint, node) = (self.endpoints.get(&id, 0)?, self.nodes.get(&number, 0)?);
        Ok(endpoint.epoch.wrapping_add(node.generation))
    }

    /// Generation of a pod.
    pub(super) fn generation(&self, id: u32) -> Result<u32> {
        Ok(self.endpoints.get(&id, 0)?.generation)
    }

    /// The row of a flow of the blue network: local and remote end.
    pub(super) fn flow(&self, local: (IpAddr, u16), remote: (IpAddr, u16), protocol: u8) -> Option<Row> {
        let bytes = [local.0, remote.0].map(from_ip);
        let second = is_second(words(bytes[0]), words(bytes[1]));
        let (first, last) = if second { (remote, local) } else { (local, remote) };
        let ports = EndPorts {
            first: first.1.to_be_bytes(),
            second: last.1.to_be_bytes(),
        };
        let scope = scope(BLUE, protocol);
        let value = match (first.0, last.0) {
            (IpAddr::V4(first), IpAddr::V4(last)) => {
                let (first, second) = (first.octets(), last.octets());
                self.flows4.get(
                    &FlowKey4 {
                        scope,
                        first,
                        second,
                        ports,
                    },
                    0,
                )
            }
            (first, last) => {
                let (first, second) = (from_ip(first), from_ip(last));
                self.flows6.get(
                    &FlowKey6 {
                        scope,
                        first,
                        second,
                        ports,
                    },
                    0,
                )
            }
        };
        let value = value.ok()?;
        Some(Row {
            local: value.sender(second),
            remote: value.receiver(second),
            flags: value.flags,
        })
    }

    /// Number of rows of flows.
    pub(super) fn flows(&self) -> usize {
        self.flows4.keys().count() + self.flows6.keys().count()
    }

    /// Removes all rows of flows.
    pub(super) fn flush(&mut self) -> Result<()> {
        for key in self.flows4.keys().collect::<Result<Vec<_>, _>>()? {
            self.flows4.remove(&key)?;
        }
        for key in self.flows6.keys().collect::<Result<Vec<_>, _>>()? {
            self.flows6.remove(&key)?;
        }
        Ok(())
    }

    /// A pod sends a packet. What the programs explain about it must be what they then do.
    pub(super) fn send(&self, id: u32, packet: &[u8]) -> Result<()> {
        let frame = Link::new(mac(id), host_mac(id)).frame(packet);
        self.explain_sent(id, &frame)?;
        Ok(self.pod(id)?.send(&frame)?)
    }

    /// Sends an IP packet of a pod without asking before what would happen to it: each run of the programs tries other
    /// ports.
    pub(super) fn send_unexplained(&self, id: u32, packet: &[u8]) -> Result<()> {
        self.explained.set(None);
        Ok(self.pod(id)?.send(&Link::new(mac(id), host_mac(id)).frame(packet))?)
    }

    fn explain_sent(&self, id: u32, frame: &[u8]) -> Result<Option<FlowEvent>> {
        if !can_explain(frame) {
            self.explained.set(None);
            return Ok(None);
        }
        let answer = self.programs.explain(Seen::from_pod(id), frame)?;
        self.explained.set(Verdict::from_code(answer.event.verdict));
        Ok(Some(answer.event))
    }

    fn explain_tunnelled(&self, from: IpAddr, network: u32, frame: &[u8]) -> Result<Option<FlowEvent>> {
        // Packets to and from the outside are not explained.
        if !can_explain(frame) || network == 0 {
            self.explained.set(None);
            return Ok(None);
        }
        let tunnel = SupposedTunnel {
            number: number_of(network),
            sender: from,
        };
        let answer = self.programs.explain_arrival(tunnel, frame)?;
        self.explained.set(Verdict::from_code(answer.event.verdict));
        Ok(Some(answer.event))
    }

    /// The packet that was sent last had this verdict: so it must have been explained.
    fn was_explained(&self, verdict: Verdict) -> Result<()> {
        match self.explained.take() {
            Some(explained) if explained != verdict => {
                bail!("explained as {}, but it was {}", explained.as_str(), verdict.as_str())
            }
            _ => Ok(()),
        }
    }

    /// The explanation of a packet, without sending it. `from`: the address of a node and a network, or none for a
    /// packet of [`A`].
    pub(super) fn explain(&self, from: Option<(IpAddr, u32)>, packet: &[u8]) -> Result<FlowEvent> {
        let event = match from {
            Some((from, network)) => {
                self.explain_tunnelled(from, network, &Link::new(mac(77), host_mac(77)).frame(packet))
            }
            None => self.explain_sent(A, &Link::new(mac(A), host_mac(A)).frame(packet)),
        };
        event?.context("a frame that programs can be asked about")
    }

    /// Events since the last call.
    pub(super) fn events(&mut self, patience: Duration) -> Result<Vec<FlowRecord>> {
        self.programs.events(patience)
    }

    /// Every counted verdict of packets, by the direction of the program that decided; those of packets between two
    /// pods of the node once. Without packets that the node's stack makes by itself at each interface, in the seconds
    /// after it came up: solicitations and reports of groups.
    pub(super) fn verdicts(&self) -> Result<BTreeMap<(Direction, Verdict), u64>> {
        let mut all = self.drops()?;
        for id in [A, B, RED_A] {
            for (direction, verdict, count) in self.dataplane().forwarded(EndpointId(id))? {
                *all.entry((direction, verdict)).or_insert(0) += count.packets;
            }
        }
        all.remove(&(Direction::ToPod, Verdict::Absorbed));
        all.retain(|_, count| *count > 0);
        Ok(all)
    }

    fn pod(&self, id: u32) -> Result<&PacketSocket> {
        self.pods.get(&id).context("a pod")
    }

    /// Another node sends a packet through the tunnel, in a frame as that node's pod sends it.
    pub(super) fn tunnel(&self, from: IpAddr, network: u32, packet: &[u8]) -> Result<()> {
        self.tunnel_frame(from, network, &Link::new(mac(77), host_mac(77)).frame(packet))
    }

    /// Another node sends a frame through the tunnel.
    pub(super) fn tunnel_frame(&self, from: IpAddr, network: u32, frame: &[u8]) -> Result<()> {
        self.explain_tunnelled(from, network, frame)?;
        let [_, a, b, c] = number_of(network).to_be_bytes();
        let datagram = [&[8, 0, 0, 0, a, b, c, 0], frame].concat();
        let to = SocketAddr::new(own_underlay(from.is_ipv4()), VXLAN_PORT);
        let socket = self.tunnels.get(&from).context("a socket of another node")?;
        let sent = socket.send_to(&datagram, to)?;
        ensure!(sent == datagram.len(), "{sent} bytes were sent");
        Ok(())
    }

    /// Another host sends a packet to the uplink without a tunnel.
    pub(super) fn send_outside(&self, packet: &[u8]) -> Result<()> {
        self.send_tagged_outside(&[], packet)
    }

    /// The same behind VLAN tags, by their control information, the outermost first.
    pub(super) fn send_tagged_outside(&self, tags: &[u16], packet: &[u8]) -> Result<()> {
        let (from, to) = (
            Self::mac_of(self.node.fabric(), "fabric0")?,
            Self::mac_of(self.node, "uplink0")?,
        );
        Ok(self.fabric.send(&tagged(Link::new(from, to), tags).frame(packet))?)
    }

    /// A process of the node sends a packet by the uplink.
    pub(super) fn send_by_uplink(&self, packet: &[u8]) -> Result<()> {
        self.send_frame_by_uplink(|link| link.frame(packet))
    }

    /// The same for a frame made of its link header.
    pub(super) fn send_frame_by_uplink(&self, frame: impl FnOnce(Link) -> Vec<u8>) -> Result<()> {
        let (from, to) = (
            Self::mac_of(self.node, "uplink0")?,
            Self::mac_of(self.node.fabric(), "fabric0")?,
        );
        match self.uplink.send(&frame(Link::new(from, to))) {
            // A program dropped it.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(()),
            sent => Ok(sent?),
        }
    }

    /// Removes the tunnel's settings, as on a node without one.
    pub(super) fn remove_tunnel(&self) -> Result<()> {
        let mut overlay: Array<MapData, Overlay> = open(&self.dataplane().pin_path(), "OVERLAY", Map::Array)?;
        Ok(overlay.set(0, Overlay::default(), 0)?)
    }

    pub(super) fn mac_of(ns: &Namespaces, link: &str) -> Result<Mac> {
        let path = format!("link show {link}");
        let shown = ns.run("ip", &path.split(' ').collect::<Vec<_>>())?;
        let mut words = shown.split_whitespace().skip_while(|word| *word != "link/ether");
        let text = words.nth(1).context("a MAC address")?;
        kni_integration::frames::parse_mac(text).context("a MAC address")
    }

    /// The fabric's namespaces.
    pub(super) fn host(&self) -> &Namespaces {
        self.node.fabric()
    }

    /// The next packet that comes through the tunnel to a node's address.
    pub(super) fn tunnelled(&self, at: IpAddr) -> Result<Tunnelled> {
        let socket = self.tunnels.get(&at).context("a socket of another node")?;
        socket.set_read_timeout(Some(patience()))?;
        let mut buffer = vec![0; 65_536];
        let (length, from) = socket
            .recv_from(&mut buffer)
            .context("nothing came through the tunnel")?;
        self.was_explained(Verdict::Tunnelled)?;
        let datagram = buffer.get(..length).context("a datagram")?;
        let (header, frame) = datagram.split_at_checked(8).context("a VXLAN header")?;
        ensure!(header[..4] == [8, 0, 0, 0], "{}", hex(header));
        let number = u32::from_be_bytes([0, header[4], header[5], header[6]]);
        let network = match number {
            EGRESS_NUMBER => 0,
            number => number.checked_sub(NUMBERS).context("the number of a network")?,
        };
        Ok(Tunnelled {
            from: from.ip(),
            network,
            packet: frame.get(14..).context("an Ethernet header")?.to_vec(),
        })
    }

    /// The next frame for a pod that holds this packet.
    pub(super) fn received(&self, id: u32, packet: &[u8]) -> Result<()> {
        let frame = self.next(id, patience(), |frame| frame.get(14..) == Some(packet))?;
        let frame = frame.with_context(|| format!("pod {id} received no {}", hex(packet)))?;
        let link = Link::new(host_mac(id), mac(id)).frame(packet);
        ensure!(frame == link, "pod {id} received {}", hex(&frame));
        // Without a tunnel there is no explanation.
        self.was_explained(Verdict::Redirected)
    }

    /// The next frame for a pod that `wanted` accepts.
    pub(super) fn next(&self, id: u32, patience: Duration, wanted: impl Fn(&[u8]) -> bool) -> Result<Option<Vec<u8>>> {
        self.pod(id)?.receive(patience, wanted)
    }

    /// The next frame on the fabric that holds a packet which `wanted` accepts.
    pub(super) fn on_fabric(&self, wanted: impl Fn(&[u8]) -> bool) -> Result<Vec<u8>> {
        let found = self
            .fabric
            .receive(patience(), |frame| frame.get(14..).is_some_and(&wanted))?;
        let found = found.context("the packet did not come to the fabric")?;
        self.was_explained(Verdict::Routed)?;
        Ok(found)
    }

    /// The packet comes to the fabric, with or without tags.
    pub(super) fn leaves_behind_tags(&self, packet: &[u8]) -> Result<()> {
        let found = self.fabric.receive(patience(), |frame| frame.ends_with(packet))?;
        found.map(drop).context("the packet did not come to the fabric")
    }

    /// Checks that `act` makes the programs drop one packet, for this reason and no other, and that it reaches no pod.
    pub(super) fn dropped(
        &self,
        what: &str,
        direction: Direction,
        reason: Verdict,
        act: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let before = self.drops()?;
        self.explained.set(None);
        act()?;
        let more = || -> Result<Vec<(Direction, Verdict, u64)>> {
            let now = self.drops()?.into_iter();
            let more = now.map(|(key, count)| (key.0, key.1, count - before.get(&key).unwrap_or(&0)));
            Ok(more.filter(|(_, _, count)| *count > 0).collect())
        };
        let expected = vec![(direction, reason, 1)];
        eventually_sync(patience(), || {
            let more = more()?;
            ensure!(more == expected, "{what}: dropped {more:?}, expected {expected:?}");
            Ok(())
        })?;
        self.was_explained(reason).with_context(|| what.to_owned())?;
        for id in [A, B, RED_A] {
            let received = self.next(id, GLANCE, |_any| true)?;
            ensure!(
                received.is_none(),
                "{what}: pod {id} received {}",
                hex(&received.unwrap_or_default())
            );
        }
        Ok(())
    }

    /// Checks that nothing more has come through the tunnel.
    pub(super) fn quiet(&self) -> Result<()> {
        for socket in self.tunnels.values() {
            socket.set_read_timeout(Some(GLANCE))?;
            let mut buffer = [0; 2048];
            if let Ok((length, from)) = socket.recv_from(&mut buffer) {
                anyhow::bail!("{from} sent {}", hex(&buffer[..length]));
            }
        }
        Ok(())
    }

    fn drops(&self) -> Result<BTreeMap<(Direction, Verdict), u64>> {
        let mut drops = BTreeMap::new();
        for drop in self.dataplane().drops()? {
            *drops.entry((drop.direction, drop.reason)).or_insert(0) += drop.count.packets;
        }
        Ok(drops)
    }

    /// Packets of a pod that were forwarded with a verdict.
    pub(super) fn forwarded(&self, id: u32, verdict: Verdict) -> Result<u64> {
        let all = self.dataplane().forwarded(EndpointId(id))?;
        let of_verdict = all.iter().filter(|(_, one, _)| *one == verdict);
        Ok(of_verdict.map(|(_, _, count)| count.packets).sum())
    }
}

/// The header with VLAN tags, the outermost first.
pub(super) fn tagged(link: Link, tags: &[u16]) -> Link {
    tags.iter().fold(link, |link, tag| link.vlan(*tag))
}

fn prefix(network: u32, net: IpNet) -> (u32, RouteData) {
    let offset = if net.addr().is_ipv4() { 96 } else { 0 };
    let data = RouteData {
        network: network.to_be_bytes(),
        address: from_ip(net.network()),
    };
    (32 + offset + u32::from(net.prefix_len()), data)
}

fn enforce(dataplane: &Dataplane, id: u32, policy: u32) -> Result<()> {
    let enforcement = Enforcement {
        policy,
        ..Enforcement::default()
    };
    Ok(dataplane.apply_policy(&[PolicyStep::Enforce(vec![(EndpointId(id), enforcement)])])?)
}

/// Publishes an endpoint, also again.
pub(super) fn publish(
    dataplane: &Dataplane,
    id: u32,
    network: u32,
    addresses: [IpAddr; 2],
    host_access: bool,
) -> Result<()> {
    let [IpAddr::V4(ipv4), IpAddr::V6(ipv6)] = addresses else {
        unreachable!("one address of each family")
    };
    Ok(dataplane.publish(&EndpointConfig {
        endpoint: EndpointId(id),
        network: NetworkId::try_from(network)?,
        ipv4: Some(ipv4),
        ipv6: Some(ipv6),
        mac: MacAddr(mac(id)),
        host_mac: MacAddr(host_mac(id)),
        host_access,
        xdp: false,
        plugin: None,
        shaped: false,
    })?)
}

/// The local and the remote pod of one family.
pub(super) type Ends = (IpAddr, IpAddr);

/// [`A`] and the remote pod, in both families.
pub(super) fn families() -> [Ends; 2] {
    [0, 1].map(|family| (LOCAL[family], REMOTE[family]))
}

/// A packet to the remote pod.
pub(super) fn out((local, remote): Ends, payload: &Payload) -> Vec<u8> {
    Ip::new(local, remote).packet(payload)
}

/// A segment of the local pod.
pub(super) fn segment(flags: TcpFlags) -> Payload {
    Payload::tcp(OWN, THEIRS, flags)
}

/// A segment of the remote pod.
pub(super) fn reply(flags: TcpFlags) -> Payload {
    Payload::tcp(THEIRS, OWN, flags)
}

/// A packet from the remote pod.
pub(super) fn back((local, remote): Ends, payload: &Payload) -> Vec<u8> {
    Ip::new(remote, local).packet(payload)
}
