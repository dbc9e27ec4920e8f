//! Tests forged packets of the tunnel: from pods, from processes of a node, and from nodes that do not have the sender;
//! and forged senders past the tunnel. None is delivered, and each is counted with its reason.

mod sources;

use std::net::{IpAddr, SocketAddr, UdpSocket};

use anyhow::{Context as _, Result, ensure};
use kni_api::NodeEndpoint;
use kni_integration::{
    cluster::wire::{OVERLAY_PORT, Wire},
    require,
    traffic::set_option,
};
use kube::Api;
use serde_json::json;

use super::{
    super::scene::{address, identity},
    bed::{Bed, NODES, Setting},
    detours,
    forgery::{forged, nothing_forged_is_on, refused},
    past_the_tunnel,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_but_the_tunnel_sends_to_its_port() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let setting = Setting {
        specs: vec![("red", json!({ "egress": { "mode": "Masquerade" } }))],
        ..Setting::default()
    };
    let bed = Bed::start_with("fabric-enemies", &setting).await?;
    bed.connected().await?;
    let numbers = numbers(&bed).await?;
    pods_send_to_the_port(&bed, &numbers).await?;
    detours::through_a_service(&bed, &numbers).await?;
    detours::to_a_host_port(&bed, &numbers).await?;
    processes_send_to_the_port(&bed, &numbers).await?;
    headers_before_the_port(&bed, &numbers).await?;
    other_nodes_forge_senders(&bed, &numbers).await?;
    past_the_tunnel::frames(&bed).await?;
    // What is allowed still works.
    bed.matrix().assert_expected();
    Ok(())
}

/// The numbers of the default network, of red and of blue.
pub(super) async fn numbers(bed: &Bed) -> Result<[u32; 3]> {
    let numbers = bed.cluster.numbers().await?;
    let number = |network: &str| {
        let found = numbers.iter().find(|(_, of)| *of == network);
        found.map(|(number, _)| *number).context("a number")
    };
    Ok([number("default")?, number("red")?, number("blue")?])
}

/// From a pod of the default network, and from one of a tenant that is masqueraded.
async fn pods_send_to_the_port(bed: &Bed, numbers: &[u32; 3]) -> Result<()> {
    let wire = Wire::open(&bed.cluster)?;
    let member = &bed.cluster.nodes[0];
    let victim = bed.pod("blue-team", 2);
    for sender in ["plain", "red-team"].map(|team| bed.pod(team, 1)) {
        for v4 in [true, false] {
            let there: IpAddr = bed.cluster.nodes[1].node.addresses()[usize::from(!v4)].parse()?;
            // As if from blue's pod on node 1, the owner of whose address the sender's node is.
            let inner = forged(numbers[2], address(bed.pod("blue-team", 1), v4), address(victim, v4));
            let socket = sender
                .inside
                .enter(|| UdpSocket::bind(SocketAddr::new(address(sender, v4), 0)))??;
            let what = format!("a socket of {} to {there}", identity(sender));
            refused((bed, &what), (member, "from_pod", "overlay_port"), |_number| {
                socket.send_to(&inner, (there, OVERLAY_PORT))?;
                Ok(())
            })
            .await?;
            detours::in_fragments(bed, sender, (there, &inner)).await?;
        }
    }
    nothing_forged_is_on(&wire)
}

/// A process of the node has the node's address, from which others accept the pods of the node.
async fn processes_send_to_the_port(bed: &Bed, numbers: &[u32; 3]) -> Result<()> {
    let wire = Wire::open(&bed.cluster)?;
    let member = &bed.cluster.nodes[0];
    for v4 in [true, false] {
        let family = usize::from(!v4);
        let (own, there): (IpAddr, IpAddr) = (
            member.node.addresses()[family].parse()?,
            bed.cluster.nodes[1].node.addresses()[family].parse()?,
        );
        let inner = forged(
            numbers[2],
            address(bed.pod("blue-team", 1), v4),
            address(bed.pod("blue-team", 2), v4),
        );
        let socket = member.node.enter(|| UdpSocket::bind(SocketAddr::new(own, 0)))??;
        let what = format!("a process of the node to {there}");
        refused((bed, &what), (member, "to_uplink", "overlay_port"), |_number| {
            socket.send_to(&inner, (there, OVERLAY_PORT))?;
            Ok(())
        })
        .await?;
        // To the node's own tunnel: it is not the node of that pod.
        let inner = forged(
            numbers[2],
            address(bed.pod("blue-team", 2), v4),
            address(bed.pod("blue-team", 1), v4),
        );
        let what = format!("a process of the node to its own tunnel at {own}");
        refused((bed, &what), (member, "from_overlay", "foreign_node"), |_number| {
            socket.send_to(&inner, (own, OVERLAY_PORT))?;
            Ok(())
        })
        .await?;
    }
    nothing_forged_is_on(&wire)
}

/// Lets the socket put more headers between the addresses and the port than the parser of packets takes, as any process
/// may. Returns for what reason a pod's packets are dropped then.
fn hide_port(socket: &UdpSocket, to: IpAddr) -> Result<&'static str> {
    match to {
        IpAddr::V4(_) => {
            set_option(socket, (libc::IPPROTO_IP, libc::IP_OPTIONS), &[1; 12])?;
            Ok("extension_headers")
        }
        IpAddr::V6(to) => {
            // `struct ipv6_sr_hdr`: four units more, segment routing, one segment left, the last segment's number. The
            // kernel writes the destination to the first of the segments.
            let header = [[0, 4, 4, 1, 1, 0, 0, 0].as_slice(), &[0; 16], &to.octets()].concat();
            set_option(socket, (libc::IPPROTO_IPV6, libc::IPV6_RTHDR), &header)?;
            Ok("source_route")
        }
    }
}

async fn headers_before_the_port(bed: &Bed, numbers: &[u32; 3]) -> Result<()> {
    let wire = Wire::open(&bed.cluster)?;
    let (sender, member) = (bed.pod("plain", 1), &bed.cluster.nodes[0]);
    for v4 in [true, false] {
        let family = usize::from(!v4);
        let (own, there): (IpAddr, IpAddr) = (
            member.node.addresses()[family].parse()?,
            bed.cluster.nodes[1].node.addresses()[family].parse()?,
        );
        let (victim, source) = (bed.pod("blue-team", 2), bed.pod("blue-team", 1));
        let inner = forged(numbers[2], address(source, v4), address(victim, v4));
        let process = member.node.enter(|| UdpSocket::bind(SocketAddr::new(own, 0)))??;
        let pod = sender
            .inside
            .enter(|| UdpSocket::bind(SocketAddr::new(address(sender, v4), 0)))??;
        hide_port(&process, there)?;
        let reason = hide_port(&pod, there)?;
        for (who, socket, program, reason) in [
            ("a process of the node", process, "to_uplink", "overlay_port"),
            ("a pod", pod, "from_pod", reason),
        ] {
            let what = format!("{who} behind other headers to {there}");
            refused((bed, &what), (member, program, reason), |_number| {
                socket.send_to(&inner, (there, OVERLAY_PORT))?;
                Ok(())
            })
            .await?;
        }
    }
    nothing_forged_is_on(&wire)
}

/// A node that is not the sender's: its agent is stopped, and root there sends what it likes.
async fn other_nodes_forge_senders(bed: &Bed, numbers: &[u32; 3]) -> Result<()> {
    let endpoints: Api<NodeEndpoint> = Api::all(bed.cluster.client.clone());
    ensure!(
        endpoints.get("node3").await?.confirmed().count() == 2,
        "node3 is a node of the cluster"
    );
    let member = &bed.cluster.nodes[0];
    for v4 in [true, false] {
        let family = usize::from(!v4);
        let to: IpAddr = member.node.addresses()[family].parse()?;
        // The fabric itself: a host without an agent, at an address that no node has, and at that of no pod.
        let outside = bed
            .cluster
            .fabric
            .inside()
            .enter(|| UdpSocket::bind(if v4 { "198.51.100.1:0" } else { "[2001:db8:100::1]:0" }))??;
        let (blue1, blue2) = (
            address(bed.pod("blue-team", 1), v4),
            address(bed.pod("blue-team", 2), v4),
        );
        let unowned = unowned(bed, v4)?;
        let cases = [
            (
                "a host that does not have the sender",
                forged(numbers[2], blue2, blue1),
                "foreign_node",
            ),
            (
                "a sender that no node has",
                forged(numbers[2], unowned, blue1),
                "owner_unknown",
            ),
            (
                "the receiver as sender",
                forged(numbers[2], blue1, blue1),
                "owner_unknown",
            ),
            (
                "a number that no network has",
                forged(77, blue2, blue1),
                "unknown_network",
            ),
        ];
        for (what, datagram, reason) in cases {
            let what = format!("{what}, {}", identity(bed.pod("blue-team", 1)));
            refused((bed, &what), (member, "from_overlay", reason), |_number| {
                outside.send_to(&datagram, (to, OVERLAY_PORT))?;
                Ok(())
            })
            .await?;
        }
    }
    Ok(())
}

/// An address of the blue network in a block that no node has: there are four, and three nodes.
fn unowned(bed: &Bed, v4: bool) -> Result<IpAddr> {
    let pods: Vec<u8> = (1..=NODES)
        .map(|node| match address(bed.pod("blue-team", node), v4) {
            IpAddr::V4(v4) => v4.octets()[3] / 64,
            IpAddr::V6(v6) => v6.octets()[15] / 64,
        })
        .collect();
    let free = (0..4_u8).find(|block| !pods.contains(block)).context("a free block")?;
    let last = free * 64 + 62;
    let text = if v4 {
        format!("10.10.0.{last}")
    } else {
        format!("fd10::{last:x}")
    };
    Ok(text.parse()?)
}
