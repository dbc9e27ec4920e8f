//! The straight path of packets that other nodes send to pods: of a current flow, also where they change its state, but
//! for the SYN of a new connection, which is always evaluated.
//!
//! What the flow was evaluated on is in its row: the node that has the source, and the receiver. As long as the
//! generations of both are the same, the routes and addresses of the network lead there as well, and need no lookup.
//! That the packet comes from that node is checked for each one.

use aya_ebpf::programs::TcContext;
use kni_common::flow::{END_LOCAL, FLOW_TRANSLATED, FlowValue, NodeRow, is_second};

use crate::{
    config,
    decision::Decision,
    endpoint,
    flow::{self, Step},
    packet::{Class, Fragment, Packet},
    remote,
    straight::{self, Followed},
    work::Place,
};

/// Takes a packet that came through the tunnel, without parsing more of it than is needed, from a pod of a node that
/// `is_sender` accepts. Returns the receiver, or `None` for the general path.
#[inline(always)]
pub(in crate::programs) fn arrive(
    ctx: &TcContext,
    network: u32,
    is_sender: impl FnOnce(&NodeRow) -> bool,
) -> Option<u32> {
    if config::is_dry_run() {
        return None;
    }
    let Followed {
        found,
        protocol,
        tcp_flags,
        second,
    } = straight::find(ctx, network)?;
    take(network, found, [protocol, tcp_flags], (second, true), is_sender)
}

/// Whether a parsed packet, which came without a tunnel, is of a current flow to an endpoint, from a pod of a node that
/// `is_sender` accepts. Then `place` is of the receiver.
#[inline(always)]
pub(super) fn follow(place: &mut Place, packet: &Packet, is_sender: impl FnOnce(&NodeRow) -> bool) -> bool {
    if config::is_dry_run() || packet.class != Class::Flow || packet.fragment != Fragment::Whole {
        return false;
    }
    // Without calls where that is possible: they are most of what is left.
    let Some(found) = flow::find(place.network, packet) else {
        return false;
    };
    let second = is_second(packet.source, packet.destination);
    let kind = [packet.protocol, packet.tcp_flags];
    match take(place.network, found, kind, (second, false), is_sender) {
        Some(endpoint) => {
            place.endpoint = endpoint;
            true
        }
        None => false,
    }
}

/// The receiver of a packet of this flow, if it is current and the packet comes from its sender's node; with its time
/// and its state as they are after the packet. `second`: the packet's sender is the second end; `overlay`: it came
/// through the tunnel.
#[inline(always)]
fn take(
    network: u32,
    found: &mut FlowValue,
    [protocol, tcp_flags]: [u8; 2],
    (second, overlay): (bool, bool),
    is_sender: impl FnOnce(&NodeRow) -> bool,
) -> Option<u32> {
    let [(from, sender), (to, own)] = straight::ends(found, second);
    let way = Decision::node(sender.id, overlay);
    if from != remote::kind(way) || to != END_LOCAL || found.flags & FLOW_TRANSLATED != 0 || !flow::is_live(found) {
        return None;
    }
    let (node, row) = (remote::row(way)?, endpoint::row(own.id)?);
    let is_current = is_sender(node)
        && remote::end(way, node, endpoint::epoch(row)).generation == sender.generation
        && endpoint::generation(row) == own.generation
        && row.network == network
        && endpoint::is_ready(row);
    if !is_current {
        return None;
    }
    // An untranslated flow has no other row.
    let later = flow::refresh(found);
    flow::advance(found, Step::new(protocol, tcp_flags), second, later);
    Some(own.id)
}
