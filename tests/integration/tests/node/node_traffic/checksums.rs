//! Tests that every checksum that a pod receives is correct, also if the sender's kernel computes it completely.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd as _,
    time::Duration,
};

use anyhow::{Context as _, Result};
use kni_integration::{
    Manifest, Namespaces, Node, Stage,
    echo::{tcp_echo, udp_echo},
    frames::{Ip, Link, PacketSocket, Payload, arp_request, neighbour_solicitation},
    require,
    stage::{address, forwarding},
    traffic::{Servers, new_token, ping},
    wait::patience,
};

use super::{
    FAMILIES, PORT,
    capture::{Capture, Sum},
};

const QUIET: Duration = Duration::from_millis(200);
/// `ETHTOOL_STXCSUM`: sets checksum offload of sent packets.
const SET_TX_CHECKSUM: u32 = 0x17;
const SIOCETHTOOL: libc::Ioctl = 0x8946;

/// Makes the kernel compute the checksums of packets sent over `link`, as for a device without offload.
pub(crate) fn without_offload(ns: &Namespaces, link: &str) -> Result<()> {
    let name = link.to_owned();
    ns.enter(move || {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
        let mut value = [SET_TX_CHECKSUM, 0];
        // SAFETY: all zeros are a valid request.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = libc::c_char::from_ne_bytes([from]);
        }
        request.ifr_ifru.ifru_data = value.as_mut_ptr().cast();
        // SAFETY: the request names a link and points to a `struct ethtool_value` that lives through the call.
        let done = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
        if done == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    })?
    .with_context(|| format!("checksum offload of {link}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_pod_receives_has_right_checksums() -> Result<()> {
    require!(root, netns, bpf, ip);
    let node = Node::new("checksums")?;
    forwarding(&node)?;
    let stage = Stage::on(node, Manifest::overlapping()).await?;
    let pods = [
        stage.pod("sums-1").await?,
        stage.pod("sums-2").await?,
        stage.pod("sums-3").await?,
    ];
    let _server = Servers::start(&pods[1].inside, "sums-2", PORT + 1)?;
    // One pod sends complete checksums; the other one uses offload.
    without_offload(&pods[0].inside, "eth0")?;
    without_offload(stage.node.fabric(), "fabric0")?;
    let capture = Capture::open(&pods[1].inside)?;
    for v4 in FAMILIES {
        let to = SocketAddr::new(address(&pods[1], v4), PORT);
        for from in [&pods[0].inside, &pods[2].inside, &*stage.node, stage.node.fabric()] {
            tcp_echo(from, to, &pods[1].inside, PORT, 200_000)?;
            udp_echo(from, to, &pods[1].inside, PORT, 1000)?;
            ping(from, to.ip(), &new_token(), patience())?;
        }
        let [own, gateway] = stage.macs(&pods[0], "eth0").await?;
        let packet = Ip::new(address(&pods[0], v4), to.ip()).packet(&Payload::udp(7, PORT + 1, b"raw"));
        PacketSocket::open(&pods[0].inside, "eth0")?.send(&Link::new(own, gateway).frame(&packet))?;
    }
    let packets = capture.drain(QUIET)?;
    let mut counts = BTreeMap::<(IpAddr, u8, Sum), usize>::new();
    for packet in &packets {
        *counts.entry((packet.source, packet.protocol, packet.sum)).or_default() += 1;
        assert!(packet.header_sum_right, "IPv4 header checksum: {packet:?}");
        assert_ne!(packet.sum, Sum::Wrong, "transport checksum: {packet:?}");
    }
    // The packets of the first pod were complete, so the programs changed no bytes that a checksum covers.
    for v4 in FAMILIES {
        let icmp = if v4 { 1 } else { 58 };
        let strict = address(&pods[0], v4);
        for protocol in [6, 17, icmp] {
            let full = counts.get(&(strict, protocol, Sum::Full)).copied().unwrap_or_default();
            assert!(
                full > 0,
                "no finished packet of protocol {protocol} from {strict}: {counts:?}"
            );
            assert_eq!(counts.get(&(strict, protocol, Sum::Partial)), None, "{counts:?}");
        }
    }
    assert!(
        packets.iter().any(|packet| packet.sum == Sum::Partial),
        "offload was never used"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_gateway_answers_with_right_checksums() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("gateway", Manifest::overlapping()).await?;
    for (name, network) in [("gateway-1", "default"), ("gateway-2", "blue")] {
        let pod = stage.pod_with(name, &[("kni.dev/network", network)]).await?;
        let [own, gateway] = stage.macs(&pod, "eth0").await?;
        let (IpAddr::V4(v4), IpAddr::V6(v6)) = (address(&pod, true), address(&pod, false)) else {
            unreachable!("one of each family")
        };
        let socket = PacketSocket::open(&pod.inside, "eth0")?;
        let capture = Capture::open(&pod.inside)?;
        socket.send(&neighbour_solicitation(own, v6, "fe80::1".parse()?))?;
        // An advertisement with the gateway's MAC address as its target link-layer address.
        let answer = capture.find(patience(), |packet| packet.protocol == 58 && packet.bytes[0] == 136)?;
        let answer = answer.with_context(|| format!("the gateway does not answer {name}"))?;
        assert_eq!(answer.sum, Sum::Full, "{answer:?}");
        assert_eq!(answer.source, "fe80::1".parse::<IpAddr>()?);
        assert_eq!(answer.bytes[24..32], [&[2, 1][..], &gateway].concat());

        socket.send(&arp_request(own, v4, "169.254.1.1".parse()?))?;
        let reply = socket.receive(patience(), |frame| {
            frame[..6] == own && frame[12..14] == [8, 6] && frame[20..22] == [0, 2]
        })?;
        let reply = reply.with_context(|| format!("no ARP reply for {name}"))?;
        assert_eq!(reply[22..28], gateway);
        assert_eq!(reply[28..32], [169, 254, 1, 1]);
    }
    Ok(())
}
