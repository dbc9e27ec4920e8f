//! Tests forged packets of the tunnel that take another way to its port: in fragments, through a Service, to a host
//! port.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use kni_integration::{
    Pod,
    cluster::{
        objects, patience,
        wire::{OVERLAY_PORT, Wire},
    },
    frames::{Ip, Payload},
    traffic::{Servers, tcp_get},
    wait,
};
use kni_proto::kni::{PortMapping, Protocol};
use kube::Api;
use serde_json::json;

use super::{
    super::scene::{ANSWER, PORT, address, identity},
    bed::{Bed, Raw, network_of},
    forgery::{count, dropped, forged, nothing_forged_is_on, refused},
};

/// The port of the Services.
const FRONT: u16 = 53;

/// The first fragment of each datagram is refused, and the other one has none to follow, whichever comes first.
pub(super) async fn in_fragments(bed: &Bed, sender: &Pod, (there, inner): (IpAddr, &[u8])) -> Result<()> {
    const LATER: &str = "fragment_without_first";
    let member = &bed.cluster.nodes[0];
    let raw = Raw::of(sender)?;
    let payload = Payload::udp(5555, OVERLAY_PORT, inner);
    let before = dropped(member, "from_pod", LATER).await?;
    let what = format!("fragments of {} to {there}", identity(sender));
    refused((bed, &what), (member, "from_pod", "overlay_port"), |number| {
        let mut ip = Ip::new(address(sender, there.is_ipv4()), there);
        ip.id = u16::try_from(number % 60_000)?;
        let mut fragments = ip.fragments(&payload, 64);
        ensure!(fragments.len() == 2, "{} fragments", fragments.len());
        if number % 2 == 1 {
            fragments.reverse();
        }
        fragments.iter().try_for_each(|fragment| raw.send(fragment))
    })
    .await?;
    wait::until("the later fragments are refused", patience(), async || {
        let later = dropped(member, "from_pod", LATER).await? - before;
        ensure!(later == u64::from(count()), "{later} of {}", count());
        Ok(true)
    })
    .await
    .map(drop)
}

/// A tenant's own Service may name any address as its backend.
pub(super) async fn through_a_service(bed: &Bed, numbers: &[u32; 3]) -> Result<()> {
    let wire = Wire::open(&bed.cluster)?;
    for team in ["plain", "red-team"] {
        for v4 in [true, false] {
            let inner = forged(
                numbers[2],
                address(bed.pod("blue-team", 1), v4),
                address(bed.pod("blue-team", 2), v4),
            );
            through_a_service_of(bed, (team, v4), &inner).await?;
        }
    }
    nothing_forged_is_on(&wire)
}

async fn through_a_service_of(bed: &Bed, (team, v4): (&str, bool), inner: &[u8]) -> Result<()> {
    let (sender, member) = (bed.pod(team, 1), &bed.cluster.nodes[0]);
    let there = bed.cluster.nodes[1].node.addresses()[usize::from(!v4)];
    let name = if v4 { "tunnel4" } else { "tunnel6" };
    let labels = match network_of(team) {
        "default" => json!({}),
        network => json!({ "kni.dev/network": network }),
    };
    let service = objects::service(team, name, FRONT, (there, OVERLAY_PORT), &labels);
    bed.cluster.apply(&service).await?;
    let api: Api<Service> = Api::namespaced(bed.cluster.client.clone(), team);
    let spec = api.get(name).await?.spec.unwrap_or_default();
    let front: IpAddr = spec.cluster_ip.context("an address")?.parse()?;
    let open = || {
        sender
            .inside
            .enter(|| UdpSocket::bind(SocketAddr::new(address(sender, v4), 0)))
    };
    let before = dropped(member, "from_pod", "overlay_port").await?;
    wait::until("the service is known", patience(), async || {
        // Another socket each time: a flow from before the service was known continues.
        open()??.send_to(inner, (front, FRONT))?;
        tokio::time::sleep(Duration::from_millis(50)).await;
        let known = dropped(member, "from_pod", "overlay_port").await? > before;
        ensure!(known, "{}", bed.drops().await?);
        Ok(true)
    })
    .await?;
    let socket = open()??;
    let what = format!("{} through a service at {front}", identity(sender));
    refused((bed, &what), (member, "from_pod", "overlay_port"), |_number| {
        socket.send_to(inner, (front, FRONT))?;
        Ok(())
    })
    .await
}

/// No pod gets what other nodes send to the tunnel: a host port of UDP is refused, and one of TCP with the number is
/// another port.
pub(super) async fn to_a_host_port(bed: &Bed, numbers: &[u32; 3]) -> Result<()> {
    let member = &bed.cluster.nodes[0];
    let mapping = |protocol: Protocol| PortMapping {
        protocol: protocol.into(),
        container_port: PORT.into(),
        host_port: OVERLAY_PORT.into(),
        host_ip: String::new(),
    };
    let run = async |name, protocol| {
        let kni = member.kubelet.kni();
        let edit = |request: &mut kni_proto::kni::AttachInterfaceRequest| {
            request.port_mappings = vec![mapping(protocol)];
        };
        kni.run_pod_with("plain", name, &[], edit).await
    };
    let refusal = run("udp-port", Protocol::Udp).await.err().context("it is refused")?;
    ensure!(
        refusal.message().contains("is the port of the tunnel between nodes"),
        "{refusal}"
    );
    let pod = run("tcp-port", Protocol::Tcp).await?;
    let server = Servers::start(&pod.inside, &identity(&pod), PORT)?;
    let outside = bed.cluster.fabric.inside();
    for v4 in [true, false] {
        let to: IpAddr = member.node.addresses()[usize::from(!v4)].parse()?;
        wait::until("the host port is served", patience(), async || {
            let answer = tcp_get(outside, to, OVERLAY_PORT, ANSWER)?;
            Ok(answer.identity == identity(&pod))
        })
        .await?;
        let inner = forged(
            numbers[2],
            address(bed.pod("blue-team", 2), v4),
            address(bed.pod("blue-team", 1), v4),
        );
        let socket = outside.enter(|| UdpSocket::bind(if v4 { "198.51.100.1:0" } else { "[2001:db8:100::1]:0" }))??;
        let seen = server.seen();
        let what = format!("a host to {to}, where a pod has the port of TCP");
        refused((bed, &what), (member, "from_overlay", "foreign_node"), |_number| {
            socket.send_to(&inner, (to, OVERLAY_PORT))?;
            Ok(())
        })
        .await?;
        ensure!(server.seen() == seen, "the pod received a datagram of the tunnel");
    }
    drop(server);
    member.kubelet.kni().kill_pod(pod).await.map_err(Into::into)
}
