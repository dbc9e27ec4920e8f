use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result};
use kni_integration::{
    Namespaces,
    bind::when_free,
    frames::{
        Extension, Ip, Link, PacketSocket, Payload, TcpFlags, arp_request, crc32c, neighbour_solicitation, parse_mac,
        truncations,
    },
    require,
};

use super::{MACS, V4, V6, pair};

const SHORT: Duration = Duration::from_millis(500);

fn ip(family: [&str; 2]) -> Ip {
    Ip::new(
        family[0].parse().expect("an address"),
        family[1].parse().expect("an address"),
    )
}

fn listen(at: &Namespaces) -> Result<[UdpSocket; 2]> {
    let bind = |address: &str| -> Result<_> {
        let at: SocketAddr = (address.parse::<IpAddr>()?, 9000).into();
        let socket = when_free(|| UdpSocket::bind(at)).with_context(|| at.to_string())?;
        socket.set_read_timeout(Some(SHORT))?;
        Ok(socket)
    };
    at.enter(|| Ok([bind(V4[1])?, bind(V6[1])?]))?
}

/// Name, headers, and the size of the fragments if the packet is fragmented.
fn cases() -> Vec<(&'static str, Ip, Option<usize>)> {
    let padding = || vec![1, 4, 0, 0, 0, 0];
    let whole = Extension::Fragment {
        offset: 0,
        more: false,
        id: 7,
    };
    let hop = || Extension::HopByHop(padding());
    let destination = Extension::DestinationOptions(vec![1, 1, 0]);
    let routing = || Extension::Routing(253, 0, vec![0; 4]);
    vec![
        ("plain IPv4", ip(V4), None),
        ("IPv4 router alert", ip(V4).options(&[148, 4, 0, 0, 1]), None),
        ("IPv4 fragments", ip(V4), Some(1000)),
        ("plain IPv6", ip(V6), None),
        ("hop-by-hop", ip(V6).extension(hop()), None),
        ("destination options", ip(V6).extension(destination), None),
        ("routing", ip(V6).extension(routing()), None),
        ("atomic fragment", ip(V6).extension(whole), None),
        (
            "headers and fragments",
            ip(V6).extension(hop()).extension(routing()),
            Some(1200),
        ),
    ]
}

/// Verified by the kernel, which accepts a frame only if lengths, checksums and header chains are correct.
#[test]
fn the_kernel_accepts_what_is_built() -> Result<()> {
    require!(root, netns, ip);
    let [from, to] = pair(["frames-1", "frames-2"])?;
    let [v4, v6] = listen(&to)?;
    let out = PacketSocket::open(&from, "eth0")?;
    let link = Link::new(MACS[0], MACS[1]);
    for (number, (what, ip, fragment)) in (0_u8..).zip(cases()) {
        let socket = if ip.source.is_ipv4() { &v4 } else { &v6 };
        // Differs between cases, so that none passes because of the datagram of another; an odd length for the
        // checksum.
        let data = vec![number; if fragment.is_some() { 2999 } else { 7 }];
        let payload = Payload::udp(4000, 9000, &data);
        let packets = fragment.map_or_else(|| vec![ip.packet(&payload)], |size| ip.fragments(&payload, size));
        assert_eq!(fragment.is_some(), packets.len() > 1, "{what}");
        for packet in &packets {
            out.send(&link.frame(packet)).with_context(|| what.to_owned())?;
        }
        let mut buffer = [0; 4096];
        let received = socket.recv_from(&mut buffer);
        let (length, sender) = received.with_context(|| format!("{what} did not arrive"))?;
        assert_eq!(&buffer[..length], data, "{what}");
        assert_eq!(sender, SocketAddr::new(ip.source, 4000), "{what}");
    }
    Ok(())
}

#[test]
fn the_kernel_refuses_a_wrong_checksum() -> Result<()> {
    require!(root, netns, ip);
    let [from, to] = pair(["sums-1", "sums-2"])?;
    let [v4, v6] = listen(&to)?;
    let out = PacketSocket::open(&from, "eth0")?;
    for (socket, family) in [(v4, V4), (v6, V6)] {
        let mut frame = Link::new(MACS[0], MACS[1]).frame(&ip(family).packet(&Payload::udp(4000, 9000, b"data")));
        *frame.last_mut().context("a frame has bytes")? ^= 1;
        out.send(&frame)?;
        let error = socket.recv(&mut [0; 16]).expect_err("the datagram arrived");
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    }
    Ok(())
}

/// The kernel answers echo and TCP; the answer shows that the request was valid.
#[test]
fn the_kernel_answers_crafted_questions() -> Result<()> {
    require!(root, netns, ip);
    let [from, _to] = pair(["answers-1", "answers-2"])?;
    let socket = PacketSocket::open(&from, "eth0")?;
    let link = Link::new(MACS[0], MACS[1]);
    for (family, network_length) in [(V4, 20), (V6, 40)] {
        let is_v4 = family == V4;
        let transport = 14 + network_length;
        let answered = |payload: &Payload, at: usize, value: u8| -> Result<bool> {
            socket.send(&link.frame(&ip(family).packet(payload)))?;
            let from_peer = |frame: &[u8]| frame[6..12] == MACS[1] && frame.get(transport + at) == Some(&value);
            Ok(socket.receive(SHORT, from_peer)?.is_some())
        };
        let reply_type = if is_v4 { 0 } else { 129 };
        assert!(
            answered(&Payload::echo_request(is_v4, 7, 1, b"ping"), 0, reply_type)?,
            "no echo reply {family:?}"
        );
        let reset_and_ack = 0x14;
        assert!(
            answered(&Payload::tcp(4000, 9, TcpFlags::SYN), 13, reset_and_ack)?,
            "no reset {family:?}"
        );
    }
    let [v4_from, v4_to] = [V4[0].parse()?, V4[1].parse()?];
    socket.send(&arp_request(MACS[0], v4_from, v4_to))?;
    let is_arp_reply = |frame: &[u8]| frame[12..14] == [8, 6] && frame[20..22] == [0, 2] && frame[22..28] == MACS[1];
    assert!(socket.receive(SHORT, is_arp_reply)?.is_some(), "no ARP reply");
    let [v6_from, v6_to] = [V6[0].parse()?, V6[1].parse()?];
    socket.send(&neighbour_solicitation(MACS[0], v6_from, v6_to))?;
    let is_advertisement = |frame: &[u8]| frame.get(54) == Some(&136);
    assert!(
        socket.receive(SHORT, is_advertisement)?.is_some(),
        "no neighbour advertisement"
    );
    Ok(())
}

#[test]
fn frames_have_the_shape_they_are_asked_for() {
    let packet = ip(V4).packet(&Payload::sctp_init(5000, 5001));
    assert_eq!(packet[9], 132);
    let mut sctp = packet[20..].to_vec();
    let sum = u32::from_le_bytes(sctp[8..12].try_into().expect("four bytes"));
    sctp[8..12].fill(0);
    assert_eq!(sum, crc32c(&sctp));

    let tagged = Link::new(MACS[0], MACS[1]).vlan(5).vlan(6).frame(&packet);
    assert_eq!(tagged[..12], [MACS[1], MACS[0]].concat());
    assert_eq!(tagged[12..22], [0x81, 0, 0, 5, 0x81, 0, 0, 6, 8, 0]);
    assert_eq!(
        truncations(&tagged).map(<[u8]>::len).collect::<Vec<_>>(),
        (0..tagged.len()).collect::<Vec<_>>()
    );
    assert_eq!(parse_mac("02:00:00:00:00:01"), Some(MACS[0]));
    assert_eq!(parse_mac("02:00:00:00:00"), None);
}
