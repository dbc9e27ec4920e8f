//! Tests fragments: later ones are treated as the first one, within network and direction.

use std::net::IpAddr;

use anyhow::Result;
use kni_common::Verdict::{Delivered, FragmentWithoutFirst, Redirected, Truncated};
use kni_integration::{
    frames::{Payload, TcpFlags},
    require,
};

use super::table::{BLUE_A, BLUE_B, DEFAULT_A, DEFAULT_B, FAMILIES, RED_A, RED_B, Table, from, ip, table, to};

fn parts(source: IpAddr, destination: IpAddr, id: u16, payload: &Payload) -> Vec<Vec<u8>> {
    let mut whole = ip(source, destination);
    whole.id = id;
    whole.fragments(payload, 24)
}

#[test]
fn later_fragments_follow_their_first() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("fragments", |table| {
        let mut segment = Payload::tcp(4000, 80, TcpFlags::SYN);
        if let Payload::Tcp { data, .. } = &mut segment {
            data.resize(40, 7);
        }
        for (a, b) in FAMILIES {
            for (what, payload) in [
                ("UDP", Payload::udp(4000, 53, &[7; 60])),
                ("TCP", segment.clone()),
                ("SCTP", Payload::sctp_init(5000, 5001)),
                ("echo", Payload::echo_request(a.is_ipv4(), 7, 1, &[7; 60])),
            ] {
                let what = format!("IPv{} {what}", if a.is_ipv4() { 4 } else { 6 });
                datagram(table, &what, [a, b], &payload)?;
            }
        }
        Ok(())
    })
}

fn datagram(table: &mut Table<'_>, what: &str, [a, b]: [IpAddr; 2], payload: &Payload) -> Result<()> {
    table.step.flush()?;
    let name = |rest: &str| format!("{what} {rest}");
    let packets = parts(a, b, 1, payload);
    let frame = |id: u32, at: usize| from(id).frame(&packets[at]);
    let early = frame(BLUE_A, 1);
    table.sent(&name("later before the first"), BLUE_A, &early, FragmentWithoutFirst)?;
    table.reaches(&name("first"), BLUE_A, &frame(BLUE_A, 0), BLUE_B)?;
    for at in 1..packets.len() {
        table.reaches(&name("later"), BLUE_A, &frame(BLUE_A, at), BLUE_B)?;
    }
    // The datagram of the other network has the same addresses and identification.
    let red = frame(RED_A, 1);
    table.sent(&name("later, other network"), RED_A, &red, FragmentWithoutFirst)?;
    let other = from(BLUE_A).frame(&parts(a, b, 2, payload)[1]);
    table.sent(
        &name("later, other identification"),
        BLUE_A,
        &other,
        FragmentWithoutFirst,
    )?;
    table.reaches(&name("first, other network"), RED_A, &frame(RED_A, 0), RED_B)?;
    table.reaches(&name("later, other network"), RED_A, &red, RED_B)?;
    // A first fragment towards a pod does not affect fragments that the pod sends.
    let back = parts(b, a, 3, payload);
    let [first, later] = [0, 1].map(|at| to(DEFAULT_A).frame(&back[at]));
    table.received(&name("first to the pod"), DEFAULT_A, &first, Delivered)?;
    table.received(&name("later to the pod"), DEFAULT_A, &later, Delivered)?;
    let from_b = from(DEFAULT_B).frame(&back[1]);
    table.sent(
        &name("later of the same from a pod"),
        DEFAULT_B,
        &from_b,
        FragmentWithoutFirst,
    )?;
    Ok(())
}

#[test]
fn fragments_alone_are_judged_by_what_they_show() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("lone fragments", |table| {
        for (a, b) in FAMILIES {
            // A later fragment has no ports, regardless of its content.
            let tail = ip(a, b).fragment(17, &[0; 8], 800, false);
            let tiny = ip(a, b).fragment(6, &[15, 160, 0, 80, 0, 0, 0, 1], 0, true);
            let opaque = ip(a, b).fragment(47, &[0; 8], 800, false);
            for (name, packet, expected) in [
                ("tail of an unseen datagram", tail, FragmentWithoutFirst),
                ("first with half a TCP header", tiny, Truncated),
                ("tail of a protocol without ports", opaque, Redirected),
            ] {
                table.fresh(
                    &format!("{name} from {a}"),
                    BLUE_A,
                    &from(BLUE_A).frame(&packet),
                    expected,
                )?;
            }
        }
        Ok(())
    })
}
