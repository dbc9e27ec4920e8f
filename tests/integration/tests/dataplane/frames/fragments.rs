//! Tests fragments: later ones are treated as the first one, within network and direction.

use std::net::IpAddr;

use super::table::{
    A6, B6, BLUE_A, BLUE_B, DEFAULT_A, DEFAULT_B, FAMILIES, RED_A, RED_B, Table, UNUSED4, UNUSED6, from, ip, table, to,
};
use anyhow::Result;
use kni_common::{
    IFINDEX_BASE,
    Verdict::{Delivered, FragmentWithoutFirst, HostNotAllowed, NoDestination, Redirected, Truncated},
};
use kni_integration::{
    frames::{Payload, TcpFlags},
    require,
};

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
    let ingress = IFINDEX_BASE + DEFAULT_B;
    table.forwarded(&name("first to the pod"), ingress, DEFAULT_A, &first, Delivered)?;
    table.forwarded(&name("later to the pod"), ingress, DEFAULT_A, &later, Delivered)?;
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

/// The two fragments of an IPv6 datagram whose transport header lies behind destination options in the first.
fn with_options(source: IpAddr, destination: IpAddr) -> [Vec<u8>; 2] {
    let options = [17, 0, 1, 4, 0, 0, 0, 0];
    let header = [4000_u16, 53, 24, 0].map(u16::to_be_bytes).concat();
    let fragment = |bytes: &[u8], offset, more| {
        let mut whole = ip(source, destination);
        whole.id = 9;
        whole.fragment(60, bytes, offset, more)
    };
    [
        fragment(&[&options[..], &header].concat(), 0, true),
        fragment(&[7; 16], 16, false),
    ]
}

#[test]
fn later_fragments_have_the_protocol_of_their_first() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("fragments with options", |table| {
        let [first, later] = with_options(A6.into(), B6.into()).map(|packet| from(BLUE_A).frame(&packet));
        table.sent("later before the first", BLUE_A, &later, FragmentWithoutFirst)?;
        table.reaches("first", BLUE_A, &first, BLUE_B)?;
        table.reaches("later", BLUE_A, &later, BLUE_B)?;
        Ok(())
    })
}

#[test]
fn a_refused_first_fragment_vouches_for_nothing() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("refused fragments", |table| {
        let payload = Payload::udp(4000, 53, &[7; 60]);
        for (a, b) in FAMILIES {
            let unused = if a.is_ipv4() { UNUSED4.into() } else { UNUSED6.into() };
            let packets = parts(a, unused, 1, &payload);
            let frame = |at: usize| from(BLUE_A).frame(&packets[at]);
            table.sent("first to an address without a pod", BLUE_A, &frame(0), NoDestination)?;
            table.sent(
                "later to an address without a pod",
                BLUE_A,
                &frame(1),
                FragmentWithoutFirst,
            )?;
            let packets = parts(b, a, 2, &payload);
            let frame = |at: usize| to(BLUE_A).frame(&packets[at]);
            table.received("first from the stack", BLUE_A, &frame(0), HostNotAllowed)?;
        }
        Ok(())
    })
}

#[test]
fn a_first_fragment_vouches_for_half_a_minute() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("old fragments", |table| {
        let hz = table.step.programs().dataplane().hz();
        let payload = Payload::udp(4000, 53, &[7; 60]);
        for (a, b) in FAMILIES {
            table.step.flush()?;
            let packets = parts(a, b, 1, &payload);
            let frame = |at: usize| from(BLUE_A).frame(&packets[at]);
            table.reaches("first", BLUE_A, &frame(0), BLUE_B)?;
            table.step.age(29 * hz)?;
            table.reaches("later after 29 s", BLUE_A, &frame(1), BLUE_B)?;
            table.step.age(2 * hz)?;
            table.sent("later after 31 s", BLUE_A, &frame(2), FragmentWithoutFirst)?;
        }
        Ok(())
    })
}
