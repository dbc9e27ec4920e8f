//! Bounds the cost of packets between nodes: through the tunnel and without, to the other node and from it.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use kni_common::IFINDEX_BASE;
use kni_dataplane::{FabricRows, Hop, NetworkFabric, TunnelEnds, Way};
use kni_integration::{
    frames::{Ip, Link, Payload, TcpFlags},
    interpreter::{Arrival, Counts, Interpreter},
    programs::{Programs, object},
    require,
};
use kni_model::NetworkId;

use super::{Bound, ENDPOINTS, PORTS, V4, V6, bound, check, host_mac, mac, publish};

/// As the bounds within the node. *Changing*: the packet changes the state of its flow.
const BOUNDS: [Bound; 20] = [
    bound("overlay, IPv4, sent: SYN", 1251, 230),
    bound("overlay, IPv4, received: SYN-ACK, changing", 443, 74),
    bound("overlay, IPv4, sent: ACK, changing", 464, 46),
    bound("overlay, IPv4, sent: data", 350, 43),
    bound("overlay, IPv4, received: data", 356, 68),
    bound("overlay, IPv6, sent: SYN", 1366, 279),
    bound("overlay, IPv6, received: SYN-ACK, changing", 450, 81),
    bound("overlay, IPv6, sent: ACK, changing", 477, 50),
    bound("overlay, IPv6, sent: data", 363, 47),
    bound("overlay, IPv6, received: data", 363, 75),
    bound("native, IPv4, sent: SYN", 1299, 221),
    bound("native, IPv4, received: SYN-ACK, changing", 603, 125),
    bound("native, IPv4, sent: ACK, changing", 498, 41),
    bound("native, IPv4, sent: data", 384, 38),
    bound("native, IPv4, received: data", 517, 119),
    bound("native, IPv6, sent: SYN", 1405, 269),
    bound("native, IPv6, received: SYN-ACK, changing", 718, 172),
    bound("native, IPv6, sent: ACK, changing", 503, 45),
    bound("native, IPv6, sent: data", 389, 42),
    bound("native, IPv6, received: data", 632, 166),
];

/// The network of the endpoints, and its number in the cluster.
const NETWORK: u32 = 7;
const NUMBER: u32 = 8_000_000;
/// The pod of the other node.
const REMOTE4: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 2);
const REMOTE6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 1, 0, 0, 0, 2);
/// The other node, and this one.
const UNDERLAY4: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 2, 2), Ipv4Addr::new(192, 0, 2, 1)];
const UNDERLAY6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2);
/// The interface that leads to the other node.
const INTERFACE: u32 = 50;

/// Leads to the pod of the other node. Without a tunnel, the next hop has the family of the packets.
fn lead(programs: &Programs, overlay: bool) -> Result<()> {
    let way = |underlay| Way { underlay, overlay };
    let next_hop = if overlay { UNDERLAY4[0].into() } else { UNDERLAY6.into() };
    let blocks: BTreeMap<IpNet, Way> = [
        ("10.0.1.0/24".parse()?, way(UNDERLAY4[0].into())),
        ("fd00:0:0:1::/64".parse()?, way(next_hop)),
    ]
    .into();
    let hop = Hop {
        ifindex: Some(INTERFACE),
        mtu: 1450,
        stamp: 1,
    };
    let network = NetworkFabric {
        number: overlay.then_some(NUMBER),
        exposed: !overlay,
        blocks: blocks.clone(),
        ..NetworkFabric::default()
    };
    let tunnel = TunnelEnds {
        ipv4: Some(UNDERLAY4[1]),
        ipv6: None,
        port: 4789,
        host_network: None,
    };
    programs.dataplane().set_fabric(&FabricRows {
        tunnel: overlay.then_some(tunnel),
        ways: blocks.values().map(|way| (*way, hop)).collect(),
        networks: [(NetworkId::try_from(NETWORK)?, network)].into(),
        egress: BTreeMap::new(),
    })?;
    Ok(())
}

/// Exchanges packets of one connection in the interpreter, and returns their costs by what they are.
fn connection(interpreter: &mut Interpreter, overlay: bool, v4: bool) -> Result<Vec<(String, Counts)>> {
    const STEPS: [(bool, &str, u8, usize); 5] = [
        (true, "SYN", TcpFlags::SYN.0, 0),
        (false, "SYN-ACK, changing", TcpFlags::SYN_ACK.0, 0),
        (true, "ACK, changing", TcpFlags::ACK.0, 0),
        (true, "data", TcpFlags::ACK.0, 100),
        (false, "data", TcpFlags::ACK.0, 100),
    ];
    let ends = if v4 {
        [IpAddr::V4(V4[0]), REMOTE4.into()]
    } else {
        [IpAddr::V6(V6[0]), REMOTE6.into()]
    };
    let mut measured = Vec::new();
    for (sent, step, flags, length) in STEPS {
        let (from, to) = if sent { (0, 1) } else { (1, 0) };
        let packet = Ip::new(ends[from], ends[to]).packet(&Payload::Tcp {
            source_port: PORTS[from],
            destination_port: PORTS[to],
            flags: TcpFlags(flags),
            sequence: 1,
            data: vec![b'x'; length],
        });
        let frame = Link::new(mac(0), host_mac(0)).frame(&packet);
        let (program, arrival) = match (sent, overlay) {
            (true, _) => ("from_pod", IFINDEX_BASE + ENDPOINTS[0]),
            (false, true) => ("from_overlay", INTERFACE),
            (false, false) => ("from_uplink", INTERFACE),
        };
        let arrival = Arrival {
            ifindex: arrival,
            tunnel: (!sent && overlay).then_some((NUMBER, UNDERLAY4[0])),
            ..Arrival::default()
        };
        let executed = interpreter.run(program, arrival, &frame)?;
        let way = if overlay { "overlay" } else { "native" };
        let family = if v4 { "IPv4" } else { "IPv6" };
        let direction = if sent { "sent" } else { "received" };
        let case = format!("{way}, {family}, {direction}: {step}");
        ensure!(executed.action == 7, "{case}: not redirected: {}", executed.action);
        measured.push((case, executed.counts));
    }
    Ok(measured)
}

#[test]
fn a_packet_between_nodes_costs_no_more_instructions_than_its_bound() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut measured = Vec::new();
    for overlay in [true, false] {
        let name = if overlay { "between1" } else { "between2" };
        let here = Programs::inside(name, 1024, |kernel| {
            publish(&kernel)?;
            lead(&kernel, overlay)?;
            let mut interpreter = Interpreter::new(object()?)?;
            interpreter.copy_pinned(&kernel.dataplane().pin_path())?;
            let families = [true, false].map(|v4| connection(&mut interpreter, overlay, v4));
            families.into_iter().collect::<Result<Vec<_>>>()
        });
        measured.extend(here.context(name)?.concat());
    }
    check(&measured, &BOUNDS)
}
