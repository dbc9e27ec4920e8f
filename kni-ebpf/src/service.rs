//! Chooses a backend for a flow to a virtual address.

use aya_ebpf::helpers::bpf_get_prandom_u32;
use kni_common::{
    Verdict,
    address::{bytes, words},
    service::{AffinityKey, AffinityValue, BackendKey, SERVICE_DROP_IF_EMPTY, ServiceKey, ServiceValue},
};

use crate::{
    config,
    maps::{AFFINITY, BACKENDS, SERVICES},
    packet::Packet,
    time,
    work::Work,
};

/// Lookups of a row that changes while it is read.
const TRIES: u32 = 3;

/// Id of the service port that the packet is for, 0 for none.
#[inline(always)]
pub fn id(network: u32, packet: &Packet, work: &mut Work) -> u32 {
    match read(network, packet, &mut work.service) {
        Ok(()) => work.service.service,
        Err(_no_service) => 0,
    }
}

/// Whether the packet's destination is a port of a Service, by whichever address.
#[inline(always)]
pub fn has_port(network: u32, packet: &Packet, work: &mut Work) -> bool {
    !matches!(read(network, packet, &mut work.service), Err(Verdict::NoServicePort))
}

/// Copies the row of the service port that the packet is for.
#[inline(never)]
fn read(network: u32, packet: &Packet, service: &mut ServiceValue) -> Result<(), Verdict> {
    let [_, _, high, low] = packet.ports.to_ne_bytes();
    let key = ServiceKey {
        network,
        address: bytes(packet.destination),
        port: [high, low],
        protocol: u16::from(packet.protocol),
    };
    // VERIFIER: a bounded loop.
    for _ in 0..TRIES {
        let row = SERVICES.get_ptr(key).ok_or(Verdict::NoServicePort)?;
        // SAFETY: memory of the table, copied once: the kernel may reuse a removed or replaced row for another key at
        // once. The check word belongs to this key and these contents.
        *service = unsafe { row.read_volatile() };
        if service.check == service.seal(&key) {
            return Ok(());
        }
    }
    Err(Verdict::DestinationNotReady)
}

/// Rewrites the destination in `work.to` to a backend of the service port that the packet is for.
///
/// VERIFIER: two calls in a row instead of one within the other: the caller has no stack for both.
#[inline(always)]
pub fn choose(network: u32, packet: &Packet, work: &mut Work) -> Result<(), Verdict> {
    read(network, packet, &mut work.service)?;
    pick(network, packet, work)
}

#[inline(never)]
fn pick(network: u32, packet: &Packet, work: &mut Work) -> Result<(), Verdict> {
    work.event.service = work.service.service;
    if work.service.affinity != 0 {
        return stay(network, packet, work);
    }
    any(work)?;
    set(&mut work.to, work.backend.address, work.backend.port);
    Ok(())
}

/// The client's last backend, or a new one, which is recorded.
#[inline(always)]
fn stay(network: u32, packet: &Packet, work: &mut Work) -> Result<(), Verdict> {
    let service = &work.service;
    let key = AffinityKey {
        service: service.service,
        network,
        client: bytes(packet.source),
    };
    let now = time::jiffies();
    if service.count != 0
        && let Some(last) = AFFINITY.get_ptr_mut(key)
    {
        // SAFETY: a row that is evicted and reused meanwhile names another service's backend for this one flow; the
        // policies apply to it like to any other.
        let last = unsafe { &mut *last };
        if now.saturating_sub(last.last_used) <= u64::from(service.affinity) {
            if !config::is_dry_run() {
                last.last_used = now;
            }
            set(&mut work.to, last.address, last.port);
            return Ok(());
        }
    }
    any(work)?;
    let backend = &work.backend;
    set(&mut work.to, backend.address, backend.port);
    if !config::is_dry_run() {
        // A full table costs the client its backend next time, not this flow.
        let _lost_when_full = AFFINITY.insert(
            key,
            AffinityValue {
                last_used: now,
                address: backend.address,
                port: backend.port,
                zero: [0; 6],
            },
            0,
        );
    }
    Ok(())
}

/// Copies the row of a random backend of `work.service`.
#[inline(always)]
fn any(work: &mut Work) -> Result<(), Verdict> {
    let service = &work.service;
    // SAFETY: a helper without arguments.
    let random = unsafe { bpf_get_prandom_u32() };
    // Without backends there is no remainder.
    let slot = random
        .checked_rem(service.count)
        .ok_or(if service.flags & SERVICE_DROP_IF_EMPTY == 0 {
            Verdict::NoBackend
        } else {
            Verdict::NoLocalBackend
        })?;
    let key = BackendKey {
        backends: service.backends,
        slot,
    };
    let row = BACKENDS.get_ptr(key).ok_or(Verdict::NoBackend)?;
    // SAFETY: memory of the table, copied once. Lists never change and outlive their last reference for a while; a
    // program that was interrupted for longer notices by the check word.
    work.backend = unsafe { row.read_volatile() };
    if work.backend.check == work.backend.seal(&key) {
        Ok(())
    } else {
        Err(Verdict::DestinationNotReady)
    }
}

#[inline(always)]
fn set(to: &mut Packet, address: [u8; 16], port: [u8; 2]) {
    let [a, b, ..] = to.ports.to_ne_bytes();
    let [c, d] = port;
    to.destination = words(address);
    to.ports = u32::from_ne_bytes([a, b, c, d]);
}
