//! Tests the fast path of networks with `spec.xdp`: the frames that it handles; all others are passed to `from_pod`.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use kni_common::Verdict;
use kni_integration::{
    frames::{Extension, Payload, TcpFlags},
    model::Enforced,
    require,
};

use super::table::{BLUE_A, BLUE_B, FAMILIES, RED_A, Table, endpoint, family, from, ip, table, tcp, to, udp};

/// A frame that the fast path redirects to the other pod, changed only in the MAC addresses.
fn goes(table: &mut Table<'_>, name: &str, there: u32, frame: &[u8], receiver: u32) -> Result<()> {
    let sent = table.step.run_xdp(there, frame)?;
    let mut expected = frame.to_vec();
    expected[..12].copy_from_slice(&to(receiver).frame(&[])[..12]);
    ensure!(
        sent == Some((receiver, expected)),
        "{name}: {sent:02x?} instead of the fast way to {receiver}"
    );
    Ok(())
}

/// A frame that is passed to `from_pod`.
fn stays(table: &mut Table<'_>, name: &str, there: u32, frame: &[u8]) -> Result<()> {
    let sent = table.step.run_xdp(there, frame)?;
    ensure!(sent.is_none(), "{name}: {sent:02x?}");
    Ok(())
}

/// Opens a flow of datagrams with packets in both directions.
fn converse(table: &mut Table<'_>, [a, b]: [u32; 2], question: &[u8], answer: &[u8]) -> Result<()> {
    table.step.flush()?;
    stays(table, "the first datagram", a, question)?;
    table.reaches("the first datagram", a, question, b)?;
    goes(table, "another one before the answer", a, question, b)?;
    stays(table, "the first answer", b, answer)?;
    table.reaches("the first answer", b, answer, a)
}

#[test]
fn datagrams_of_a_judged_flow_go_the_fast_way() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("xdp_pod", |table| {
        for (a, b) in FAMILIES {
            let (question, answer) = (from(BLUE_A).frame(&udp(a, b)), from(BLUE_B).frame(&reply(a, b)));
            converse(table, [BLUE_A, BLUE_B], &question, &answer)?;
            for _ in 0..3 {
                goes(table, "a question", BLUE_A, &question, BLUE_B)?;
                goes(table, "an answer", BLUE_B, &answer, BLUE_A)?;
            }
            let mut padded = question.clone();
            padded.extend([0xa5; 30]);
            goes(table, "with padding behind", BLUE_A, &padded, BLUE_B)?;
            // Packets of the fast path refresh the flow like those of the slow path.
            table.reaches("the slow way", BLUE_A, &question, BLUE_B)?;
            // The same frame with other MAC addresses belongs to another network.
            stays(table, "equal addresses in red", RED_A, &from(RED_A).frame(&udp(a, b)))?;
        }
        Ok(())
    })
}

/// The reply to the datagram of [`udp`].
fn reply(a: IpAddr, b: IpAddr) -> Vec<u8> {
    ip(b, a).packet(&Payload::udp(53, 4000, b"data"))
}

/// Frames of a known flow with one modification each, by name.
fn changed(a: IpAddr, b: IpAddr) -> Vec<(&'static str, Vec<u8>)> {
    let whole = from(BLUE_A).frame(&udp(a, b));
    let datagram = Payload::udp(4000, 53, b"data");
    let with = |at: usize, value: u8| {
        let mut frame = whole.clone();
        frame[at] = value;
        frame
    };
    let length = if a.is_ipv4() { 17 } else { 19 };
    let mut frames = vec![
        ("somebody else's source MAC", with(6, 0x66)),
        ("not to the gateway", with(0, 0x66)),
        ("another source address", from(BLUE_A).frame(&udp(b, b))),
        ("a VLAN tag", from(BLUE_A).vlan(7).frame(&udp(a, b))),
        ("another EtherType", with(12, 0x88)),
        ("cut short", whole[..whole.len() - 1].to_vec()),
        (
            "shorter than a UDP header",
            with(length, if a.is_ipv4() { 27 } else { 7 }),
        ),
        ("longer than the frame", with(length, 0xff)),
        (
            "another port",
            from(BLUE_A).frame(&ip(a, b).packet(&Payload::udp(4001, 53, b"data"))),
        ),
        ("another version", with(14, 0x55)),
        (
            "TCP between the same ports",
            from(BLUE_A).frame(&tcp(a, b, TcpFlags::ACK)),
        ),
    ];
    if a.is_ipv4() {
        frames.push((
            "options",
            from(BLUE_A).frame(&ip(a, b).options(&[1; 4]).packet(&datagram)),
        ));
        frames.push(("more fragments", with(20, 0x20)));
        frames.push(("a later fragment", with(21, 1)));
    } else {
        let padding = Extension::DestinationOptions(vec![1, 4, 0, 0, 0, 0]);
        let extended = ip(a, b).extension(padding).packet(&datagram);
        frames.push(("an extension header", from(BLUE_A).frame(&extended)));
    }
    frames
}

#[test]
fn everything_else_is_left_to_from_pod() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("xdp_pod_else", |table| {
        for (a, b) in FAMILIES {
            let question = from(BLUE_A).frame(&udp(a, b));
            converse(table, [BLUE_A, BLUE_B], &question, &from(BLUE_B).frame(&reply(a, b)))?;
            for (name, frame) in changed(a, b) {
                stays(table, &format!("{} {name}", family(a)), BLUE_A, &frame)?;
            }
            goes(table, "as it was", BLUE_A, &question, BLUE_B)?;
        }
        Ok(())
    })
}

#[test]
fn a_flow_leaves_the_fast_way_when_its_ends_change() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("xdp_pod_ends", |table| {
        for (a, b) in FAMILIES {
            let (question, answer) = (from(BLUE_A).frame(&udp(a, b)), from(BLUE_B).frame(&reply(a, b)));
            for id in [BLUE_A, BLUE_B] {
                converse(table, [BLUE_A, BLUE_B], &question, &answer)?;
                // Another policy, which allows nothing, and then none.
                for policy in [77, 0] {
                    table.step.enforce(
                        id,
                        Enforced {
                            policy,
                            ..Enforced::default()
                        },
                    )?;
                    stays(table, "under another policy", BLUE_A, &question)?;
                    stays(table, "under another policy, answer", BLUE_B, &answer)?;
                }
                table.reaches("judged again", BLUE_A, &question, BLUE_B)?;
                goes(table, "fast again", BLUE_A, &question, BLUE_B)?;
                table.step.set_ready(id, false)?;
                stays(table, "an end that is not ready", BLUE_A, &question)?;
                table.step.set_ready(id, true)?;
                // Another owner of the same row.
                table.step.publish(id, &endpoint(id))?;
                stays(table, "another owner", BLUE_A, &question)?;
            }
            table.fresh("opens anew", BLUE_A, &question, Verdict::Redirected)?;
        }
        Ok(())
    })
}
