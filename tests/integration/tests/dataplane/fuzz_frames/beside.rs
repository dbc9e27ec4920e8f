//! Generates random policies and services.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::Result;
use fastrand::Rng;
use ipnet::IpNet;
use kni_integration::{
    model::{ANYBODY, Allowed, Asked, Backend, Enforced, Front, Lifetimes, PortRow, Service, World},
    programs::{INTERFACES, Lockstep},
};

use super::addresses::{HOSTS, address4, address6};

/// Ticks of one time step. Every lifetime ends halfway between two steps, far from the duration of the run itself.
pub(super) const STEP: u32 = 1_000_000;

/// See [`STEP`].
pub(super) const LIFETIMES: Lifetimes = Lifetimes {
    tcp_new: STEP * 5 / 2,
    tcp_established: STEP * 13 / 2,
    tcp_closing: STEP * 3 / 2,
    other_new: STEP * 3 / 2,
    udp_replied: STEP * 5 / 2,
    udp_established: STEP * 9 / 2,
    sctp_established: STEP * 11 / 2,
    other_established: STEP * 7 / 2,
};

/// A second for fragments, which live for thirty: two and a half steps, as flows do.
pub(super) const SECOND: u32 = STEP / 12;

const SETS: u32 = 6;
const PORT_SETS: std::ops::Range<u32> = 10..14;
const IDENTITIES: u32 = 4;
/// Prefixes outside of the node, and their first identities.
const OUTSIDE: [(&str, u32); 4] = [
    ("198.51.100.0/24", 1),
    ("198.51.100.2/32", 2),
    ("2001:db8::/32", 1),
    ("2001:db8::3/128", 3),
];
/// Virtual addresses of each family.
pub(super) const VIRTUAL: u32 = 3;

/// Ranges of virtual addresses.
pub(super) fn ranges() -> [IpNet; 2] {
    [
        IpNet::new_assert(virtual4(0).into(), 24),
        IpNet::new_assert(virtual6(0).into(), 64),
    ]
}

pub(super) fn virtual4(host: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 96, 0, 0)) + host)
}

pub(super) fn virtual6(host: u32) -> Ipv6Addr {
    Ipv6Addr::from(u128::from(Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, 0)) + u128::from(host))
}

fn pick<T: Copy>(rng: &mut Rng, from: &[T]) -> T {
    from[rng.usize(0..from.len())]
}

/// Creates policy sets, identities, and a few services.
pub(super) fn begin(rng: &mut Rng, step: &mut Lockstep, networks: u32) -> Result<()> {
    step.configure(LIFETIMES, 0, 0)?;
    step.set_second(SECOND)?;
    for ports in PORT_SETS {
        let rows: Vec<PortRow> = (0..rng.u16(1..5)).map(|ordinal| port_row(rng, ordinal)).collect();
        step.set_ports(ports, &distinct(rows))?;
    }
    for set in 1..=SETS {
        for asked in [Asked::Egress, Asked::Ingress, Asked::External] {
            for identity in ANYBODY..IDENTITIES {
                if identity != ANYBODY && rng.bool() {
                    continue;
                }
                let rule = rng.u32(0..5);
                let allowed = match rng.u32(0..10) {
                    0 => Allowed::Nothing,
                    1..=3 => Allowed::Ports(rng.u32(PORT_SETS)),
                    _ => Allowed::Everything,
                };
                step.allow(set, identity, asked, allowed, rule)?;
            }
        }
    }
    for network in 1..=networks {
        for (prefix, identity) in OUTSIDE {
            step.identify(network, prefix.parse()?, identity)?;
        }
    }
    for _ in 0..30 {
        serve(rng, step, networks)?;
    }
    Ok(())
}

fn port_row(rng: &mut Rng, ordinal: u16) -> PortRow {
    let protocol = pick(rng, &[None, Some(6), Some(17), Some(132)]);
    let bits = if protocol.is_none() { 0 } else { pick(rng, &[0, 14, 16]) };
    let port = if bits == 0 {
        0
    } else {
        pick(rng, &[80, 4000]) >> (16 - bits) << (16 - bits)
    };
    PortRow {
        protocol,
        port: (port, bits),
        ordinal,
        allow: rng.u32(0..4) > 0,
    }
}

/// One row per prefix, because the table has no more.
fn distinct(rows: Vec<PortRow>) -> Vec<PortRow> {
    let mut kept: Vec<PortRow> = Vec::new();
    for row in rows {
        if !kept
            .iter()
            .any(|other| (other.protocol, other.port) == (row.protocol, row.port))
        {
            kept.push(row);
        }
    }
    kept
}

/// Changes one policy, identity or service.
pub(super) fn one(rng: &mut Rng, step: &mut Lockstep, networks: u32) -> Result<()> {
    match rng.u32(0..8) {
        0..=3 => enforce(rng, step),
        4..=6 => serve(rng, step, networks),
        _ => {
            let front = front(rng, networks);
            if step.model.world.services.fronts.contains_key(&front) {
                step.unserve(front)?;
            }
            Ok(())
        }
    }
}

fn enforce(rng: &mut Rng, step: &mut Lockstep) -> Result<()> {
    let id = rng.u32(1..=INTERFACES);
    let enforced = enforced(rng);
    step.enforce(id, enforced)
}

/// Any policies of an endpoint.
pub(super) fn enforced(rng: &mut Rng) -> Enforced {
    let policy = if rng.bool() { 0 } else { rng.u32(1..=SETS) };
    let mut identity = || rng.u32(0..IDENTITIES);
    Enforced {
        policy,
        identity4: identity(),
        identity6: identity(),
    }
}

/// Any identity of a prefix outside of the node.
pub(super) fn identity(rng: &mut Rng) -> (IpNet, u32) {
    let (prefix, _) = pick(rng, &OUTSIDE);
    (prefix.parse().expect("a prefix"), rng.u32(1..IDENTITIES))
}

/// The key of any service port.
pub(super) fn front(rng: &mut Rng, networks: u32) -> Front {
    let host = rng.u32(1..=VIRTUAL);
    let address: IpAddr = if rng.bool() {
        virtual4(host).into()
    } else {
        virtual6(host).into()
    };
    let protocol = pick(rng, &[6, 6, 17, 17, 132]);
    (rng.u32(1..=networks), address, protocol, pick(rng, &[80, 4000]))
}

fn serve(rng: &mut Rng, step: &mut Lockstep, networks: u32) -> Result<()> {
    let front = front(rng, networks);
    let service = service(rng, &step.model.world, &front);
    step.serve(front, &service)
}

/// Any service port with the key.
pub(super) fn service(rng: &mut Rng, world: &World, front: &Front) -> Service {
    let fronts = &world.services.fronts;
    let known = fronts.get(front).map(|service| service.id);
    let next = fronts.values().map(|service| service.id).max().unwrap_or(0) + 1;
    let count = pick(rng, &[0, 1, 1, 1, 2, 3]);
    let mut backends: Vec<Backend> = (0..count).map(|_| backend(rng, front.1.is_ipv4())).collect();
    // A later fragment identifies the address of its destination, but not the port.
    backends.sort_unstable();
    backends.dedup_by_key(|backend| backend.0);
    Service {
        id: known.unwrap_or(next),
        backends,
        local_only: rng.bool(),
        affinity: if rng.u32(0..4) == 0 { STEP * 3 / 2 } else { 0 },
    }
}

fn backend(rng: &mut Rng, is_v4: bool) -> Backend {
    let host = rng.u32(2..2 + HOSTS);
    let address: IpAddr = match (rng.u32(0..12), is_v4) {
        (0, true) => virtual4(1).into(),
        (0, false) => virtual6(1).into(),
        (1 | 2, true) => Ipv4Addr::new(198, 51, 100, 2).into(),
        (1 | 2, false) => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2).into(),
        (_, true) => address4(host).into(),
        (_, false) => address6(host).into(),
    };
    (address, pick(rng, &[80, 4000, 4001]))
}
