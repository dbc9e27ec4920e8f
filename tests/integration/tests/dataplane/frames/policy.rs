//! Tests policies: peers, ports and directions, evaluated for both sides at the sender.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use kni_common::{
    IFINDEX_BASE,
    Verdict::{Delivered, PassedToStack, PolicyEgress, PolicyExternal, PolicyIngress, Redirected, SourceAddress},
};
use kni_integration::{
    frames::{Payload, TcpFlags},
    model::{ANYBODY, Allowed, Asked, Enforced, PortRow},
    programs::Lockstep,
    require,
};

use super::table::{
    A4, A6, BLUE, BLUE_A, BLUE_B, DEFAULT, DEFAULT_A, DEFAULT_B, FAMILIES, family, from, ip, outside_like, service,
    table, tcp, to, udp, virtual_like,
};

const SET: u32 = 20;
/// Identities, and a port set.
const FRIEND: u32 = 5;
const PORTS: u32 = 9;
/// An interface without an endpoint.
const ELSEWHERE: u32 = 2;

/// Enforces a policy set.
pub(crate) fn select(step: &mut Lockstep, id: u32, policy: u32) -> Result<()> {
    let known = step.model.world.enforced(id).unwrap_or_default();
    step.enforce(id, Enforced { policy, ..known })
}

/// Assigns an identity to both addresses of an endpoint.
fn know(step: &mut Lockstep, id: u32, identity: u32) -> Result<()> {
    let known = step.model.world.enforced(id).unwrap_or_default();
    let enforced = Enforced {
        identity4: identity,
        identity6: identity,
        ..known
    };
    step.enforce(id, enforced)
}

const EVERY: [Asked; 3] = [Asked::Egress, Asked::Ingress, Asked::External];

#[test]
fn no_row_is_a_denial_and_a_denied_packet_opens_no_flow() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("default deny", |table| {
        for (a, b) in FAMILIES {
            let name = |rest: &str| format!("{} {rest}", family(a));
            let frame = from(BLUE_A).frame(&udp(a, b));
            select(table.step, BLUE_A, SET)?;
            table.fresh(&name("from an isolated pod"), BLUE_A, &frame, PolicyEgress)?;
            select(table.step, BLUE_A, 0)?;
            select(table.step, BLUE_B, SET)?;
            table.sent(&name("to an isolated pod"), BLUE_A, &frame, PolicyIngress)?;
            let syn = from(BLUE_A).frame(&tcp(a, b, TcpFlags::SYN));
            table.sent(&name("SYN to an isolated pod"), BLUE_A, &syn, PolicyIngress)?;
            select(table.step, DEFAULT_A, SET)?;
            let beyond = from(DEFAULT_A).frame(&udp(a, outside_like(a)));
            table.sent(&name("from an isolated pod beyond"), DEFAULT_A, &beyond, PolicyEgress)?;
            let asked = to(DEFAULT_A).frame(&udp(outside_like(a), a));
            table.forwarded(
                &name("to an isolated pod from beyond"),
                ELSEWHERE,
                DEFAULT_A,
                &asked,
                PolicyIngress,
            )?;
            ensure!(table.step.model.flows.is_empty(), "a denied packet opened a flow");
            table.step.compare_tables()?;
            for id in [BLUE_B, DEFAULT_A] {
                select(table.step, id, 0)?;
            }
            table.reaches(&name("with nobody isolated"), BLUE_A, &frame, BLUE_B)?;
        }
        Ok(())
    })
}

/// A row for the peer's own identity takes precedence over the wildcard row.
#[test]
fn the_own_identity_comes_before_everybody() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("identities", |table| {
        for asked in EVERY {
            table.step.allow(SET, ANYBODY, asked, Allowed::Everything, 1)?;
            table.step.allow(SET, FRIEND, asked, Allowed::Nothing, 0)?;
            table.step.allow(SET + 1, FRIEND, asked, Allowed::Everything, 2)?;
        }
        for (set, allowed) in [(SET, [true, false]), (SET + 1, [false, true])] {
            for (identity, allowed) in [ANYBODY, FRIEND].into_iter().zip(allowed) {
                for (a, b) in FAMILIES {
                    let name = |rest: &str| format!("{} set {set}, identity {identity}, {rest}", family(a));
                    let frame = from(BLUE_A).frame(&udp(a, b));
                    for (selected, peer, denial) in [(BLUE_A, BLUE_B, PolicyEgress), (BLUE_B, BLUE_A, PolicyIngress)] {
                        select(table.step, selected, set)?;
                        know(table.step, peer, identity)?;
                        let expected = if allowed { Redirected } else { denial };
                        table.fresh(&name("between pods"), BLUE_A, &frame, expected)?;
                        select(table.step, selected, 0)?;
                        know(table.step, peer, 0)?;
                    }
                }
            }
        }
        Ok(())
    })
}

/// The longest prefix of an external address determines its identity, in its network only.
#[test]
fn addresses_beyond_have_identities_too() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("addresses beyond", |table| {
        for asked in EVERY {
            table.step.allow(SET, FRIEND, asked, Allowed::Everything, 1)?;
            table.step.allow(SET, FRIEND + 1, asked, Allowed::Nothing, 0)?;
        }
        table
            .step
            .allow(SET + 1, ANYBODY, Asked::Egress, Allowed::Everything, 1)?;
        for prefix in ["198.51.100.0/24", "2001:db8::/32"] {
            table.step.identify(DEFAULT, prefix.parse()?, FRIEND)?;
            table.step.identify(BLUE, prefix.parse()?, FRIEND + 1)?;
        }
        for prefix in ["198.51.100.64/26", "2001:db8:40::/48"] {
            table.step.identify(DEFAULT, prefix.parse()?, FRIEND + 1)?;
        }
        select(table.step, DEFAULT_A, SET)?;
        let both = |own: IpAddr, v4: &str, v6: &str| -> Result<IpAddr> {
            Ok(if own.is_ipv4() { v4.parse()? } else { v6.parse()? })
        };
        for (a, _) in FAMILIES {
            let name = |rest: &str| format!("{} {rest}", family(a));
            let friend = both(a, "198.51.100.9", "2001:db8::9")?;
            let except = both(a, "198.51.100.65", "2001:db8:40::1")?;
            let stranger = both(a, "203.0.113.1", "2001:dbf::1")?;
            for (what, peer, sent, received) in [
                ("an allowed address", friend, PassedToStack, Delivered),
                ("an exception", except, PolicyEgress, PolicyIngress),
                ("a stranger", stranger, PolicyEgress, PolicyIngress),
            ] {
                table.fresh(&name(what), DEFAULT_A, &from(DEFAULT_A).frame(&udp(a, peer)), sent)?;
                table.step.flush()?;
                let frame = to(DEFAULT_A).frame(&udp(peer, a));
                table.forwarded(&name(what), ELSEWHERE, DEFAULT_A, &frame, received)?;
            }
            select(table.step, DEFAULT_B, SET + 1)?;
            let own: IpAddr = if a.is_ipv4() {
                super::table::B4.into()
            } else {
                super::table::B6.into()
            };
            let leaves = from(DEFAULT_B).frame(&udp(own, friend));
            table.fresh(&name("sending, but not leaving"), DEFAULT_B, &leaves, PolicyExternal)?;
        }
        Ok(())
    })
}

#[test]
fn ports_match_by_their_longest_prefix() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("ports", |table| {
        let row = |protocol, port, ordinal, allow| PortRow {
            protocol,
            port,
            ordinal,
            allow,
        };
        // UDP 4096 to 8191 without 5000; every TCP port except 80; nothing else.
        let rows = [
            row(Some(17), (4096, 4), 0, true),
            row(Some(17), (5000, 16), 1, false),
            row(Some(6), (0, 0), 2, true),
            row(Some(6), (80, 16), 3, false),
        ];
        table.step.set_ports(PORTS, &rows)?;
        table.step.set_ports(
            PORTS + 1,
            &[row(None, (0, 0), 0, true), row(Some(132), (0, 0), 1, false)],
        )?;
        for set in [0, 1] {
            table
                .step
                .allow(SET + set, ANYBODY, Asked::Ingress, Allowed::Ports(PORTS + set), 3)?;
        }
        for (a, b) in FAMILIES {
            select(table.step, BLUE_B, SET)?;
            let mut case = |what: &str, payload: Payload, allowed: bool| {
                let expected = if allowed { Redirected } else { PolicyIngress };
                let frame = from(BLUE_A).frame(&ip(a, b).packet(&payload));
                table.fresh(&format!("{} {what}", family(a)), BLUE_A, &frame, expected)
            };
            for (port, allowed) in [
                (4095, false),
                (4096, true),
                (5000, false),
                (5001, true),
                (8191, true),
                (8192, false),
            ] {
                case(&format!("UDP {port}"), Payload::udp(4096, port, b""), allowed)?;
            }
            for (port, allowed) in [(79, true), (80, false), (81, true)] {
                case(&format!("TCP {port}"), Payload::tcp(80, port, TcpFlags::SYN), allowed)?;
            }
            case("SCTP", Payload::sctp_init(80, 4096), false)?;
            case("echo", Payload::echo_request(a.is_ipv4(), 4096, 1, b""), false)?;
            select(table.step, BLUE_B, SET + 1)?;
            let echo = from(BLUE_A).frame(&ip(a, b).packet(&Payload::echo_request(a.is_ipv4(), 1, 1, b"")));
            table.fresh("echo where every protocol is allowed", BLUE_A, &echo, Redirected)?;
            let sctp = from(BLUE_A).frame(&ip(a, b).packet(&Payload::sctp_init(80, 81)));
            table.fresh("SCTP where it is taken out", BLUE_A, &sctp, PolicyIngress)?;
        }
        Ok(())
    })
}

/// Policies apply to the backend and its port, not to the virtual address.
#[test]
fn a_service_is_judged_as_its_backend() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("policies behind services", |table| {
        let row = |port| PortRow {
            protocol: Some(17),
            port: (port, 16),
            ordinal: 0,
            allow: true,
        };
        table.step.set_ports(PORTS, &[row(8080)])?;
        table.step.set_ports(PORTS + 1, &[row(80)])?;
        for set in [0, 1] {
            table
                .step
                .allow(SET + set, FRIEND, Asked::Egress, Allowed::Ports(PORTS + set), 1)?;
            table
                .step
                .allow(SET + set, ANYBODY, Asked::Ingress, Allowed::Ports(PORTS + set), 1)?;
        }
        know(table.step, BLUE_B, FRIEND)?;
        for (a, b) in FAMILIES {
            let virt = virtual_like(a);
            table.step.serve((BLUE, virt, 17, 80), &service(1, &[(b, 8080)]))?;
            let frame = from(BLUE_A).frame(&ip(a, virt).packet(&Payload::udp(4000, 80, b"")));
            for (selected, denial) in [(BLUE_A, PolicyEgress), (BLUE_B, PolicyIngress)] {
                select(table.step, selected, SET)?;
                let name = format!("{} the backend's port is allowed", family(a));
                table.fresh(&name, BLUE_A, &frame, Redirected)?;
                select(table.step, selected, SET + 1)?;
                let name = format!("{} the service's port is allowed", family(a));
                table.fresh(&name, BLUE_A, &frame, denial)?;
                select(table.step, selected, 0)?;
            }
            // No policy applies between a pod and itself.
            table.step.serve((BLUE, virt, 17, 80), &service(1, &[(a, 8080)]))?;
            select(table.step, BLUE_A, SET + 2)?;
            let name = format!("{} to itself, isolated", family(a));
            table.fresh(&name, BLUE_A, &frame, Redirected)?;
            select(table.step, BLUE_A, 0)?;
        }
        Ok(())
    })
}

/// The identity is that of the backend, which a service with an address of the pods' range would hide otherwise.
#[test]
fn a_service_is_evaluated_as_its_backend_outside() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("policies behind services to outside", |table| {
        for prefix in ["198.51.100.0/24", "2001:db8::/32"] {
            table.step.identify(DEFAULT, prefix.parse()?, FRIEND)?;
        }
        for asked in [Asked::Egress, Asked::External] {
            table.step.allow(SET, FRIEND, asked, Allowed::Everything, 1)?;
            table.step.allow(SET + 1, ANYBODY, asked, Allowed::Everything, 1)?;
            table.step.allow(SET + 1, FRIEND, asked, Allowed::Nothing, 0)?;
        }
        for (a, _) in FAMILIES {
            let virt = virtual_like(a);
            let backend = (outside_like(a), 8080);
            table.step.serve((DEFAULT, virt, 17, 80), &service(1, &[backend]))?;
            let frame = from(DEFAULT_A).frame(&ip(a, virt).packet(&Payload::udp(4000, 80, b"")));
            for (set, what, expected) in [
                (SET, "only the backend is allowed", PassedToStack),
                (SET + 1, "only the backend is denied", PolicyEgress),
            ] {
                select(table.step, DEFAULT_A, set)?;
                let name = format!("{} {what}", family(a));
                table.fresh(&name, DEFAULT_A, &frame, expected)?;
            }
        }
        Ok(())
    })
}

/// Probes of the kubelet must reach a pod under all policies; no other peer is exempt.
#[test]
fn the_node_always_reaches_its_pods_and_gets_answers() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("the node's own traffic", |table| {
        select(table.step, DEFAULT_A, SET)?;
        for (a, _) in FAMILIES {
            let node = outside_like(a);
            let name = |rest: &str| format!("{} {rest}", family(a));
            let probe = to(DEFAULT_A).frame(&tcp(node, a, TcpFlags::SYN));
            table.forwarded(&name("from beyond"), ELSEWHERE, DEFAULT_A, &probe, PolicyIngress)?;
            table.received(&name("from the node"), DEFAULT_A, &probe, Delivered)?;
            let answer = from(DEFAULT_A).frame(&ip(a, node).packet(&Payload::tcp(80, 4000, TcpFlags::SYN_ACK)));
            table.sent(&name("its answer"), DEFAULT_A, &answer, PassedToStack)?;
            // Also after a change of policy.
            select(table.step, DEFAULT_A, SET)?;
            table.sent(&name("its answer behind a change"), DEFAULT_A, &answer, PassedToStack)?;
            let ack = to(DEFAULT_A).frame(&tcp(node, a, TcpFlags::ACK));
            select(table.step, DEFAULT_A, SET)?;
            table.received(&name("ACK behind a change"), DEFAULT_A, &ack, Delivered)?;
        }
        Ok(())
    })
}

/// The address of a pod is valid only at the pod's own interface, that of a service nowhere.
#[test]
fn a_local_source_counts_from_its_own_interface_only() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("sources through the stack", |table| {
        for (a, b) in FAMILIES {
            let name = |rest: &str| format!("{} {rest}", family(a));
            let mut case = |what: &str, ingress, source: IpAddr, expected| {
                table.step.flush()?;
                let frame = to(DEFAULT_A).frame(&udp(source, a));
                table.forwarded(&name(what), ingress, DEFAULT_A, &frame, expected)
            };
            case("from its own interface", IFINDEX_BASE + DEFAULT_B, b, Delivered)?;
            case("from another pod's", IFINDEX_BASE + BLUE_B, b, SourceAddress)?;
            case("from the uplink", ELSEWHERE, b, SourceAddress)?;
            case(
                "nobody's address from the uplink",
                ELSEWHERE,
                outside_like(a),
                Delivered,
            )?;
        }
        for (own, virt) in [
            (IpAddr::from(A4), virtual_like(A4.into())),
            (A6.into(), virtual_like(A6.into())),
        ] {
            table.step.serve((DEFAULT, virt, 17, 80), &service(1, &[(own, 8080)]))?;
            let frame = to(DEFAULT_A).frame(&udp(virt, own));
            table.forwarded("a service's address", ELSEWHERE, DEFAULT_A, &frame, SourceAddress)?;
        }
        Ok(())
    })
}
