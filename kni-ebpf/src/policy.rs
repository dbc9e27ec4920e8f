//! Evaluates the policy tables: whether one peer may send to another.

use aya_ebpf::btf_maps::lpm_trie::Key;
use kni_common::{
    Verdict,
    address::bytes,
    counter::HitKey,
    endpoint::EndpointPolicy,
    event::{FlowEvent, PolicyTrail},
    policy::{
        EGRESS, EXTERNAL, IDENTITY_ANY, INGRESS, IdentityData, PORTS_ALL, PORTS_NONE, PREFIX_PORT, PolicyKey,
        PolicyValue, PortData,
    },
    route::FULL_PREFIX,
};

use crate::{
    config, endpoint, event_fields,
    maps::{HITS, IDENTITIES, POLICY, PORTS},
};

/// Ordinal of a default deny in `HITS`.
const DEFAULT_DENY: u16 = u16::MAX;

/// Identity of an endpoint's IPv4 or IPv6 address.
#[inline(always)]
pub fn identity_of(policy: &EndpointPolicy, v4: bool) -> u32 {
    if v4 { policy.identity4 } else { policy.identity6 }
}

/// Identity of an address that belongs to no local endpoint.
#[inline(always)]
pub fn external_identity(network: u32, address: &[u32; 4]) -> u32 {
    policy_external_identity(network, address)
}

/// [`external_identity`].
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn policy_external_identity(network: u32, address: *const [u32; 4]) -> u32 {
    // SAFETY: the caller's own memory.
    let Some(address) = (unsafe { address.as_ref() }) else {
        return IDENTITY_ANY;
    };
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

/// Identity of an address, local or external.
#[inline(always)]
pub fn identity_at(network: u32, v4: bool, address: &[u32; 4]) -> u32 {
    policy_identity_at(network, u32::from(v4), address)
}

/// [`identity_at`].
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn policy_identity_at(network: u32, v4: u32, address: *const [u32; 4]) -> u32 {
    // SAFETY: the caller's own memory.
    let Some(address) = (unsafe { address.as_ref() }) else {
        return IDENTITY_ANY;
    };
    if let Some(found) = endpoint::by_address(network, *address)
        && let Some(row) = endpoint::row(found.endpoint)
        && endpoint::is_current(row, network, found)
        && let Some(policy) = endpoint::policy(found.endpoint)
    {
        return identity_of(policy, v4 != 0);
    }
    external_identity(network, address)
}

/// Whether the sender may send to the receiver, both local. `policy_port` is `Packet::policy_port` of the packet as
/// the receiver gets it.
#[inline(always)]
pub fn between(
    sender: &EndpointPolicy,
    receiver: &EndpointPolicy,
    policy_port: u32,
    v4: bool,
    event: &mut FlowEvent,
) -> Result<(), Verdict> {
    // The generations were read before: the agent writes them after a change of policy.
    if sender.policy != 0 {
        let identity = identity_of(receiver, v4);
        event.reserved |= event_fields::EGRESS;
        if !evaluate(&mut event.egress, sender.policy, identity, EGRESS, policy_port) {
            return Err(Verdict::PolicyEgress);
        }
    }
    entering(receiver, identity_of(sender, v4), policy_port, event)
}

/// Whether the sender may send to an address that belongs to no local endpoint.
#[inline(always)]
pub fn leaving(
    sender: &EndpointPolicy,
    network: u32,
    destination: [u32; 4],
    policy_port: u32,
    event: &mut FlowEvent,
) -> Result<(), Verdict> {
    if sender.policy == 0 {
        return Ok(());
    }
    let identity = external_identity(network, &destination);
    event.reserved |= event_fields::EGRESS;
    if !evaluate(&mut event.egress, sender.policy, identity, EGRESS, policy_port) {
        return Err(Verdict::PolicyEgress);
    }
    event.reserved |= event_fields::EXTERNAL;
    if !evaluate(&mut event.beyond, sender.policy, identity, EXTERNAL, policy_port) {
        return Err(Verdict::PolicyExternal);
    }
    Ok(())
}

/// Whether the sender may send to an address of a pod of another node: egress policies for destinations outside of the
/// pod networks do not apply.
#[inline(always)]
pub fn to_node(
    sender: &EndpointPolicy,
    network: u32,
    destination: &[u32; 4],
    policy_port: u32,
    event: &mut FlowEvent,
) -> Result<(), Verdict> {
    if sender.policy == 0 {
        return Ok(());
    }
    let identity = external_identity(network, destination);
    event.reserved |= event_fields::EGRESS;
    if evaluate(&mut event.egress, sender.policy, identity, EGRESS, policy_port) {
        Ok(())
    } else {
        Err(Verdict::PolicyEgress)
    }
}

/// Whether the receiver may receive from a peer of this identity.
#[inline(always)]
pub fn entering(
    receiver: &EndpointPolicy,
    identity: u32,
    policy_port: u32,
    event: &mut FlowEvent,
) -> Result<(), Verdict> {
    if receiver.policy == 0 {
        return Ok(());
    }
    event.reserved |= event_fields::INGRESS;
    if evaluate(&mut event.ingress, receiver.policy, identity, INGRESS, policy_port) {
        Ok(())
    } else {
        Err(Verdict::PolicyIngress)
    }
}

/// Evaluates a policy set for a peer in a direction; `policy_port` is [`Packet::policy_port`].
///
/// [`Packet::policy_port`]: crate::packet::Packet::policy_port
#[inline(always)]
fn evaluate(trail: &mut PolicyTrail, set: u32, identity: u32, direction: u32, policy_port: u32) -> bool {
    policy_evaluate(trail, set, identity, direction, policy_port) != 0
}

/// [`evaluate`]; not 0 if the set allows it.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn policy_evaluate(
    trail: *mut PolicyTrail,
    set: u32,
    identity: u32,
    direction: u32,
    policy_port: u32,
) -> u32 {
    // SAFETY: the caller's own memory; nothing else touches it meanwhile.
    let Some(trail) = (unsafe { trail.as_mut() }) else {
        return 0;
    };
    trail.set = set;
    trail.identity = identity;
    trail.rule = 0;
    trail.ordinal = 0;
    let mut found = find(set, identity, direction);
    if found.is_none() && identity != IDENTITY_ANY {
        trail.identity = IDENTITY_ANY;
        found = find(set, IDENTITY_ANY, direction);
    }
    let mut allowed = false;
    if let Some(value) = found {
        allowed = ports_allow(trail, value, policy_port);
    }
    // Traffic that no policy restricts is not counted.
    if !allowed || trail.rule != 0 {
        count(trail, direction);
    }
    u32::from(allowed)
}

#[inline(always)]
fn find(set: u32, identity: u32, direction: u32) -> Option<PolicyValue> {
    let row = POLICY.get_ptr(PolicyKey {
        set,
        identity,
        direction,
    })?;
    // SAFETY: memory of the table, copied once. Rows of a set never change, and the agent removes one only after all
    // programs that may have read a reference to it have ended.
    Some(unsafe { row.read_volatile() })
}

#[inline(always)]
fn ports_allow(trail: &mut PolicyTrail, value: PolicyValue, policy_port: u32) -> bool {
    match value.ports {
        PORTS_NONE => return false,
        PORTS_ALL => {
            trail.rule = value.rule;
            return true;
        }
        _ => {}
    }
    let [protocol, _, high, low] = policy_port.to_ne_bytes();
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
