//! Tests the choice among several backends of a flow.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::{Result, ensure};
use kni_common::Verdict::Redirected;
use kni_integration::{
    frames::{Payload, TcpFlags},
    model::Service,
    require,
};

use super::table::{A4, B4, DEFAULT, DEFAULT_A, Table, VIRTUAL4, from, ip, service, table};

const THIRD: [u8; 4] = [10, 0, 0, 7];

fn two() -> Service {
    service(7, &[(IpAddr::from(B4), 8080), (THIRD.into(), 8080)])
}

/// The number of new flows per backend address; only UDP opens one with each first packet.
fn spread(table: &mut Table<'_>, ports: std::ops::Range<u16>) -> Result<BTreeMap<Vec<u8>, u32>> {
    let mut found = BTreeMap::new();
    for port in ports {
        let frame = from(DEFAULT_A).frame(&ip(A4, VIRTUAL4).packet(&Payload::udp(port, 80, b"")));
        let out = table.sent(&format!("from port {port}"), DEFAULT_A, &frame, Redirected)?;
        *found.entry(out[30..34].to_vec()).or_default() += 1;
    }
    Ok(found)
}

#[test]
fn without_affinity_every_backend_gets_flows() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("backends", |table| {
        table.step.serve((DEFAULT, VIRTUAL4.into(), 17, 80), &two())?;
        let found = spread(table, 5000..5128)?;
        // Fewer than 32 of 128 coin tosses: probability 10^-9.
        ensure!(
            found.len() == 2 && found.values().all(|count| *count >= 32),
            "{found:?}"
        );
        Ok(())
    })
}

#[test]
fn a_client_stays_with_its_backend_for_the_time_of_affinity() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("affinity", |table| {
        const HOUR: u32 = 1_000_000;
        let sticky = Service {
            affinity: HOUR,
            ..two()
        };
        table.step.serve((DEFAULT, VIRTUAL4.into(), 17, 80), &sticky)?;
        let first = spread(table, 5000..5010)?;
        ensure!(first.len() == 1, "{first:?}");
        // Each use restarts the timeout.
        for start in [5010, 5020, 5030] {
            table.step.age(HOUR / 4 * 3)?;
            let later = spread(table, start..start + 10)?;
            ensure!(first.keys().eq(later.keys()), "{first:?}, then {later:?}");
        }
        // The affinity has expired: both backends are chosen within 40 flows.
        let mut all = BTreeMap::new();
        for start in 6000..6040 {
            table.step.age(HOUR + HOUR / 4)?;
            all.extend(spread(table, start..start + 1)?);
        }
        ensure!(all.len() == 2, "{all:?}");
        Ok(())
    })
}

/// The answer to the first SYN may still be in transit.
#[test]
fn a_repeated_syn_stays_with_its_backend() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("repeated SYN", |table| {
        table.step.serve((DEFAULT, VIRTUAL4.into(), 6, 80), &two())?;
        for port in 5000..5008 {
            let syn = from(DEFAULT_A).frame(&ip(A4, VIRTUAL4).packet(&Payload::tcp(port, 80, TcpFlags::SYN)));
            let first = table.sent("SYN", DEFAULT_A, &syn, Redirected)?;
            for _ in 0..10 {
                let again = table.sent("the same again", DEFAULT_A, &syn, Redirected)?;
                ensure!(again == first, "a repeated SYN went to another backend");
            }
        }
        Ok(())
    })
}
