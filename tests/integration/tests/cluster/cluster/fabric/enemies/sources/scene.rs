//! Provides the senders of the rows: pods, processes with and without capabilities, and a host on the wire.

use std::{
    fs,
    net::{IpAddr, SocketAddr, UdpSocket},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Pod,
    cluster::{Member, objects, patience},
    frames::{Link, Mac, PacketSocket},
    traffic::set_option,
    wait,
};
use kni_proto::kni::{AttachInterfaceRequest, PortMapping, Protocol};
use serde_json::json;
use socket2::{Domain, Socket, Type};

use super::{
    super::{
        super::{
            super::scene::{address, identity},
            bed::{Bed, NODES, Raw, Setting},
            past_the_tunnel::{no_source_is_checked, unowned, uplink},
        },
        numbers,
    },
    packet::{Ends, PORT, Packet, Shape, content},
    row::{Means, Out},
    watch::Watch,
};

/// The host on the wire.
const HOST: [&str; 2] = ["198.51.100.1", "2001:db8:100::1"];
const HOST_MAC: Mac = [2, 0, 0, 0, 7, 7];
/// The port of node1 that leads to a pod.
pub(super) const NODE_PORT: u16 = 5555;
/// The node that was taken over.
pub(super) const TAKEN: usize = 2;

/// Three nodes that forward, a pod of each team on every node, and what the senders send by.
pub(super) struct Scene {
    pub(super) bed: Bed,
    pub(super) watch: Watch,
    /// The numbers of the default network, of red and of blue.
    pub(super) numbers: [u32; 3],
    /// Another pod of the default network on node1 and on node2, and the one that the port of node1 leads to.
    more: [Pod; 3],
    /// An address of the default network in no block of a node, IPv4 first.
    unowned: [IpAddr; 2],
    macs: Vec<Mac>,
    /// The nodes' ports of the bridge between them.
    wires: Vec<PacketSocket>,
    /// The nodes' uplinks, through the programs there and past them.
    uplinks: Vec<[PacketSocket; 2]>,
    /// The tunnel device of the taken node.
    tunnel: PacketSocket,
    /// The first pods of the default network and of red.
    raw: [Raw; 2],
    /// They read nothing: no pod answers.
    _sinks: Vec<UdpSocket>,
}

impl Scene {
    pub(super) async fn start(name: &str) -> Result<Self> {
        let setting = Setting {
            specs: vec![("red", json!({ "egress": { "mode": "Masquerade" } }))],
            ..Setting::default()
        };
        let bed = Bed::start_with(name, &setting).await?;
        bed.connected().await?;
        for member in &bed.cluster.nodes {
            forwards(member)?;
            no_source_is_checked(member)?;
        }
        let others = ["1", "2"].map(|node| objects::pod("plain", &format!("other{node}"), &format!("node{node}")));
        let others = <[Pod; 2]>::try_from(bed.cluster.run(&others).await?);
        let [first, second] = others.ok().context("two pods")?;
        let more = [first, second, with_port(&bed.cluster.nodes[0]).await?];
        let pods = || bed.pods.iter().chain(&more);
        let sinks = pods().map(|pod| Ok(pod.inside.enter(|| UdpSocket::bind(("::", PORT)))??));
        let sinks = sinks.collect::<Result<_>>()?;
        let watch = Watch::open(pods())?;
        let nodes = &bed.cluster.nodes;
        let wire = |node| PacketSocket::open(bed.cluster.fabric.inside(), &format!("port{}", node + 10));
        let uplinks = nodes.iter().map(|member| {
            let through = PacketSocket::open(&member.node, "uplink0")?;
            Ok([through, PacketSocket::open_past_queues(&member.node, "uplink0")?])
        });
        let scene = Self {
            numbers: numbers(&bed).await?,
            unowned: [unowned(&bed, true).await?, unowned(&bed, false).await?],
            macs: nodes.iter().map(uplink).collect::<Result<_>>()?,
            wires: (1..=NODES).map(wire).collect::<Result<_>>()?,
            uplinks: uplinks.collect::<Result<_>>()?,
            tunnel: PacketSocket::open(&nodes[TAKEN - 1].node, "kni-overlay")?,
            raw: [Raw::of(bed.pod("plain", 1))?, Raw::of(bed.pod("red-team", 1))?],
            more,
            watch,
            bed,
            _sinks: sinks,
        };
        scene.port_leads_to_the_pod().await?;
        Ok(scene)
    }

    /// The number of a row that is in no table: of the packets that wait for the port of node1.
    const NO_ROW: usize = 0;

    async fn port_leads_to_the_pod(&self) -> Result<()> {
        let (to, out) = (self.node(1, true), self.wire(1));
        let packet = Packet::Plain(Ends(host(true), to), NODE_PORT);
        let expected = self.with_port();
        wait::until("the port of node1 leads to the pod", patience(), async || {
            let content = content(Self::NO_ROW, 0);
            for frame in packet.frames(&out.link, Shape::Whole, 0, &content) {
                out.socket.send(&frame)?;
            }
            Ok(self.watch.received(Self::NO_ROW)?.contains_key(&expected))
        })
        .await
        .map(drop)
    }

    /// The address of the team's pod on a node.
    pub(super) fn pod(&self, team: &str, node: usize, v4: bool) -> IpAddr {
        address(self.bed.pod(team, node), v4)
    }

    /// The name of the team's pod on a node.
    pub(super) fn named(&self, team: &str, node: usize) -> String {
        identity(self.bed.pod(team, node))
    }

    /// The address of the other pod of the default network on node1 or node2.
    pub(super) fn other(&self, node: usize, v4: bool) -> IpAddr {
        address(&self.more[node - 1], v4)
    }

    /// The name of the pod that the port of node1 leads to.
    pub(super) fn with_port(&self) -> String {
        identity(&self.more[2])
    }

    pub(super) fn unowned(&self, v4: bool) -> IpAddr {
        self.unowned[usize::from(!v4)]
    }

    pub(super) fn node(&self, node: usize, v4: bool) -> IpAddr {
        let text = self.bed.cluster.nodes[node - 1].node.addresses()[usize::from(!v4)];
        text.parse().expect("an address")
    }

    /// What is in a tunnel of the default network between the nodes, which is of IPv4.
    pub(super) fn tunnelled(&self, inner: Ends, outer: (IpAddr, usize)) -> Packet {
        Packet::Tunnelled {
            number: self.numbers[0],
            inner,
            outer: Ends(outer.0, self.node(outer.1, outer.0.is_ipv4())),
        }
    }

    /// What the first pod of the default network sends.
    pub(super) fn by_pod(&self, shape: Shape) -> Means<'_> {
        Self::by_raw(&self.raw[0], shape)
    }

    /// What the first pod of red sends.
    pub(super) fn by_tenant(&self, shape: Shape) -> Means<'_> {
        Self::by_raw(&self.raw[1], shape)
    }

    fn by_raw(raw: &Raw, shape: Shape) -> Means<'_> {
        let (socket, link) = (&raw.socket, raw.link.clone());
        Means::Frames(Out { socket, link }, shape)
    }

    fn wire(&self, node: usize) -> Out<'_> {
        Out {
            socket: &self.wires[node - 1],
            link: Link::new(HOST_MAC, self.macs[node - 1]),
        }
    }

    /// What a host on the wire sends to a node as the next hop.
    pub(super) fn by_host(&self, node: usize, shape: Shape) -> Means<'_> {
        Means::Frames(self.wire(node), shape)
    }

    /// What a packet socket at the uplink of a node sends to another one as the next hop: through the program there, or
    /// past it.
    pub(super) fn by_uplink(&self, from: usize, to: usize, past: bool, shape: Shape) -> Means<'_> {
        let out = Out {
            socket: &self.uplinks[from - 1][usize::from(past)],
            link: Link::new(self.macs[from - 1], self.macs[to - 1]),
        };
        Means::Frames(out, shape)
    }

    /// What a packet socket at the tunnel device of the taken node sends.
    pub(super) fn by_tunnel(&self) -> Means<'_> {
        let out = Out {
            socket: &self.tunnel,
            link: Link::new(HOST_MAC, HOST_MAC),
        };
        Means::Frames(out, Shape::Whole)
    }

    /// A socket of a process of a node without any capability, at an address that need not be the node's.
    pub(super) fn by_process(&self, node: usize, at: IpAddr) -> Result<Means<'static>> {
        let member = &self.bed.cluster.nodes[node - 1];
        member.node.enter(|| without_capabilities(at))?.map(Means::Socket)
    }
}

/// The address of the host on the wire.
pub(super) fn host(v4: bool) -> IpAddr {
    HOST[usize::from(!v4)].parse().expect("an address")
}

/// The node forwards packets of both families.
fn forwards(member: &Member) -> Result<()> {
    for file in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        let path = format!("/proc/sys/net/{file}");
        let set = member.node.enter(|| fs::read_to_string(&path))?.context(path)?;
        ensure!(set.trim() == "1", "{file} of {} is {set}", member.name);
    }
    Ok(())
}

/// A pod of the default network on the node, to which [`NODE_PORT`] leads.
async fn with_port(member: &Member) -> Result<Pod> {
    let edit = |request: &mut AttachInterfaceRequest| {
        request.port_mappings = vec![PortMapping {
            protocol: Protocol::Udp.into(),
            container_port: PORT.into(),
            host_port: NODE_PORT.into(),
            host_ip: String::new(),
        }];
    };
    let run = member.kubelet.kni().run_pod_with("plain", "with-port", &[], edit).await;
    run.context("the pod with a port")
}

/// A UDP socket that this thread opens after it has given up all capabilities; other threads keep theirs.
fn without_capabilities(at: IpAddr) -> Result<UdpSocket> {
    /// `_LINUX_CAPABILITY_VERSION_3`.
    const VERSION: u32 = 0x2008_0522;
    let (this_thread, none) = ([VERSION, 0], [0_u32; 6]);
    // SAFETY: the structures that the system call expects, of its version, which live through it.
    let set = unsafe { libc::syscall(libc::SYS_capset, this_thread.as_ptr(), none.as_ptr()) };
    ensure!(set == 0, "capset: {}", std::io::Error::last_os_error());
    let at = SocketAddr::new(at, 0);
    let socket = Socket::new(Domain::for_address(at), Type::DGRAM, None)?;
    if at.is_ipv6() {
        set_option(&socket, (libc::IPPROTO_IPV6, libc::IPV6_FREEBIND), &1_i32.to_ne_bytes())?;
    }
    socket.bind(&at.into())?;
    let raw = Socket::new(Domain::PACKET, Type::RAW, None);
    ensure!(raw.is_err(), "the thread has CAP_NET_RAW");
    Ok(socket.into())
}
