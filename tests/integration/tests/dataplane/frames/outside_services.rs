//! Tests frames of pods for Services at addresses outside of the cluster.

use std::net::IpAddr;

use anyhow::Result;
use kni_common::Verdict::{self, NoBackend, NoDestination, NoLocalBackend, NoRoute, NoService, PassedToStack};
use kni_integration::{
    frames::{Payload, TcpFlags},
    model::{ANYBODY, Allowed, Asked, Enforced, Service},
    require,
};

use super::table::{
    BLUE, BLUE_A, BLUE_B, DEFAULT, DEFAULT_A, DEFAULT_B, FAMILIES, RED_A, Table, UNUSED4, UNUSED6, family, from, ip,
    outside_like, service, table, virtual_like,
};

const CLIENT: u16 = 4000;
const FRONT: u16 = 80;
const BACK: u16 = 8080;
const OTHER: u16 = 81;
/// A policy set.
const SET: u32 = 9;

const PROTOCOLS: [u8; 3] = [6, 17, 132];

fn payload(protocol: u8, from: u16, to: u16) -> Payload {
    match protocol {
        6 => Payload::tcp(from, to, TcpFlags::SYN),
        17 => Payload::udp(from, to, b"some data"),
        _ => Payload::sctp_init(from, to),
    }
}

/// Serves every protocol at the address.
fn serve(table: &mut Table<'_>, network: u32, at: IpAddr, what: &Service) -> Result<()> {
    for (id, protocol) in (1..).zip(PROTOCOLS) {
        let service = Service { id, ..what.clone() };
        table.step.serve_outside((network, at, protocol, FRONT), &service)?;
    }
    Ok(())
}

/// In a network with access to the stack and in one without egress. The other ports of the address, and the other
/// networks, have it as it is without the Service.
#[test]
fn a_port_of_a_service_outside_leads_to_its_backend() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("addresses of load balancers", |table| {
        for (network, client, backend, otherwise) in [
            (DEFAULT, DEFAULT_A, DEFAULT_B, PassedToStack),
            (BLUE, BLUE_A, BLUE_B, NoRoute),
        ] {
            for (a, b) in FAMILIES {
                let outside = outside_like(a);
                let name = |rest: &str| format!("{} of {client}: {rest}", family(a));
                let unserved = from(RED_A).frame(&ip(a, outside).packet(&payload(17, CLIENT, FRONT)));
                serve(table, network, outside, &service(1, &[(b, BACK)]))?;
                for protocol in PROTOCOLS {
                    let question = from(client).frame(&ip(a, outside).packet(&payload(protocol, CLIENT, FRONT)));
                    let gotten = ip(a, b).packet(&payload(protocol, CLIENT, BACK));
                    for round in ["first", "known"] {
                        table.becomes(&name(round), client, &question, backend, &gotten)?;
                    }
                    let [answer, seen] = [(BACK, CLIENT), (FRONT, CLIENT)].map(|(from, to)| match protocol {
                        6 => Payload::tcp(from, to, TcpFlags::SYN_ACK),
                        _ => payload(protocol, from, to),
                    });
                    let answer = from(backend).frame(&ip(b, a).packet(&answer));
                    table.becomes(&name("answer"), backend, &answer, client, &ip(outside, a).packet(&seen))?;
                    let other = from(client).frame(&ip(a, outside).packet(&payload(protocol, CLIENT, OTHER)));
                    table.sent(&name("another port"), client, &other, otherwise)?;
                }
                let echo = Payload::echo_request(a.is_ipv4(), FRONT, 1, b"");
                let echo = from(client).frame(&ip(a, outside).packet(&echo));
                table.sent(&name("echo"), client, &echo, otherwise)?;
                table.sent(&name("from another network"), RED_A, &unserved, NoRoute)?;
            }
        }
        Ok(())
    })
}

/// Rows at addresses that are not outside lead nowhere.
#[test]
fn no_row_takes_an_address_of_the_networks() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("addresses that are not outside", |table| {
        for (a, b) in FAMILIES {
            let unused = if a.is_ipv4() { UNUSED4.into() } else { UNUSED6.into() };
            for (address, expected) in [
                (b, Verdict::Redirected),
                (unused, NoDestination),
                (virtual_like(a), NoService),
            ] {
                serve(table, DEFAULT, address, &service(1, &[(a, BACK)]))?;
                let frame = from(DEFAULT_A).frame(&ip(a, address).packet(&payload(17, CLIENT, FRONT)));
                table.sent(&format!("{address}"), DEFAULT_A, &frame, expected)?;
            }
        }
        Ok(())
    })
}

#[test]
fn without_a_backend_the_reasons_are_those_of_every_service() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("addresses of load balancers without backends", |table| {
        for (a, _) in FAMILIES {
            for (local_only, expected) in [(false, NoBackend), (true, NoLocalBackend)] {
                let service = Service {
                    local_only,
                    ..service(1, &[])
                };
                serve(table, DEFAULT, outside_like(a), &service)?;
                let frame = from(DEFAULT_A).frame(&ip(a, outside_like(a)).packet(&payload(17, CLIENT, FRONT)));
                table.sent(family(a), DEFAULT_A, &frame, expected)?;
            }
        }
        Ok(())
    })
}

/// The backend's policy holds, as behind a virtual address.
#[test]
fn policies_evaluate_the_backend() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("policies of load balancers", |table| {
        for (a, b) in FAMILIES {
            serve(table, DEFAULT, outside_like(a), &service(1, &[(b, BACK)]))?;
            let frame = from(DEFAULT_A).frame(&ip(a, outside_like(a)).packet(&payload(17, CLIENT, FRONT)));
            table.fresh("without a policy", DEFAULT_A, &frame, Verdict::Redirected)?;
            for (asked, allowed, rule) in [
                (Asked::Egress, Allowed::Everything, 1),
                (Asked::Ingress, Allowed::Nothing, 0),
            ] {
                table.step.allow(SET, ANYBODY, asked, allowed, rule)?;
            }
            let isolated = Enforced {
                policy: SET,
                ..Enforced::default()
            };
            table.step.enforce(DEFAULT_B, isolated)?;
            table.fresh(family(a), DEFAULT_A, &frame, Verdict::PolicyIngress)?;
            table.step.enforce(DEFAULT_B, Enforced::default())?;
        }
        Ok(())
    })
}
