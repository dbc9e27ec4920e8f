//! Generates forged frames, each with the expected drop reason.

use std::net::{IpAddr, Ipv6Addr};

use anyhow::Result;
use kni_integration::{
    frames::{ETHERTYPE_ARP, Ip, Link, Mac, Payload, TcpFlags, arp_request, neighbour_solicitation},
    node::{NODE_V4, NODE_V6},
    stage::address,
    traffic::new_token,
};

use super::{PORT, Scene};

pub(super) const BROADCAST: Mac = [0xff; 6];
const ALL_NODES: Mac = [0x33, 0x33, 0, 0, 0, 1];

/// A frame and its drop reason; `None` for link control, which is dropped without a reason.
pub(super) struct Case {
    pub(super) what: String,
    pub(super) frame: Vec<u8>,
    pub(super) reason: Option<&'static str>,
}

/// Generates the frames of one sender, each with its own token.
pub(super) struct Forge {
    pub(super) own: Mac,
    pub(super) gateway: Mac,
    pub(super) v4: IpAddr,
    v6: IpAddr,
    link_local: Ipv6Addr,
    pub(super) cases: Vec<Case>,
    pub(super) tokens: Vec<String>,
}

impl Forge {
    pub(super) fn token(&mut self) -> Vec<u8> {
        let token = new_token();
        self.tokens.push(token.clone());
        token.into_bytes()
    }

    pub(super) fn source(&self, v4: bool) -> IpAddr {
        if v4 { self.v4 } else { self.v6 }
    }

    fn add(&mut self, what: &str, frame: Vec<u8>, reason: Option<&'static str>) {
        let what = what.to_owned();
        self.cases.push(Case { what, frame, reason });
    }

    /// A datagram with a valid source.
    fn udp(&mut self, what: &str, link: &Link, to: &str, reason: &'static str) -> Result<()> {
        let to: IpAddr = to.parse()?;
        let from = self.source(to.is_ipv4());
        self.udp_from(what, link, from, to, reason);
        Ok(())
    }

    pub(super) fn udp_from(&mut self, what: &str, link: &Link, from: IpAddr, to: IpAddr, reason: &'static str) {
        let token = self.token();
        let packet = Ip::new(from, to).packet(&Payload::udp(40_000, PORT, &token));
        self.add(&format!("{what}: {from} to {to}"), link.frame(&packet), Some(reason));
    }

    /// ICMPv6 link control, with the token after the fields of the message.
    fn link_control(&mut self, what: &str, from: IpAddr, kind: u8, fields: &[u8], reason: Option<&'static str>) {
        let token = self.token();
        let body = [fields, &token].concat();
        let ip = Ip::new(from, IpAddr::from([0xff02, 0, 0, 0, 0, 0, 0, 1])).hop_limit(255);
        let packet = ip.packet(&Payload::Icmp { kind, code: 0, body });
        self.add(what, Link::new(self.own, ALL_NODES).frame(&packet), reason);
    }

    /// A frame has padding after the 28 bytes of ARP.
    fn arp(&mut self, what: &str, mut frame: Vec<u8>, reason: Option<&'static str>) {
        frame.extend(self.token());
        self.add(what, frame, reason);
    }

    pub(super) fn to_gateway(&self) -> Link {
        Link::new(self.own, self.gateway)
    }
}

pub(super) fn destinations(forge: &mut Forge, plain: [IpAddr; 2]) -> Result<()> {
    let gateway = forge.to_gateway();
    let [plain_v4, plain_v6] = plain.map(|ip| ip.to_string());
    for (to, reason) in [
        ("10.10.0.77", "no_destination"),
        ("fd10::77", "no_destination"),
        ("10.10.255.255", "no_destination"),
        (plain_v4.as_str(), "no_route"),
        (plain_v6.as_str(), "no_route"),
        (NODE_V4, "no_route"),
        (NODE_V6, "no_route"),
        ("127.0.0.1", "loopback"),
        ("::1", "loopback"),
        ("169.254.1.1", "no_route"),
        ("0.0.0.0", "no_route"),
        ("::", "no_route"),
        ("10.10.0.11", "self_addressed"),
        ("255.255.255.255", "multicast"),
        ("224.0.0.1", "multicast"),
        ("239.1.2.3", "multicast"),
        ("ff02::1", "multicast"),
        ("ff05::2", "multicast"),
        ("fe80::1", "link_local"),
        ("fe80::42", "link_local"),
        ("::ffff:10.10.0.77", "malformed"),
    ] {
        forge.udp("gateway MAC", &gateway, to, reason)?;
    }
    Ok(())
}

pub(super) fn link_headers(forge: &mut Forge, others: &[(&str, [Mac; 2], [IpAddr; 2])]) -> Result<()> {
    let own = forge.own;
    for (name, macs, addresses) in others {
        for (end, mac) in ["pod", "host"].into_iter().zip(macs) {
            for to in addresses {
                let what = format!("MAC of {name}'s {end} end");
                forge.udp(&what, &Link::new(own, *mac), &to.to_string(), "destination_mac")?;
            }
        }
    }
    for to in ["10.10.0.12", NODE_V4, "fd10::12", NODE_V6] {
        forge.udp("broadcast MAC", &Link::new(own, BROADCAST), to, "destination_mac")?;
        forge.udp("all-nodes MAC", &Link::new(own, ALL_NODES), to, "destination_mac")?;
    }
    let foreign = [2, 0, 0, 0, 0, 0x99];
    forge.udp(
        "foreign source MAC",
        &Link::new(foreign, forge.gateway),
        "10.10.0.12",
        "source_mac",
    )?;
    let stolen = others[0].1[0];
    forge.udp(
        "another pod's source MAC",
        &Link::new(stolen, forge.gateway),
        "fd10::12",
        "source_mac",
    )?;
    for tags in [&[0][..], &[1], &[4094], &[1, 2]] {
        let link = tags.iter().fold(forge.to_gateway(), |link, id| link.vlan(*id));
        forge.udp(&format!("VLAN {tags:?}"), &link, "10.10.0.12", "vlan_tagged")?;
        forge.udp(&format!("VLAN {tags:?}"), &link, "fd10::12", "vlan_tagged")?;
    }
    for ethertype in [0x88cc, 0x8847, 0x8864, 0x888e, 0x0026, 0x22f0, 0x9000] {
        let token = forge.token();
        let frame = Link::new(own, BROADCAST).frame_of(ethertype, &[&[0x42; 40][..], &token].concat());
        forge.add(
            &format!("EtherType {ethertype:#06x}"),
            frame,
            Some("unsupported_ethertype"),
        );
    }
    Ok(())
}

pub(super) fn sources(forge: &mut Forge, plain: [IpAddr; 2]) -> Result<()> {
    let gateway = forge.to_gateway();
    let (peer_v4, peer_v6): (IpAddr, IpAddr) = ("10.10.0.12".parse()?, "fd10::12".parse()?);
    for from in [
        "10.10.0.12",
        "10.10.0.77",
        "0.0.0.0",
        "127.0.0.1",
        NODE_V4,
        "169.254.1.1",
    ] {
        forge.udp_from("foreign source", &gateway, from.parse()?, peer_v4, "source_address");
    }
    for from in ["fd10::12", "fd10::77", "::", "::1", NODE_V6, "fe80::1"] {
        forge.udp_from("foreign source", &gateway, from.parse()?, peer_v6, "source_address");
    }
    let [plain_v4, plain_v6] = plain;
    forge.udp_from("foreign source", &gateway, plain_v4, peer_v4, "source_address");
    forge.udp_from("foreign source", &gateway, plain_v6, peer_v6, "source_address");
    // The sender's link-local address is valid for link control only.
    let local = IpAddr::V6(forge.link_local);
    forge.udp_from("link-local source", &gateway, local, peer_v6, "source_address");
    Ok(())
}

pub(super) fn link_control(forge: &mut Forge, plain: [IpAddr; 2]) -> Result<()> {
    let (own, local) = (forge.own, IpAddr::V6(forge.link_local));
    let IpAddr::V4(v4) = forge.v4 else {
        unreachable!("an IPv4 address")
    };
    for target in ["10.10.0.12", "10.10.0.77", &plain[0].to_string(), NODE_V4] {
        let frame = arp_request(own, v4, target.parse()?);
        forge.arp(&format!("ARP for {target}"), frame, None);
    }
    for sender in ["10.10.0.12", "169.254.1.1", NODE_V4] {
        let frame = arp_request(own, sender.parse()?, sender.parse()?);
        forge.arp(&format!("gratuitous ARP of {sender}"), frame, Some("source_address"));
        let mut reply = arp_request(own, sender.parse()?, "10.10.0.12".parse()?);
        reply[21] = 2;
        forge.arp(&format!("ARP reply of {sender}"), reply, Some("source_address"));
    }
    let foreign_body = Link::new(own, BROADCAST).frame_of(ETHERTYPE_ARP, &arp_request([2; 6], v4, v4)[14..]);
    forge.arp("ARP of a foreign MAC", foreign_body, Some("source_address"));

    for target in ["fd10::12", "fd10::77", "fe80::42", NODE_V6] {
        let mut frame = neighbour_solicitation(own, forge.link_local, target.parse()?);
        frame.extend(forge.token());
        forge.add(&format!("solicitation of {target}"), frame, None);
    }
    // Router lifetime, reachable and retransmission times; a redirect's and an advertisement's two and one addresses.
    let gateway = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    let router = [64, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0];
    let redirect = [&[0; 4][..], &gateway, &gateway].concat();
    let advertisement = [&[0xa0, 0, 0, 0][..], &gateway].concat();
    for (what, kind, fields) in [
        ("router advertisement", 134, &router[..]),
        ("redirect", 137, &redirect),
        ("neighbour advertisement of the gateway", 136, &advertisement),
        ("listener report", 143, &[0; 4]),
    ] {
        forge.link_control(what, local, kind, fields, None);
        forge.link_control(
            &format!("{what} of another"),
            "fd10::12".parse()?,
            kind,
            fields,
            Some("source_address"),
        );
    }
    Ok(())
}

pub(super) fn errors_and_options(forge: &mut Forge) -> Result<()> {
    let gateway = forge.to_gateway();
    for (v4, peer, kind, redirect) in [(true, "10.10.0.12", 3, Some(5)), (false, "fd10::12", 1, None)] {
        let (own, peer): (IpAddr, IpAddr) = (forge.source(v4), peer.parse()?);
        // About a packet that the peer has never sent.
        let quoted = Ip::new(peer, own).packet(&Payload::tcp(80, 81, TcpFlags::ACK));
        for (kind, reason) in [(Some(kind), "icmp_unrelated"), (redirect, "icmp_type")] {
            let Some(kind) = kind else { continue };
            let body = [&[0; 4][..], &quoted, &forge.token()].concat();
            let packet = Ip::new(own, peer).packet(&Payload::Icmp { kind, code: 1, body });
            forge.add(
                &format!("ICMP type {kind} to {peer}"),
                gateway.frame(&packet),
                Some(reason),
            );
        }
    }
    // Through the node (LSRR), then through the peer.
    let token = forge.token();
    let way = [&[131, 7, 4, 198, 51, 100, 2][..], &[0]].concat();
    let ip = Ip::new(forge.v4, "10.10.0.12".parse()?).options(&way);
    let packet = ip.packet(&Payload::udp(40_000, PORT, &token));
    forge.add("source route", gateway.frame(&packet), Some("source_route"));
    Ok(())
}

/// The link-local address that the kernel gave an interface.
fn link_local(scene: &Scene, name: &str) -> Result<Ipv6Addr> {
    let shown = scene
        .pod(name)
        .inside
        .run("ip", &["-6", "-o", "address", "show", "dev", "eth0", "scope", "link"])?;
    let words = shown.split_whitespace();
    let address = words.skip_while(|word| *word != "inet6").nth(1);
    let address = address.and_then(|text| text.split('/').next());
    Ok(address.unwrap_or("fe80::1234").parse()?)
}

pub(super) async fn forge(scene: &Scene, sender: &str) -> Result<Forge> {
    let pod = scene.pod(sender);
    let [own, gateway] = scene.stage.macs(pod, "eth0").await?;
    Ok(Forge {
        own,
        gateway,
        v4: address(pod, true),
        v6: address(pod, false),
        link_local: link_local(scene, sender)?,
        cases: Vec::new(),
        tokens: Vec::new(),
    })
}
