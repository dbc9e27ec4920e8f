//! Builds the answer to a packet for a service without backends: TCP RST (RFC 9293), or port unreachable (RFC 792,
//! 4443).

use super::packet::{ETHERNET, Fragment, Packet};
use crate::frames::{Ip, Payload, checksum};

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

/// The frame that the sender gets; `None` if the packet must not be answered or has an unusual form.
pub(super) fn answer(frame: &[u8], packet: &Packet) -> Option<Vec<u8>> {
    if !packet.plain || packet.fragment != Fragment::Whole {
        return None;
    }
    let mut back = Ip::new(packet.destination, packet.source);
    back.id = 0;
    let ip = match packet.protocol {
        6 => reset(&back, frame, packet)?,
        17 | 132 => back.packet(&unreachable(frame, packet)),
        _ => return None,
    };
    Some([&frame[6..12], &frame[..6], &frame[12..14], &ip].concat())
}

fn unreachable(frame: &[u8], packet: &Packet) -> Payload {
    let transport = if packet.protocol == 132 { 12 } else { 8 };
    let quoted = &frame[ETHERNET..ETHERNET + packet.transport + transport];
    let (kind, code) = if packet.source.is_ipv4() { (3, 3) } else { (1, 4) };
    let body = [&[0; 4][..], quoted].concat();
    Payload::Icmp { kind, code, body }
}

/// The answer of a closed port. The length of the segment includes SYN and FIN.
fn reset(back: &Ip, frame: &[u8], packet: &Packet) -> Option<Vec<u8>> {
    let segment = frame
        .get(ETHERNET + packet.transport..)
        .filter(|rest| rest.len() >= 20)?;
    let flags = packet.tcp_flags;
    if flags & RST != 0 {
        return None;
    }
    let word = |at: usize| u32::from_be_bytes([segment[at], segment[at + 1], segment[at + 2], segment[at + 3]]);
    let (sequence, acknowledgement, answer) = if flags & ACK == 0 {
        let header = usize::from(segment[12] / 16) * 4;
        let data = (packet.length - packet.transport).saturating_sub(header);
        let controls = (flags & (SYN | FIN)).count_ones();
        let next = word(4)
            .wrapping_add(u32::try_from(data).expect("a short segment"))
            .wrapping_add(controls);
        (0, next, RST | ACK)
    } else {
        (word(8), 0, RST)
    };
    let mut bytes = [&segment[2..4], &segment[..2]].concat();
    bytes.extend_from_slice(&u32::to_be_bytes(sequence));
    bytes.extend_from_slice(&u32::to_be_bytes(acknowledgement));
    bytes.extend_from_slice(&[0x50, answer, 0, 0, 0, 0, 0, 0]);
    let sum = checksum(&[&back.pseudo_header(6, bytes.len()), &bytes]);
    bytes[16..18].copy_from_slice(&sum.to_be_bytes());
    Some(back.around(6, &bytes))
}
