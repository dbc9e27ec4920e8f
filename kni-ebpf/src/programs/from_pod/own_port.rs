//! Finds the pod of a port of this node for packets of the node's own pods.

use kni_common::{Verdict, endpoint::EndpointRow};

use crate::{decision::Reason, host_port, packet::Packet, work::Work};

/// Translates `work.to`, a packet to the node's stack, to the pod that its destination leads to; false where it leads
/// to none of the sender's network.
#[inline(always)]
pub(super) fn translate(row: &EndpointRow, packet: &Packet, work: &mut Work) -> Result<bool, Reason> {
    Ok(Reason::value(from_pod_own_port(row, packet, work))? != 0)
}

/// [`translate`]: 1 for true, or a reason to drop the packet.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn from_pod_own_port(row: *const EndpointRow, packet: *const Packet, work: *mut Work) -> u32 {
    // SAFETY: a row that stays mapped.
    let row = unsafe { row.as_ref() };
    // SAFETY: the caller's own memory; nothing else touches it meanwhile.
    let packet = unsafe { packet.as_ref() };
    // SAFETY: as above.
    let work = unsafe { work.as_mut() };
    let (Some(row), Some(packet), Some(work)) = (row, packet, work) else {
        return 0;
    };
    match host_port::find_within(row.network, packet) {
        Ok(Some((mapping, there))) if host_port::translate(packet, there, mapping.port, &mut work.to) => 1,
        Ok(Some(_)) => Reason::from(Verdict::DestinationAddress).refusal(),
        Ok(None) => 0,
        Err(reason) => Reason::from(reason).refusal(),
    }
}
