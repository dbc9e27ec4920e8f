//! Lists who sends in the name of another one: what drops each packet, and at which node.

use std::net::IpAddr;

use anyhow::Result;

use super::{
    packet::{Ends, PORT, Packet, Shape},
    row::{Fate, Row},
    scene::{NODE_PORT, Scene, TAKEN, host},
};

const THIRD: &str = "pod of a third node";
const SENDERS: &str = "pod of the sender's node";
const SECOND: &str = "pod of another node";
const OTHER: &str = "other pod of the receiver's node";
const RECEIVER: &str = "the receiver";
const UNOWNED: &str = "address that no pod has";
const NODES: &str = "the receiver's node";
const OWN_INTERFACE: &str = "own interface";

/// The node, the program and the reason of a drop.
type Drop = (usize, &'static str, &'static str);

/// No network has it.
const UNKNOWN_NUMBER: u32 = 77;

/// The rows.
pub(super) fn rows(scene: &Scene) -> Result<Vec<Row<'_>>> {
    let mut rows = by_a_pod(scene);
    rows.extend(by_a_tenant(scene));
    rows.extend(by_a_process(scene)?);
    rows.extend(by_a_raw_process(scene));
    rows.extend(by_the_host_in_a_tunnel(scene));
    rows.extend(by_the_host_plainly(scene));
    rows.extend(by_the_host_through_another_node(scene));
    rows.extend(by_a_taken_node(scene));
    Ok(rows)
}

/// An address with any meaning but that of a host.
fn special(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// From the first pod of the default network, by a packet socket, to the one of node2.
fn by_a_pod(scene: &Scene) -> Vec<Row<'_>> {
    const SPOOFED: Drop = (1, "from_pod", "source_address");
    let row = |name, from: IpAddr, (way, shape), drops: &[Drop]| Row {
        who: "pod",
        place: "node1",
        name,
        way,
        packet: Packet::Plain(Ends(from, scene.pod("plain", 2, from.is_ipv4())), PORT),
        means: scene.by_pod(shape),
        expected: Fate::dropped(drops),
    };
    let whole = (OWN_INTERFACE, Shape::Whole);
    let fragments = ("own interface, fragments", Shape::Fragments);
    let tagged = ("own interface, VLAN", Shape::Tagged(7));
    let third = |v4| scene.pod("plain", 3, v4);
    let mut rows = vec![
        row(THIRD, third(true), whole, &[SPOOFED]),
        row(THIRD, third(true), fragments, &[SPOOFED, SPOOFED]),
        row(THIRD, third(false), tagged, &[(1, "from_pod", "vlan_tagged")]),
        row(RECEIVER, scene.pod("plain", 2, false), whole, &[SPOOFED]),
        row("the sender's node", scene.node(1, true), whole, &[SPOOFED]),
        row("loopback", special("127.0.0.1"), whole, &[SPOOFED]),
        row("link-local", special("fe80::1"), whole, &[SPOOFED]),
    ];
    let inner = Ends(third(false), scene.pod("plain", 2, false));
    let mut tunnel = row(
        THIRD,
        third(false),
        ("tunnel", Shape::Whole),
        &[(1, "from_pod", "overlay_port")],
    );
    tunnel.packet = scene.tunnelled(inner, (scene.pod("plain", 1, false), 2));
    rows.push(tunnel);
    rows
}

/// From the first pod of red.
fn by_a_tenant(scene: &Scene) -> Vec<Row<'_>> {
    const SPOOFED: Drop = (1, "from_pod", "source_address");
    let row = |name, way, packet, drop: Drop| Row {
        who: "pod of a tenant",
        place: "node1",
        name,
        way,
        packet,
        means: scene.by_tenant(Shape::Whole),
        expected: Fate::dropped(&[drop]),
    };
    let of_network = Ends(scene.pod("red-team", 3, true), scene.pod("red-team", 2, true));
    let of_another = Ends(scene.pod("plain", 1, false), scene.pod("plain", 2, false));
    let in_tunnel = Packet::Tunnelled {
        number: scene.numbers[2],
        inner: Ends(scene.pod("blue-team", 1, true), scene.pod("blue-team", 2, true)),
        outer: Ends(scene.pod("red-team", 1, true), scene.node(2, true)),
    };
    vec![
        row(THIRD, OWN_INTERFACE, Packet::Plain(of_network, PORT), SPOOFED),
        row(
            "pod of another network",
            OWN_INTERFACE,
            Packet::Plain(of_another, PORT),
            SPOOFED,
        ),
        row(
            "pod of another tenant",
            "tunnel",
            in_tunnel,
            (1, "from_pod", "overlay_port"),
        ),
    ]
}

/// From a socket of node1 that no capability helped to open. Only IPv6 lets it have an address that is not the node's.
fn by_a_process(scene: &Scene) -> Result<Vec<Row<'_>>> {
    let own = scene.node(1, true);
    let to_second = Ends(scene.pod("plain", 1, true), scene.pod("plain", 2, true));
    let to_first = Ends(to_second.1, to_second.0);
    let row = |name, way, packet, drop| of_a_process(scene, (name, way), packet, own, drop);
    let mut rows = vec![
        row(
            SENDERS,
            "tunnel",
            scene.tunnelled(to_second, (own, 2)),
            (1, "to_uplink", "overlay_port"),
        )?,
        row(
            SECOND,
            "tunnel to its own node",
            scene.tunnelled(to_first, (own, 1)),
            (1, "from_overlay", "foreign_node"),
        )?,
    ];
    let ways = [
        ("the node's stack", "to_overlay", scene.pod("plain", 2, false)),
        (
            "the node's stack, to a pod of the node",
            "to_pod",
            scene.other(1, false),
        ),
    ];
    for (way, program, to) in ways {
        for (name, from, reason) in [
            (SENDERS, scene.pod("plain", 1, false), "source_address"),
            (THIRD, scene.pod("plain", 3, false), "foreign_node"),
            (UNOWNED, scene.unowned(false), "owner_unknown"),
        ] {
            let packet = Packet::Plain(Ends(from, to), PORT);
            rows.push(of_a_process(scene, (name, way), packet, from, (1, program, reason))?);
        }
    }
    Ok(rows)
}

/// A row of a socket at the address.
fn of_a_process<'a>(
    scene: &'a Scene,
    (name, way): (&'static str, &'static str),
    packet: Packet,
    at: IpAddr,
    drop: Drop,
) -> Result<Row<'a>> {
    Ok(Row {
        who: "process without capabilities",
        place: "node1",
        name,
        way,
        packet,
        means: scene.by_process(1, at)?,
        expected: Fate::dropped(&[drop]),
    })
}

/// From a packet socket at the uplink of node1.
fn by_a_raw_process(scene: &Scene) -> Vec<Row<'_>> {
    let row = |name, way, packet, (past, shape), drop: Drop| Row {
        who: "process with CAP_NET_RAW",
        place: "node1",
        name,
        way,
        packet,
        means: scene.by_uplink(1, 2, past, shape),
        expected: Fate::dropped(&[drop]),
    };
    let to_second = |from: IpAddr| {
        let ends = Ends(from, scene.pod("plain", 2, from.is_ipv4()));
        scene.tunnelled(ends, (scene.node(1, true), 2))
    };
    let first = scene.pod("plain", 1, false);
    let over_v6 = scene.tunnelled(Ends(first, scene.pod("plain", 2, false)), (scene.node(1, false), 2));
    let foreign = (2, "from_overlay", "foreign_node");
    let unknown = (2, "from_overlay", "owner_unknown");
    let (tagged, past) = ((false, Shape::Tagged(0)), (true, Shape::Whole));
    let way = "tunnel, past the uplink's program";
    vec![
        row(
            SENDERS,
            "tunnel, tag without a VLAN",
            over_v6,
            tagged,
            (1, "to_uplink", "overlay_port"),
        ),
        row(THIRD, way, to_second(scene.pod("plain", 3, true)), past, foreign),
        row(OTHER, way, to_second(scene.other(2, false)), past, unknown),
    ]
}

/// From a host on the wire to the end of the tunnel at node1.
fn by_the_host_in_a_tunnel(scene: &Scene) -> Vec<Row<'_>> {
    let row = |name, from: IpAddr, number, (way, shape), reason| Row {
        who: "host on the wire",
        place: "between the nodes",
        name,
        way,
        packet: Packet::Tunnelled {
            number,
            inner: Ends(from, scene.pod("plain", 1, from.is_ipv4())),
            outer: Ends(host(true), scene.node(1, true)),
        },
        means: scene.by_host(1, shape),
        expected: Fate::dropped(&[(1, "from_overlay", reason)]),
    };
    let [number, of_red, _] = scene.numbers;
    let whole = ("tunnel", Shape::Whole);
    let tagged = ("tunnel, tag without a VLAN", Shape::Tagged(0));
    let fragments = ("tunnel, fragments", Shape::Fragments);
    let [of_another, of_none] = ["number of another network", "number of no network"].map(|way| (way, Shape::Whole));
    let second = |v4| scene.pod("plain", 2, v4);
    vec![
        row(SECOND, second(true), number, whole, "foreign_node"),
        row(SECOND, second(true), number, fragments, "foreign_node"),
        row(SECOND, second(false), of_red, of_another, "no_destination"),
        row(SECOND, second(true), UNKNOWN_NUMBER, of_none, "unknown_network"),
        row(THIRD, scene.pod("plain", 3, false), number, tagged, "foreign_node"),
        row(RECEIVER, scene.pod("plain", 1, false), number, whole, "owner_unknown"),
        row(NODES, scene.node(1, true), number, whole, "owner_unknown"),
        row("multicast", special("ff02::1"), number, whole, "owner_unknown"),
    ]
}

/// From a host on the wire, to node1 as the next hop to a pod there.
fn by_the_host_plainly(scene: &Scene) -> Vec<Row<'_>> {
    const FOREIGN: Drop = (1, "to_pod", "foreign_node");
    const WITHOUT_FIRST: Drop = (1, "to_pod", "fragment_without_first");
    let row = |name, from: IpAddr, (way, shape), drops: &[Drop]| Row {
        who: "host on the wire",
        place: "between the nodes",
        name,
        way,
        packet: Packet::Plain(Ends(from, scene.pod("plain", 1, from.is_ipv4())), PORT),
        means: scene.by_host(1, shape),
        expected: Fate::dropped(drops),
    };
    let whole = ("plain", Shape::Whole);
    let tagged = ("plain, tag without a VLAN", Shape::Tagged(0));
    let fragments = ("plain, fragments", Shape::Fragments);
    let second = |v4| scene.pod("plain", 2, v4);
    let mut rows = vec![
        row(THIRD, scene.pod("plain", 3, true), whole, &[FOREIGN]),
        row(SECOND, second(true), tagged, &[FOREIGN]),
        row(SECOND, second(false), fragments, &[FOREIGN, WITHOUT_FIRST]),
        row(OTHER, scene.other(1, false), whole, &[(1, "to_pod", "source_address")]),
        row(UNOWNED, scene.unowned(true), whole, &[(1, "to_pod", "owner_unknown")]),
    ];
    let drop = (1, "from_uplink", "foreign_node");
    let mut port = row(
        SECOND,
        second(true),
        ("plain, to a port of node1", Shape::Whole),
        &[drop],
    );
    port.packet = Packet::Plain(Ends(second(true), scene.node(1, true)), NODE_PORT);
    rows.push(port);
    rows
}

/// From a host on the wire, to node2 as the next hop to the pod of node1.
fn by_the_host_through_another_node(scene: &Scene) -> Vec<Row<'_>> {
    let row = |name, from: IpAddr, drop: Drop| Row {
        who: "host on the wire",
        place: "between the nodes",
        name,
        way: "through node2",
        packet: Packet::Plain(Ends(from, scene.pod("plain", 1, from.is_ipv4())), PORT),
        means: scene.by_host(2, Shape::Whole),
        expected: Fate::dropped(&[drop]),
    };
    let [second, third] = [(2, true), (3, false)].map(|(node, v4)| scene.pod("plain", node, v4));
    vec![
        row("pod of that node", second, (2, "to_overlay", "source_address")),
        row(THIRD, third, (2, "to_overlay", "foreign_node")),
        row(NODES, scene.node(1, false), (1, "from_overlay", "owner_unknown")),
    ]
}

/// From root on node2, to a pod of node1.
fn by_a_taken_node(scene: &Scene) -> Vec<Row<'_>> {
    let row = |name, way, packet, means, drop: Drop| Row {
        who: "root on a taken node",
        place: "node2",
        name,
        way,
        packet,
        means,
        expected: Fate::dropped(&[drop]),
    };
    let plain = |from: IpAddr| Packet::Plain(Ends(from, scene.pod("plain", 1, from.is_ipv4())), PORT);
    let [third, own] = [(3, true), (2, false)].map(|(node, v4)| scene.pod("plain", node, v4));
    let of_tenant = Packet::Tunnelled {
        number: scene.numbers[2],
        inner: Ends(scene.pod("blue-team", 3, true), scene.pod("blue-team", 1, true)),
        outer: Ends(scene.node(2, true), scene.node(1, true)),
    };
    let tunnelled = |from: IpAddr| {
        let inner = Ends(from, scene.pod("plain", 1, from.is_ipv4()));
        scene.tunnelled(inner, (scene.node(2, true), 1))
    };
    let device = "its tunnel device";
    let to = |node| scene.by_uplink(TAKEN, node, true, Shape::Whole);
    let foreign = (1, "from_overlay", "foreign_node");
    let unknown = (1, "from_overlay", "owner_unknown");
    vec![
        row(THIRD, "tunnel", tunnelled(third), to(1), foreign),
        row(UNOWNED, "tunnel", tunnelled(scene.unowned(false)), to(1), unknown),
        row(
            SENDERS,
            device,
            plain(own),
            scene.by_tunnel(),
            (2, "to_overlay", "source_address"),
        ),
        row("pod of a tenant on a third node", "tunnel", of_tenant, to(1), foreign),
        row(SENDERS, "plain", plain(own), to(1), (1, "to_pod", "foreign_node")),
        row(
            THIRD,
            "through node3",
            plain(third),
            to(3),
            (3, "to_overlay", "source_address"),
        ),
    ]
}
