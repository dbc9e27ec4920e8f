//! Tests that policies do not affect link control: an isolated pod finds its gateway, and nothing else.

use anyhow::{Result, ensure};
use kni_common::Verdict::{Absorbed, Answered, PolicyEgress};
use kni_integration::{
    frames::{Payload, arp_request, neighbour_solicitation},
    require,
};

use super::{
    policy::select,
    table::{A4, A6, BLUE_A, BLUE_B, FAMILIES, from, ip, mac, table, udp},
};

/// A policy set without a row.
const DENY_ALL: u32 = 77;

#[test]
fn an_isolated_pod_finds_its_gateway() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("isolated link", |table| {
        for id in [BLUE_A, BLUE_B] {
            select(table.step, id, DENY_ALL)?;
        }
        let gateway6 = "fe80::1".parse()?;
        let asked = arp_request(mac(BLUE_A), A4, [169, 254, 1, 1].into());
        table.fresh("ARP for the gateway", BLUE_A, &asked, Answered)?;
        let asked = neighbour_solicitation(mac(BLUE_A), A6, gateway6);
        table.fresh("solicitation of the gateway", BLUE_A, &asked, Answered)?;
        // Duplicate address detection, router solicitation, listener report: dropped without an event and without a
        // delay.
        let probe = neighbour_solicitation(mac(BLUE_A), "::".parse()?, A6);
        table.fresh("duplicate address detection", BLUE_A, &probe, Absorbed)?;
        for (name, kind) in [("router solicitation", 133), ("listener report", 143)] {
            let body = vec![0; 20];
            let message = Payload::Icmp { kind, code: 0, body };
            let all: std::net::Ipv6Addr = "ff02::2".parse()?;
            let packet = ip(A6, all).hop_limit(255).packet(&message);
            table.fresh(name, BLUE_A, &from(BLUE_A).frame(&packet), Absorbed)?;
        }
        for (a, b) in FAMILIES {
            table.fresh("a datagram", BLUE_A, &from(BLUE_A).frame(&udp(a, b)), PolicyEgress)?;
            let echo = ip(a, b).packet(&Payload::echo_request(a.is_ipv4(), 7, 1, b"?"));
            table.fresh("an echo request", BLUE_A, &from(BLUE_A).frame(&echo), PolicyEgress)?;
        }
        ensure!(table.step.model.flows.is_empty(), "something of it became a flow");
        Ok(())
    })
}
