//! Asks the policy tables: may one peer send to another.

use aya_ebpf::btf_maps::lpm_trie::Key;
use kni_common::{
    Verdict,
    address::bytes,
    counter::HitKey,
    endpoint::EndpointRow,
    event::{FlowEvent, PolicyTrail},
    policy::{
        EXTERNAL, EGRESS, IDENTITY_ANY, INGRESS, IdentityData, PORTS_ALL, PORTS_NONE, PREFIX_PORT, PolicyKey,
        PolicyValue, PortData,
    },
    route::FULL_PREFIX,
};

use crate::{
    config, endpoint,
    maps::{HITS, IDENTITIES, POLICY, PORTS},
};

/// Ordinal of a default deny in `HITS`.
const DEFAULT_DENY: u16 = u16::MAX;

/// Identity of an endpoint's IPv4 or IPv6 address.
#[inline(always)]
pub fn identity_of(row: &EndpointRow, v4: bool) -> u32 {
    if v4 { row.identity4 } else { row.identity6 }
}

/// Identity of an address that is no local endpoint's.
#[inline(never)]
pub fn identity_beyond(network: u32, address: &[u32; 4]) -> u32 {
    let key = Key::new(
        FULL_PREFIX,
        IdentityData {
            network: network.to_be_bytes(),
            address: bytes(*address),
        },
    );
    match IDENTITIES.get(&key) {
        Some(found) => found.identity,
        None => IDENTITY_ANY,
    }
}

/// Identity of an address, whoever has it.
#[inline(never)]
pub fn identity_at(network: u32, v4: bool, address: &[u32; 4]) -> u32 {
    let address = *address;
    if let Some(found) = endpoint::by_address(network, address)
        && let Some(row) = endpoint::row(found.endpoint)
        && endpoint::is_current(row, network, found)
    {
        return identity_of(row, v4);
    }
    identity_beyond(network, &address)
}

/// Whether the sender may send to the receiver, both local. `asked` is [`Packet::asked`] of the packet as the receiver
/// gets it.
#[inline(always)]
pub fn between(
    sender: &EndpointRow,
    receiver: &EndpointRow,
    asked: u32,
    v4: bool,
    story: &mut FlowEvent,
) -> Result<(), Verdict> {
    // The generations were read before: whoever changes a policy writes them last.
    if sender.policy != 0
        && !judge(
            &mut story.egress,
            sender.policy,
            identity_of(receiver, v4),
            EGRESS,
            asked,
        )
    {
        return Err(Verdict::PolicyEgress);
    }
    entering(receiver, identity_of(sender, v4), asked, story)
}

/// Whether the sender may send to an address that is no local endpoint's.
#[inline(always)]
pub fn leaving(sender: &EndpointRow, destination: [u32; 4], asked: u32, story: &mut FlowEvent) -> Result<(), Verdict> {
    if sender.policy == 0 {
        return Ok(());
    }
    let identity = identity_beyond(sender.network, &destination);
    if !judge(&mut story.egress, sender.policy, identity, EGRESS, asked) {
        return Err(Verdict::PolicyEgress);
    }
    if !judge(&mut story.beyond, sender.policy, identity, EXTERNAL, asked) {
        return Err(Verdict::PolicyExternal);
    }
    Ok(())
}

/// Whether the receiver may receive from a peer of this identity.
#[inline(always)]
pub fn entering(receiver: &EndpointRow, identity: u32, asked: u32, story: &mut FlowEvent) -> Result<(), Verdict> {
    if receiver.policy == 0 || judge(&mut story.ingress, receiver.policy, identity, INGRESS, asked) {
        Ok(())
    } else {
        Err(Verdict::PolicyIngress)
    }
}

/// What a policy set says of a peer in a direction; `asked` is [`Packet::asked`].
#[inline(never)]
fn judge(trail: &mut PolicyTrail, set: u32, identity: u32, direction: u32, asked: u32) -> bool {
    trail.set = set;
    trail.identity = identity;
    let mut found = find(set, identity, direction);
    if found.is_none() && identity != IDENTITY_ANY {
        trail.identity = IDENTITY_ANY;
        found = find(set, IDENTITY_ANY, direction);
    }
    let mut allowed = false;
    if let Some(value) = found {
        allowed = ports_allow(trail, value, asked);
    }
    // What no policy restricts is not counted.
    if !allowed || trail.rule != 0 {
        count(trail, direction);
    }
    allowed
}

#[inline(always)]
fn find(set: u32, identity: u32, direction: u32) -> Option<&'static PolicyValue> {
    // SAFETY: rows of a set never change; one that is removed meanwhile stays readable (RCU).
    unsafe {
        POLICY.get(PolicyKey {
            set,
            identity,
            direction,
        })
    }
}

#[inline(always)]
fn ports_allow(trail: &mut PolicyTrail, value: &PolicyValue, asked: u32) -> bool {
    match value.ports {
        PORTS_NONE => return false,
        PORTS_ALL => {
            trail.rule = value.rule;
            return true;
        }
        _ => {}
    }
    let [protocol, _, high, low] = asked.to_ne_bytes();
    let key = Key::new(
        PREFIX_PORT,
        PortData {
            ports: value.ports.to_be_bytes(),
            protocol,
            zero: 0,
            port: [high, low],
        },
    );
    match PORTS.get(&key) {
        Some(port) => {
            trail.rule = value.rule;
            trail.ordinal = u32::from(port.ordinal);
            port.allow != 0
        }
        None => false,
    }
}

/// Counts a rule that allowed or denied, or the set's default deny.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "both are small numbers")]
fn count(trail: &PolicyTrail, direction: u32) {
    if config::is_dry_run() {
        return;
    }
    let denied = trail.rule == 0;
    let key = HitKey {
        set: trail.set,
        rule: trail.rule,
        ordinal: if denied { DEFAULT_DENY } else { trail.ordinal as u16 },
        direction: direction as u16,
    };
    if let Some(hits) = HITS.get_ptr_mut(key) {
        // SAFETY: a per-CPU row; the program is not preempted by itself on the same CPU.
        unsafe { *hits += 1 };
        return;
    }
    // A full table loses the count of a rule, never the decision.
    let _lost_when_full = HITS.insert(key, 1, 0);
}
