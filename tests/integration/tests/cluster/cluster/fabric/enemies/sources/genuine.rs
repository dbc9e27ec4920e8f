//! Lists who may send by the ways of the table, and what is documented as not protected: each packet arrives.

use std::net::IpAddr;

use anyhow::Result;

use super::{
    packet::{Ends, PORT, Packet, Shape},
    row::{Fate, Row},
    scene::{NODE_PORT, Scene, TAKEN, host},
};

/// The name of a sender that does not pretend.
const OWN: &str = "itself";

/// The rows.
pub(super) fn rows(scene: &Scene) -> Result<Vec<Row<'_>>> {
    let mut rows = of_pods(scene);
    rows.extend(of_nodes(scene)?);
    rows.extend(of_the_host(scene));
    Ok(rows)
}

fn of_pods(scene: &Scene) -> Vec<Row<'_>> {
    let row = |(team, v4), way, means| Row {
        who: "pod",
        place: "node1",
        name: OWN,
        way,
        packet: Packet::Plain(Ends(scene.pod(team, 1, v4), scene.pod(team, 2, v4)), PORT),
        means,
        expected: Fate::received_by(&scene.named(team, 2)),
    };
    vec![
        row(("plain", true), "own interface", scene.by_pod(Shape::Whole)),
        row(("plain", false), "own interface", scene.by_pod(Shape::Whole)),
        row(
            ("plain", true),
            "own interface, fragments",
            scene.by_pod(Shape::Fragments),
        ),
        row(("red-team", true), "own interface", scene.by_tenant(Shape::Whole)),
        row(("red-team", false), "own interface", scene.by_tenant(Shape::Whole)),
    ]
}

/// Root on a node, and who has `CAP_NET_RAW` there, may send as each pod of that node.
fn of_nodes(scene: &Scene) -> Result<Vec<Row<'_>>> {
    const RAW: &str = "process with CAP_NET_RAW";
    const POD: &str = "pod of its node";
    let row = |(who, place, name), way, packet, to: (&str, usize), means| Row {
        who,
        place,
        name,
        way,
        packet,
        means,
        expected: Fate::received_by(&scene.named(to.0, to.1)),
    };
    let mut rows = Vec::new();
    for v4 in [true, false] {
        let [first, second] = [1, 2].map(|node| scene.pod("plain", node, v4));
        let plain = |from: IpAddr| Packet::Plain(Ends(from, first), PORT);
        let sender = (RAW, "node1", POD);
        let packet = scene.tunnelled(Ends(first, second), (scene.node(1, true), 2));
        let means = scene.by_uplink(1, 2, true, Shape::Whole);
        rows.push(row(
            sender,
            "tunnel, past the uplink's program",
            packet,
            ("plain", 2),
            means,
        ));
        let sender = ("process without capabilities", "node2", OWN);
        let own = scene.node(2, v4);
        let means = scene.by_process(2, own)?;
        rows.push(row(sender, "the node's stack", plain(own), ("plain", 1), means));
    }
    let blue = Packet::Tunnelled {
        number: scene.numbers[2],
        inner: Ends(scene.pod("blue-team", 2, true), scene.pod("blue-team", 1, true)),
        outer: Ends(scene.node(2, true), scene.node(1, true)),
    };
    let means = scene.by_uplink(TAKEN, 1, true, Shape::Whole);
    rows.push(row(
        ("root on a taken node", "node2", "pod of its node, of a tenant"),
        "tunnel",
        blue,
        ("blue-team", 1),
        means,
    ));
    Ok(rows)
}

/// It may be any host, and it sends with the address of a node where nothing between the nodes keeps it from that.
fn of_the_host(scene: &Scene) -> Vec<Row<'_>> {
    const POD: &str = "pod of the node whose address it has";
    let row = |name, way, packet, means| Row {
        who: "host on the wire",
        place: "between the nodes",
        name,
        way,
        packet,
        means,
        expected: Fate::received_by(&scene.named("plain", 1)),
    };
    let plain = |from: IpAddr| Packet::Plain(Ends(from, scene.pod("plain", 1, from.is_ipv4())), PORT);
    let tunnelled = |v4| {
        let inner = Ends(scene.pod("plain", 2, v4), scene.pod("plain", 1, v4));
        scene.tunnelled(inner, (scene.node(2, true), 1))
    };
    let by = |shape| scene.by_host(1, shape);
    let mut rows = vec![
        row(OWN, "plain", plain(host(true)), by(Shape::Whole)),
        row(OWN, "plain", plain(host(false)), by(Shape::Whole)),
        row(
            OWN,
            "plain, tag without a VLAN",
            plain(host(true)),
            by(Shape::Tagged(0)),
        ),
        row(OWN, "plain, fragments", plain(host(false)), by(Shape::Fragments)),
        row("another node", "plain", plain(scene.node(2, true)), by(Shape::Whole)),
        row(POD, "tunnel", tunnelled(true), by(Shape::Whole)),
        row(
            POD,
            "tunnel, tag without a VLAN",
            tunnelled(false),
            by(Shape::Tagged(0)),
        ),
        row(POD, "tunnel, fragments", tunnelled(true), by(Shape::Fragments)),
    ];
    let to_port = Packet::Plain(Ends(host(true), scene.node(1, true)), NODE_PORT);
    let mut port = row(OWN, "plain, to a port of node1", to_port, by(Shape::Whole));
    port.expected = Fate::received_by(&scene.with_port());
    rows.push(port);
    rows
}
