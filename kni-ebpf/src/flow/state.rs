//! Changes the state of flows: first reply, FIN, RST.

use kni_common::{
    config::Config,
    flow::{FLOW_CLOSED, FLOW_CONFIRMED, FLOW_FIN, FLOW_REPLY, FlowValue},
};

use super::{network_of_other, other, share, tuple::Tuple};
use crate::{
    config,
    packet::{FIN, Packet, RST, SCTP, TCP, UDP},
};

/// Whether the packet changes the state of its flow: first reply, FIN or RST.
#[inline(always)]
pub fn changes_state(packet: &Packet, row: &FlowValue) -> bool {
    row.flags & (FLOW_REPLY | FLOW_CONFIRMED) == FLOW_REPLY || packet.tcp_flags & (FIN | RST) != 0
}

/// Changes the flow's state. Not on the path of most packets.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn flow_change_state(network: u32, packet: *const Packet, row: *mut FlowValue) -> u32 {
    // SAFETY: the caller's own memory, or a row that stays mapped; nothing else touches it meanwhile.
    let packet = unsafe { packet.as_ref() };
    // SAFETY: as above.
    let row = unsafe { row.as_mut() };
    let (Some(packet), Some(row)) = (packet, row) else {
        return 0;
    };
    let (Some(config), false) = (config::get(), config::is_dry_run()) else {
        return 0;
    };
    if packet.tcp_flags & RST != 0 {
        return end(network, packet, row);
    }
    let opposite = other(network, packet, row);
    let was_closed = row.flags & FLOW_CLOSED != 0;
    let mut flags = 0;
    if row.flags & (FLOW_REPLY | FLOW_CONFIRMED) == FLOW_REPLY {
        flags |= FLOW_CONFIRMED;
        // A closed flow stays closed.
        row.lifetime = if row.flags & FLOW_CLOSED == 0 {
            established(config, packet.protocol)
        } else {
            config.tcp_closing
        };
    }
    if packet.tcp_flags & FIN != 0 {
        row.flags |= FLOW_FIN;
    }
    let both = match &opposite {
        Some(opposite) => opposite.flags & row.flags & FLOW_FIN != 0,
        None => false,
    };
    if both {
        flags |= FLOW_CLOSED;
        row.lifetime = config.tcp_closing;
    }
    row.flags |= flags;
    if let Some(opposite) = opposite
        && flags != 0
    {
        opposite.flags |= flags;
        opposite.lifetime = row.lifetime;
        if flags & FLOW_CLOSED != 0 && !was_closed {
            share::release(share::owner(row, opposite));
        }
    }
    0
}

/// RST: nothing follows. Both rows are removed at once, so that a pod with many short connections evicts no other
/// pod's.
#[inline(always)]
fn end(network: u32, packet: &Packet, row: &FlowValue) -> u32 {
    if let Some(opposite) = other(network, packet, row) {
        if row.flags & FLOW_CLOSED == 0 {
            share::release(share::owner(row, opposite));
        }
        remove_other(network, packet, row);
    }
    Tuple::of(packet).remove(network, packet.v4);
    0
}

/// Removes the row of the opposite direction.
#[inline(never)]
fn remove_other(network: u32, packet: &Packet, row: &FlowValue) -> i32 {
    let Some(there) = network_of_other(network, row) else {
        return 0;
    };
    Tuple::of(packet).translated(row).reversed().remove(there, packet.v4);
    0
}

#[inline(always)]
fn established(config: &Config, protocol: u8) -> u32 {
    match protocol {
        TCP => config.tcp_established,
        UDP => config.udp_established,
        SCTP => config.sctp_established,
        _ => config.other_established,
    }
}
