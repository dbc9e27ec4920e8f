//! Writes the rows of a new flow.

use kni_common::{
    Verdict,
    address::{bytes, words},
    config::Config,
    flow::{
        END_LOCAL, FLOW_CLOSED, FLOW_FIN_FIRST, FLOW_FIN_SECOND, FLOW_FROM_SECOND, FLOW_OPENED_BY_SECOND, FLOW_REPLIED,
        FLOW_SERVICE, FLOW_TRANSLATED, FlowEnd, FlowValue, Ports, swapped,
    },
    uplink::OUTSIDE,
};

use super::{
    nat, put,
    scratch::{self, Rows},
    share::{Account, take_share},
    state,
    tuple::Tuple,
};
use crate::{
    config,
    decision::Reason,
    packet::{Packet, TCP},
    time::now,
};

/// The content of a new flow's rows, from the point of view of its first packet.
#[repr(C)]
pub struct NewFlow {
    /// Kind of the sender.
    pub source_kind: u8,
    /// Kind of the receiver.
    pub destination_kind: u8,
    /// Bits `FLOW_*` that depend neither on the direction nor on the translation.
    pub flags: u16,
    /// The sender.
    pub source: FlowEnd,
    /// The receiver.
    pub destination: FlowEnd,
    /// Whether the first packet is translated: its translation differs from it.
    pub translated: bool,
    /// Network of the reply's row, where the flow is translated.
    pub reply_network: u32,
    /// Whether to refuse the flow if another live connection has the reply's row ([`Verdict::TupleInUse`]).
    pub refuse_taken: bool,
}

impl NewFlow {
    /// The endpoint that the flow counts for.
    #[inline(always)]
    const fn account(&self, protocol: u8) -> Account {
        let inbound = self.source_kind != END_LOCAL;
        Account {
            endpoint: if inbound { self.destination.id } else { self.source.id },
            inbound,
            protocol,
        }
    }

    /// Writes the ends and flags of the row of the sender's packets, without a translation.
    ///
    /// VERIFIER: field by field; a struct literal would be assembled on the stack first.
    #[inline(always)]
    const fn write(&self, row: &mut FlowValue, second: bool) {
        row.flags = self.flags;
        row.first_kind = self.source_kind;
        row.second_kind = self.destination_kind;
        row.first = self.source;
        row.second = self.destination;
        if second {
            swap_ends(row);
            row.flags |= FLOW_OPENED_BY_SECOND;
        }
    }
}

#[inline(always)]
const fn swap_ends(row: &mut FlowValue) {
    (row.first_kind, row.second_kind) = (row.second_kind, row.first_kind);
    (row.first, row.second) = (row.second, row.first);
}

/// Takes one flow of the opener's share and writes its rows, replacing those of an earlier flow with the same tuple.
/// `to` is the packet after translation, or the packet itself.
#[inline(always)]
pub fn create(config: &Config, network: u32, packet: &Packet, to: &Packet, new: &NewFlow) -> Result<(), Verdict> {
    result(if new.translated {
        flow_create_translated(config, network, packet, to, new)
    } else {
        flow_create(config, network, packet, new)
    })
}

/// [`create`] for a packet that is not translated.
#[inline(always)]
pub fn create_untranslated(config: &Config, network: u32, packet: &Packet, new: &NewFlow) -> Result<(), Verdict> {
    result(flow_create(config, network, packet, new))
}

/// [`create`] for a translated packet from outside.
///
/// VERIFIER: apart, because it needs more stack than the programs of pods have.
#[inline(always)]
pub fn create_outside(config: &Config, packet: &Packet, to: &Packet, new: &NewFlow) -> Result<(), Verdict> {
    result(flow_create_outside(config, packet, to, new))
}

/// From the reasons that the functions return.
#[inline(always)]
const fn result(reason: u32) -> Result<(), Verdict> {
    match reason {
        0 => Ok(()),
        TAKEN => Err(Verdict::TupleInUse),
        QUOTA => Err(Verdict::FlowQuota),
        _ => Err(Verdict::FlowTableFull),
    }
}

const TAKEN: u32 = Verdict::TupleInUse as u32;
const QUOTA: u32 = Verdict::FlowQuota as u32;

/// Creates a flow that is not translated; 0 on success, else the code of the reason.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_create(config: *const Config, network: u32, packet: *const Packet, new: *const NewFlow) -> u32 {
    // SAFETY: a row that stays mapped.
    let config = unsafe { config.as_ref() };
    // SAFETY: the caller's own memory; nothing else touches it meanwhile.
    let packet = unsafe { packet.as_ref() };
    // SAFETY: as above.
    let new = unsafe { new.as_ref() };
    let (Some(config), Some(packet), Some(new)) = (config, packet, new) else {
        return Verdict::FlowTableFull as u32;
    };
    Reason::code(write(config, network, packet, new))
}

/// Creates a translated flow within the network; 0 on success, else the code of the reason.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_create_translated(
    config: *const Config,
    network: u32,
    packet: *const Packet,
    to: *const Packet,
    new: *const NewFlow,
) -> u32 {
    // SAFETY: a row that stays mapped.
    let config = unsafe { config.as_ref() };
    // SAFETY: the caller's own memory; nothing else touches it meanwhile.
    let packet = unsafe { packet.as_ref() };
    // SAFETY: as above.
    let to = unsafe { to.as_ref() };
    // SAFETY: as above.
    let new = unsafe { new.as_ref() };
    let (Some(config), Some(packet), Some(to), Some(new)) = (config, packet, to, new) else {
        return Verdict::FlowTableFull as u32;
    };
    Reason::code(write_translated::<false>(config, network, packet, to, new))
}

/// [`create_outside`]; 0 on success, else the code of the reason.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_create_outside(
    config: *const Config,
    packet: *const Packet,
    to: *const Packet,
    new: *const NewFlow,
) -> u32 {
    // SAFETY: a row that stays mapped.
    let config = unsafe { config.as_ref() };
    // SAFETY: the caller's own memory; nothing else touches it meanwhile.
    let packet = unsafe { packet.as_ref() };
    // SAFETY: as above.
    let to = unsafe { to.as_ref() };
    // SAFETY: as above.
    let new = unsafe { new.as_ref() };
    let (Some(config), Some(packet), Some(to), Some(new)) = (config, packet, to, new) else {
        return Verdict::FlowTableFull as u32;
    };
    Reason::code(write_translated::<true>(config, OUTSIDE, packet, to, new))
}

/// Takes the flow's share, and fills what rows of both kinds of flows have in the scratch row of the sender's packets.
/// Also returns whether the sender is the second end. `None` in a dry run, which writes no row.
///
/// Only where nothing else refuses the flow: a refused flow takes no share. It is returned to the same endpoint, see
/// `share::of_row`.
#[inline(always)]
fn start(config: &Config, packet: &Packet, new: &NewFlow) -> Result<Option<(&'static mut Rows, bool)>, Verdict> {
    take_share(config, new.account(packet.protocol))?;
    if config::is_dry_run() {
        return Ok(None);
    }
    let Some(rows) = scratch::rows() else {
        return Err(Verdict::FlowTableFull);
    };
    let second = super::is_second(packet);
    new.write(&mut rows.own, second);
    rows.own.last_seen = now();
    rows.own.lifetime = super::new_lifetime(config, packet.protocol);
    Ok(Some((rows, second)))
}

/// Writes the row of a flow that is not translated.
#[inline(always)]
fn write(config: &Config, network: u32, packet: &Packet, new: &NewFlow) -> Result<(), Verdict> {
    // Both directions have one key.
    let earlier = if new.refuse_taken {
        Tuple::of(packet).find_any(network, packet.v4)
    } else {
        None
    };
    if let Some(row) = &earlier
        && row.flags & FLOW_TRANSLATED != 0
        && is_connection(row, packet)
        && !is_translation_of(row, packet)
    {
        return Err(Verdict::TupleInUse);
    }
    let Some((rows, _)) = start(config, packet, new)? else {
        return Ok(());
    };
    let row = &mut rows.own;
    if let Some(earlier) = earlier
        && state::reopen(earlier, row)
    {
        return Ok(());
    }
    row.ports = Ports {
        source: [0; 2],
        destination: [0; 2],
    };
    row.source = [0; 16];
    row.destination = [0; 16];
    put(network, packet, row)
}

/// Writes both rows of a translated flow.
#[inline(always)]
fn write_translated<const FROM_OUTSIDE: bool>(
    config: &Config,
    network: u32,
    packet: &Packet,
    to: &Packet,
    new: &NewFlow,
) -> Result<(), Verdict> {
    if new.refuse_taken && is_taken(new.reply_network, packet, to) {
        return Err(Verdict::TupleInUse);
    }
    let Some((rows, second)) = start(config, packet, new)? else {
        return Ok(());
    };
    let Rows { own: row, reply, .. } = rows;
    row.flags |= FLOW_TRANSLATED | FLOW_SERVICE;
    if second {
        row.flags |= FLOW_FROM_SECOND;
    }
    row.source = bytes(to.source);
    row.destination = bytes(to.destination);
    row.ports = Ports::from_word(to.ports);
    // From outside, another flow may have this packet's tuple.
    if FROM_OUTSIDE && !nat::claim_own(packet, row) {
        return Err(Verdict::TupleInUse);
    }
    // Otherwise the reply's row first: a reply can only follow the packet that the other row lets through.
    write_opposite(reply, row, packet, super::is_reply_second(to));
    put_reply(new.reply_network, to, reply)?;
    if FROM_OUTSIDE {
        return Ok(());
    }
    put(network, packet, row)
}

#[inline(never)]
fn put_reply(network: u32, packet: &Packet, value: &FlowValue) -> Result<(), Verdict> {
    Tuple::of(packet).reversed().put(network, packet.v4, value)
}

/// Writes the row of the opposite direction of a translated flow. `row` is that of `packet`; `reply_second`: the sender
/// of the opposite direction's packets is the second end of their key.
#[inline(always)]
fn write_opposite(opposite: &mut FlowValue, row: &FlowValue, packet: &Packet, reply_second: bool) {
    opposite.last_seen = row.last_seen;
    opposite.lifetime = row.lifetime;
    opposite.flags = row.flags & !FLOW_FROM_SECOND;
    (opposite.first_kind, opposite.second_kind) = (row.first_kind, row.second_kind);
    (opposite.first, opposite.second) = (row.first, row.second);
    // The key sorts the ends by other addresses.
    if (row.flags & FLOW_FROM_SECOND != 0) == reply_second {
        swap_ends(opposite);
        opposite.flags = with_swapped_ends(opposite.flags);
    }
    if reply_second {
        opposite.flags |= FLOW_FROM_SECOND;
    }
    opposite.source = bytes(packet.destination);
    opposite.destination = bytes(packet.source);
    opposite.ports = Ports::from_word(swapped(packet.ports));
}

/// The flags that depend on the order of the ends, for the other order.
#[inline(always)]
const fn with_swapped_ends(flags: u16) -> u16 {
    const FINS: u16 = FLOW_FIN_FIRST | FLOW_FIN_SECOND;
    let fins = flags & FINS;
    let fins = if fins == 0 || fins == FINS { 0 } else { FINS };
    (flags ^ FLOW_OPENED_BY_SECOND) ^ fins
}

/// Writes the row of the opposite direction of a translated flow again, unless its key has a row: either may be evicted
/// without the other. `row` is that of `packet`. False where another flow has the key.
#[inline(always)]
pub(super) fn restore(network: u32, packet: &Packet, row: &FlowValue) -> bool {
    let Some(there) = super::network_of_other(network, packet, row) else {
        return false;
    };
    let Some(rows) = scratch::rows() else {
        return false;
    };
    let reply = Tuple::of(packet).translated(row).reversed();
    write_opposite(&mut rows.reply, row, packet, reply.is_second());
    if there == OUTSIDE {
        nat::claim(reply, packet.v4, &rows.reply, true)
    } else {
        config::is_dry_run() || reply.claim(there, packet.v4, &rows.reply)
    }
}

/// Whether the replies to `to`, the translation of `packet`, belong to another live connection: the same ports of the
/// pod towards the same backend, once through a service and once directly, have the same replies.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
fn is_taken(network: u32, packet: &Packet, to: &Packet) -> bool {
    let reply = Tuple::of(to).reversed();
    let Some(row) = reply.find_any(network, packet.v4) else {
        return false;
    };
    is_connection(row, packet) && (row.flags & FLOW_TRANSLATED == 0 || !is_translation_of(row, packet))
}

/// Whether the row is of a live connection.
#[inline(always)]
fn is_connection(row: &FlowValue, packet: &Packet) -> bool {
    packet.protocol == TCP && row.flags & (FLOW_REPLIED | FLOW_CLOSED) == FLOW_REPLIED && row.is_live(now())
}

/// Whether the row, that of replies, becomes replies to the packet.
#[inline(always)]
fn is_translation_of(row: &FlowValue, packet: &Packet) -> bool {
    words(row.source) == packet.destination
        && words(row.destination) == packet.source
        && row.ports.word() == swapped(packet.ports)
}
