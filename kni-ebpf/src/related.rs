//! Matches ICMP errors to the flow of the packet that they quote, and translates both.

use aya_ebpf::programs::TcContext;
use kni_common::{
    Verdict,
    flow::{FLOW_HAIRPIN, FLOW_TRANSLATED, FlowValue},
};

use crate::{
    flow,
    packet::{self, Packet},
    translate,
    work::Work,
};

/// Parses the quoted packet into `work.inner`. Its sender must be the receiver of the error.
#[inline(always)]
pub fn quoted(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Result<(), Verdict> {
    work.inner = Packet::unknown();
    packet::quoted(ctx, packet, &mut work.inner)?;
    if work.inner.source == packet.destination {
        Ok(())
    } else {
        Err(Verdict::IcmpUnrelated)
    }
}

/// Applies the translation of its flow to an error about `work.inner`. `row` is of the direction of the error, opposite
/// to the quoted packet's.
#[inline(always)]
pub fn translate(ctx: &TcContext, packet: &Packet, work: &mut Work, row: &FlowValue) -> Result<(), Verdict> {
    if row.flags & FLOW_TRANSLATED == 0 {
        return Ok(());
    }
    if row.flags & FLOW_HAIRPIN != 0 {
        return Err(Verdict::IcmpUnrelated);
    }
    if !work.inner.is_whole() {
        return Err(Verdict::IcmpFragment);
    }
    work.to = work.inner;
    flow::reverse(&mut work.to);
    flow::translate(&mut work.to, row);
    flow::reverse(&mut work.to);
    work.outer = *packet;
    // A router's own address stays; the peer's becomes the one that the receiver knows.
    if packet.source == work.inner.destination {
        work.outer.source = work.to.destination;
    }
    work.outer.destination = work.to.source;
    translate::apply_quoted(ctx, packet, &work.outer, &work.inner, &work.to)
}
