//! Chooses a backend for a flow to a virtual address.

use aya_ebpf::helpers::bpf_get_prandom_u32;
use kni_common::{
    Verdict,
    address::{bytes, words},
    service::{AffinityKey, AffinityValue, BackendKey, BackendValue, SERVICE_DROP_IF_EMPTY, ServiceKey, ServiceValue},
};

use crate::{
    config,
    maps::{AFFINITY, BACKENDS, SERVICES},
    packet::Packet,
    time,
    work::Work,
};

/// The service port that the packet is for.
#[inline(never)]
pub fn at(network: u32, packet: &Packet) -> Option<&'static ServiceValue> {
    let [_, _, high, low] = packet.ports.to_ne_bytes();
    let key = ServiceKey {
        network,
        address: bytes(packet.destination),
        port: [high, low],
        protocol: u16::from(packet.protocol),
    };
    // SAFETY: the agent replaces rows whole; a row that is replaced meanwhile stays readable (RCU).
    unsafe { SERVICES.get(key) }
}

/// Rewrites the destination in `work.to` to a backend of the service port that the packet is for.
#[inline(never)]
pub fn choose(network: u32, packet: &Packet, work: &mut Work) -> Result<(), Verdict> {
    let service = at(network, packet).ok_or(Verdict::NoServicePort)?;
    work.event.service = service.service;
    if service.affinity != 0 {
        return stay(network, packet, &mut work.to, service);
    }
    let backend = any(service)?;
    set(&mut work.to, backend.address, backend.port);
    Ok(())
}

/// The client's last backend, or a new one, which is recorded.
#[inline(always)]
fn stay(network: u32, packet: &Packet, to: &mut Packet, service: &ServiceValue) -> Result<(), Verdict> {
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
            set(to, last.address, last.port);
            return Ok(());
        }
    }
    let backend = any(service)?;
    set(to, backend.address, backend.port);
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

#[inline(always)]
fn any(service: &ServiceValue) -> Result<&'static BackendValue, Verdict> {
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
    // SAFETY: lists never change; a row that is removed meanwhile stays readable (RCU).
    unsafe { BACKENDS.get(key) }.ok_or(Verdict::NoBackend)
}

#[inline(always)]
fn set(to: &mut Packet, address: [u8; 16], port: [u8; 2]) {
    let [a, b, ..] = to.ports.to_ne_bytes();
    let [c, d] = port;
    to.destination = words(address);
    to.ports = u32::from_ne_bytes([a, b, c, d]);
}
