//! Tests changes of policies: they apply from the next packet on; replies are evaluated as their requests.

use anyhow::{Result, ensure};
use kni_common::Verdict::{Delivered, PassedToStack, PolicyEgress, PolicyExternal, PolicyIngress, Redirected};
use kni_integration::{
    frames::{Payload, TcpFlags},
    model::{ANYBODY, Allowed, Asked},
    require,
};

use super::{
    policy::select,
    table::{
        BLUE, BLUE_A, BLUE_B, DEFAULT, DEFAULT_A, FAMILIES, family, from, ip, outside_like, service, table, tcp, to,
        virtual_like,
    },
};

const NOTHING: u32 = 30;
const SENDS: u32 = 31;
const RECEIVES: u32 = 32;
const EVERYTHING: u32 = 33;

fn sets(step: &mut kni_integration::programs::Lockstep) -> Result<()> {
    let all = Allowed::Everything;
    for (set, asked) in [
        (SENDS, Asked::Egress),
        (SENDS, Asked::External),
        (RECEIVES, Asked::Ingress),
        (EVERYTHING, Asked::Egress),
        (EVERYTHING, Asked::Ingress),
        (EVERYTHING, Asked::External),
    ] {
        step.allow(set, ANYBODY, asked, all, 1)?;
    }
    Ok(())
}

/// The client may only send, the server may only receive: this suffices for a connection, and for every change that
/// preserves it.
#[test]
fn answers_are_judged_by_the_direction_that_was_asked_for() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("answers", |table| {
        sets(table.step)?;
        for (a, b) in FAMILIES {
            let name = |rest: &str| format!("{} {rest}", family(a));
            select(table.step, BLUE_A, SENDS)?;
            select(table.step, BLUE_B, RECEIVES)?;
            let ask = |flags| from(BLUE_A).frame(&tcp(a, b, flags));
            let answer = |flags| from(BLUE_B).frame(&ip(b, a).packet(&Payload::tcp(80, 4000, flags)));
            table.reaches(&name("SYN"), BLUE_A, &ask(TcpFlags::SYN), BLUE_B)?;
            table.reaches(&name("SYN+ACK"), BLUE_B, &answer(TcpFlags::SYN_ACK), BLUE_A)?;
            for changed in [BLUE_A, BLUE_B] {
                for set in [EVERYTHING, if changed == BLUE_A { SENDS } else { RECEIVES }] {
                    select(table.step, changed, set)?;
                    table.reaches(&name("answer behind a change"), BLUE_B, &answer(TcpFlags::ACK), BLUE_A)?;
                    select(table.step, changed, set)?;
                    table.reaches(&name("question behind a change"), BLUE_A, &ask(TcpFlags::ACK), BLUE_B)?;
                }
            }
            // These packets are not replies to a request.
            let own = |flags| from(BLUE_B).frame(&ip(b, a).packet(&Payload::tcp(80, 4001, flags)));
            table.sent(&name("the server's own SYN"), BLUE_B, &own(TcpFlags::SYN), PolicyEgress)?;
            table.sent(
                &name("what only looks like an answer"),
                BLUE_B,
                &own(TcpFlags::SYN_ACK),
                PolicyEgress,
            )?;
        }
        Ok(())
    })
}

#[test]
fn a_denying_policy_stops_the_next_packet_of_both_directions() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("denying changes", |table| {
        sets(table.step)?;
        for (a, b) in FAMILIES {
            let virt = virtual_like(a);
            table.step.serve((BLUE, virt, 6, 80), &service(1, &[(b, 8080)]))?;
            for (through, there, port) in [("direct", b, 8080), ("by service", virt, 80)] {
                table.step.flush()?;
                let name = |rest: &str| format!("{} {through} {rest}", family(a));
                let ask = |flags| from(BLUE_A).frame(&ip(a, there).packet(&Payload::tcp(4000, port, flags)));
                let answer = |flags| from(BLUE_B).frame(&ip(b, a).packet(&Payload::tcp(8080, 4000, flags)));
                table.sent(&name("SYN"), BLUE_A, &ask(TcpFlags::SYN), Redirected)?;
                table.sent(&name("SYN+ACK"), BLUE_B, &answer(TcpFlags::SYN_ACK), Redirected)?;
                for (changed, denial) in [(BLUE_A, PolicyEgress), (BLUE_B, PolicyIngress)] {
                    select(table.step, changed, NOTHING)?;
                    let known = table.step.model.flows.len();
                    table.sent(&name("data, denied"), BLUE_A, &ask(TcpFlags::ACK), denial)?;
                    table.sent(&name("answer, denied"), BLUE_B, &answer(TcpFlags::ACK), denial)?;
                    ensure!(table.step.model.flows.len() == known, "a denied packet opened a flow");
                    select(table.step, changed, 0)?;
                    table.sent(
                        &name("answer, allowed again"),
                        BLUE_B,
                        &answer(TcpFlags::ACK),
                        Redirected,
                    )?;
                    table.sent(&name("data, allowed again"), BLUE_A, &ask(TcpFlags::ACK), Redirected)?;
                }
            }
        }
        Ok(())
    })
}

/// A pod that may not receive anything still gets the replies to its requests, as long as the flow lives.
#[test]
fn an_answer_from_beyond_is_no_new_flow() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("answers from beyond", |table| {
        const ELSEWHERE: u32 = 2;
        sets(table.step)?;
        let lifetimes = table.step.model.lifetimes;
        for (a, _) in FAMILIES {
            let far = outside_like(a);
            let name = |rest: &str| format!("{} {rest}", family(a));
            select(table.step, DEFAULT_A, SENDS)?;
            let question = from(DEFAULT_A).frame(&ip(a, far).packet(&Payload::udp(4000, 53, b"")));
            let answer = to(DEFAULT_A).frame(&ip(far, a).packet(&Payload::udp(53, 4000, b"")));
            let get = |table: &mut super::table::Table<'_>, what: &str, expected| {
                table.forwarded(&name(what), ELSEWHERE, DEFAULT_A, &answer, expected)
            };
            get(table, "before anything was asked", PolicyIngress)?;
            table.sent(&name("question"), DEFAULT_A, &question, PassedToStack)?;
            get(table, "answer", Delivered)?;
            select(table.step, DEFAULT_A, SENDS)?;
            get(table, "answer behind a change", Delivered)?;
            select(table.step, DEFAULT_A, NOTHING)?;
            get(table, "answer, the question denied", PolicyEgress)?;
            select(table.step, DEFAULT_A, RECEIVES)?;
            get(table, "answer, the question denied once more", PolicyEgress)?;
            select(table.step, DEFAULT_A, SENDS)?;
            get(table, "answer, the question allowed again", Delivered)?;
            table.step.age(lifetimes.udp_established + 1000)?;
            get(table, "answer when the flow is over", PolicyIngress)?;
        }
        table
            .step
            .allow(NOTHING + 10, ANYBODY, Asked::Egress, Allowed::Everything, 1)?;
        select(table.step, DEFAULT_A, SENDS)?;
        let (a, far) = (FAMILIES[0].0, outside_like(FAMILIES[0].0));
        let question = from(DEFAULT_A).frame(&ip(a, far).packet(&Payload::udp(4000, 53, b"")));
        table.sent("question", DEFAULT_A, &question, PassedToStack)?;
        select(table.step, DEFAULT_A, NOTHING + 10)?;
        table.sent("question, leaving denied", DEFAULT_A, &question, PolicyExternal)?;
        Ok(())
    })
}

/// What is known about a peer of another node or an external host may change while its flows are established: its
/// labels, or the owner of its address.
#[test]
fn another_identity_of_a_peer_beyond_reaches_its_established_flows() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("identities beyond", |table| {
        const ELSEWHERE: u32 = 2;
        const FRIEND: u32 = 5;
        const SET: u32 = 35;
        for asked in [Asked::Ingress, Asked::Egress, Asked::External] {
            table.step.allow(SET, FRIEND, asked, Allowed::Everything, 1)?;
        }
        select(table.step, DEFAULT_A, SET)?;
        for (a, _) in FAMILIES {
            let far = outside_like(a);
            let prefix: ipnet::IpNet = far.into();
            let name = |rest: &str| format!("{} {rest}", family(a));
            let inbound = |flags| to(DEFAULT_A).frame(&ip(far, a).packet(&Payload::tcp(4000, 80, flags)));
            let reply = |flags| from(DEFAULT_A).frame(&ip(a, far).packet(&Payload::tcp(80, 4000, flags)));
            let outbound = from(DEFAULT_A).frame(&ip(a, far).packet(&Payload::udp(4000, 53, b"")));
            let network = DEFAULT;
            table.step.identify(network, prefix, FRIEND)?;
            let syn = inbound(TcpFlags::SYN);
            table.forwarded(&name("SYN of a friend"), ELSEWHERE, DEFAULT_A, &syn, Delivered)?;
            table.sent(&name("SYN+ACK"), DEFAULT_A, &reply(TcpFlags::SYN_ACK), PassedToStack)?;
            let data = inbound(TcpFlags::ACK);
            table.forwarded(&name("data of a friend"), ELSEWHERE, DEFAULT_A, &data, Delivered)?;
            table.sent(&name("question to a friend"), DEFAULT_A, &outbound, PassedToStack)?;
            table.step.identify(network, prefix, FRIEND + 1)?;
            table.forwarded(&name("data of a stranger"), ELSEWHERE, DEFAULT_A, &data, PolicyIngress)?;
            table.sent(
                &name("reply to a stranger"),
                DEFAULT_A,
                &reply(TcpFlags::ACK),
                PolicyIngress,
            )?;
            table.sent(&name("question to a stranger"), DEFAULT_A, &outbound, PolicyEgress)?;
            table.step.identify(network, prefix, FRIEND)?;
            table.forwarded(&name("a friend again"), ELSEWHERE, DEFAULT_A, &data, Delivered)?;
            table.sent(
                &name("reply to a friend again"),
                DEFAULT_A,
                &reply(TcpFlags::ACK),
                PassedToStack,
            )?;
            table.sent(&name("question to a friend again"), DEFAULT_A, &outbound, PassedToStack)?;
        }
        Ok(())
    })
}
