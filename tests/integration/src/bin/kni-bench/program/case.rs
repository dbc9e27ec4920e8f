//! Defines the measured packets and their expected results.

use std::net::IpAddr;

use anyhow::{Result, bail};
use kni_model::MacAddr;

/// The kernel runs a program repeatedly on one packet, which `from_pod` rewrites: here each endpoint's gateway has the
/// address of the other endpoint, so that rewriting restores the original packet.
pub(super) const SENDER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 5]);
/// See [`SENDER_MAC`].
pub(super) const RECEIVER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 6]);
/// Sender, receiver, a host outside the node.
pub(super) const V4: [&str; 3] = ["10.0.0.5", "10.0.0.6", "192.0.2.9"];
/// See [`V4`].
pub(super) const V6: [&str; 3] = ["fd00::5", "fd00::6", "2001:db8::9"];
const PORTS: [u16; 2] = [40_000, 80];

const TC_ACT_UNSPEC: u32 = u32::MAX;
const TC_ACT_SHOT: u32 = 2;
const TC_ACT_REDIRECT: u32 = 7;

const TCP: u8 = 6;
const UDP: u8 = 17;
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

/// A packet and its expected result.
pub(super) struct Case {
    /// Its name in the JSON.
    pub(super) key: &'static str,
    /// Its name in the table.
    pub(super) title: &'static str,
    pub(super) program: &'static str,
    pub(super) packet: Vec<u8>,
    /// The return value of the program.
    pub(super) verdict: u32,
}

/// All packets. Packets that open a flow come first, because the others use it.
pub(super) fn cases() -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    let mut add = |program, [key, title]: [&'static str; 2], packet: Vec<u8>, verdict| {
        cases.push(Case {
            key,
            title,
            program,
            packet,
            verdict,
        });
    };
    for (family, [sender, receiver, outside]) in [(4, V4), (6, V6)] {
        let names = |v4, v6| if family == 4 { v4 } else { v6 };
        let local = [sender, receiver];
        let title = names(
            ["new_flow_v4", "new flow, IPv4 TCP SYN"],
            ["new_flow_v6", "new flow, IPv6 TCP SYN"],
        );
        add("from_pod", title, frame(local, TCP, &tcp(SYN))?, TC_ACT_REDIRECT);
        let title = names(["tcp_v4", "established, IPv4 TCP"], ["tcp_v6", "established, IPv6 TCP"]);
        add("from_pod", title, frame(local, TCP, &tcp(ACK))?, TC_ACT_REDIRECT);
        let title = names(["udp_v4", "established, IPv4 UDP"], ["udp_v6", "established, IPv6 UDP"]);
        add("from_pod", title, frame(local, UDP, &udp())?, TC_ACT_REDIRECT);
        let title = names(
            ["to_stack_v4", "to the stack, IPv4 TCP"],
            ["to_stack_v6", "to the stack, IPv6 TCP"],
        );
        add(
            "from_pod",
            title,
            frame([sender, outside], TCP, &tcp(ACK))?,
            TC_ACT_UNSPEC,
        );
        let title = names(
            ["spoofed_v4", "spoofed IPv4 source"],
            ["spoofed_v6", "spoofed IPv6 source"],
        );
        add(
            "from_pod",
            title,
            frame([outside, receiver], TCP, &tcp(ACK))?,
            TC_ACT_SHOT,
        );
        let title = names(
            ["to_pod_v4", "from the stack, IPv4 TCP"],
            ["to_pod_v6", "from the stack, IPv6 TCP"],
        );
        add(
            "to_pod",
            title,
            frame([outside, sender], TCP, &tcp(ACK))?,
            TC_ACT_UNSPEC,
        );
    }
    Ok(cases)
}

fn tcp(flags: u8) -> Vec<u8> {
    let [source, destination] = PORTS.map(u16::to_be_bytes);
    let rest = [0, 0, 0, 1, 0, 0, 0, 1, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0];
    [&source[..], &destination, &rest, &[0; 32]].concat()
}

fn udp() -> Vec<u8> {
    let [source, destination] = PORTS.map(u16::to_be_bytes);
    [&source[..], &destination, &[0, 40, 0, 0], &[0; 32]].concat()
}

/// A frame as sent by the sender's interface, without checksums: the programs do not verify them.
fn frame([source, destination]: [&str; 2], protocol: u8, payload: &[u8]) -> Result<Vec<u8>> {
    let ethernet = |ethertype: u16| [&RECEIVER_MAC.0[..], &SENDER_MAC.0, &ethertype.to_be_bytes()].concat();
    Ok(match (source.parse()?, destination.parse()?) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let length = u16::try_from(20 + payload.len())?.to_be_bytes();
            let header = [0x45, 0, length[0], length[1], 0, 0, 0x40, 0, 64, protocol, 0, 0];
            let addresses = [source.octets(), destination.octets()].concat();
            [&ethernet(0x0800)[..], &header, &addresses, payload].concat()
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let length = u16::try_from(payload.len())?.to_be_bytes();
            let header = [0x60, 0, 0, 0, length[0], length[1], protocol, 64];
            let addresses = [source.octets(), destination.octets()].concat();
            [&ethernet(0x86dd)[..], &header, &addresses, payload].concat()
        }
        _ => bail!("{source} and {destination} are of two families"),
    })
}
