//! Opens flows to destinations that are no endpoint of this node, by the route of the network.

use aya_ebpf::{btf_maps::lpm_trie::Key, programs::TcContext};
use kni_common::{
    Verdict,
    address::bytes,
    endpoint::{EndpointRow, FLAG_HOST_ACCESS},
    flow::{END_LOCAL, END_STACK},
    route::{ACTION_MASQUERADE, ACTION_REMOTE, ACTION_SERVICE_RANGE, ACTION_STACK, FULL_PREFIX, ROUTE_NODE, RouteData},
};

use super::{begin, own_end};
use crate::{
    config,
    decision::{Decision, attempt},
    egress, endpoint, event,
    flow::{self, Account, NewFlow},
    maps::ROUTES,
    masquerade,
    packet::{Class, Packet},
    policy, remote, translate,
    work::Work,
};

/// The action and, in the upper half, the flags for packets of the network to this one's destination; 0 for no route.
/// The whole route is in `work`.
///
/// VERIFIER: not inlined, as [`locate`].
#[inline(never)]
pub(super) fn route(network: u32, work: &mut Work) -> u32 {
    let key = Key::new(
        FULL_PREFIX,
        RouteData {
            network: network.to_be_bytes(),
            address: bytes(work.to.destination),
        },
    );
    if let Some(found) = ROUTES.get(&key) {
        work.route = *found;
        u32::from(work.route.action) | u32::from(work.route.flags) << 16
    } else {
        work.route.action = 0;
        0
    }
}

/// Action and flags of what [`route`] returns.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the two halves of the word")]
pub(super) const fn halves(way: u32) -> (u16, u16) {
    (way as u16, (way >> 16) as u16)
}

/// Whether packets of the endpoint with this [`route`] go to the node's stack.
#[inline(always)]
pub(super) const fn leads_to_stack(row: &EndpointRow, way: u32) -> bool {
    let (action, _) = halves(way);
    action == ACTION_STACK && row.flags & FLAG_HOST_ACCESS != 0
}

/// Whether this [`route`] leads out of the pod networks, or nowhere, and to no address of a node.
#[inline(always)]
pub(super) const fn leads_outside(way: u32) -> bool {
    let (action, flags) = halves(way);
    matches!(action, ACTION_MASQUERADE | ACTION_STACK | 0) && flags & ROUTE_NODE == 0
}

/// Opens a flow to a destination that is not a local endpoint. `way`: its [`route`].
#[inline(always)]
pub(super) fn open_routed(
    ctx: &TcContext,
    row: &EndpointRow,
    packet: &Packet,
    work: &mut Work,
    (way, translated): (u32, bool),
) -> Decision {
    let (action, flags) = halves(way);
    let leaves = match action {
        ACTION_MASQUERADE | ACTION_STACK => true,
        ACTION_REMOTE => flags & ROUTE_NODE != 0,
        _ => false,
    };
    if leaves && remote::is_to_tunnel(work.to.protocol, work.to.destination_port()) {
        return Decision::drop(Verdict::OverlayPort);
    }
    match action {
        ACTION_MASQUERADE => {}
        ACTION_STACK if row.flags & FLAG_HOST_ACCESS != 0 => {}
        ACTION_STACK | 0 => return Decision::drop(Verdict::NoRoute),
        ACTION_REMOTE => return Decision::OTHER_NODE,
        ACTION_SERVICE_RANGE => return Decision::drop(Verdict::NoService),
        _ => return Decision::drop(Verdict::NoDestination),
    }
    let Some(policy) = endpoint::policy(work.event.endpoint) else {
        return Decision::drop(Verdict::EndpointNotReady);
    };
    attempt!(policy::leaving(
        policy,
        row.network,
        work.to.destination,
        work.to.policy_port(),
        &mut work.event
    ));
    if action == ACTION_MASQUERADE {
        if !translate::has_ports(packet.protocol) {
            return Decision::drop(Verdict::MasqueradeProtocol);
        }
        return Decision::MASQUERADE;
    }
    work.new = NewFlow {
        source_kind: END_LOCAL,
        destination_kind: END_STACK,
        flags: 0,
        source: own_end(work),
        destination: flow::far_end(0, work.epoch),
        translated,
        reply_network: work.event.network,
        refuse_taken: packet.class == Class::Open,
    };
    begin(ctx, packet, work, Decision::STACK)
}

#[inline(always)]
pub(super) fn open_uplink(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Decision {
    let Some(config) = config::get() else {
        return Decision::drop(Verdict::MasqueradeAddress);
    };
    if !masquerade::reuse(packet, work) {
        let account = Account {
            endpoint: work.event.endpoint,
            inbound: false,
            protocol: packet.protocol,
        };
        attempt!(flow::take_share(config, account));
        attempt!(masquerade::claim(ctx, config, packet, work));
    }
    attempt!(masquerade::open(config, packet, work));
    work.record_translation();
    event::new_flow(ctx, config, &mut work.event, Verdict::Masqueraded);
    let way = egress::leave(ctx, packet, work.event.endpoint, &work.to.source);
    if way.reason().is_none() {
        attempt!(translate::apply(ctx, packet, &work.to));
    }
    way
}
