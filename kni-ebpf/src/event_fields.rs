//! Keeps which fields of an event under construction are filled.

use kni_common::event::{FlowEvent, PolicyTrail};

/// Bits of `FlowEvent::reserved` while the event is under construction: the fields that are filled. Most events are
/// never sent, and need none of them.
pub const TRANSLATION: u32 = 1;
/// [`TRANSLATION`]: `FlowEvent::egress`.
pub const EGRESS: u32 = 1 << 1;
/// [`TRANSLATION`]: `FlowEvent::ingress`.
pub const INGRESS: u32 = 1 << 2;
/// [`TRANSLATION`]: `FlowEvent::beyond`.
pub const EXTERNAL: u32 = 1 << 3;

const NO_POLICY: PolicyTrail = PolicyTrail {
    set: 0,
    identity: 0,
    rule: 0,
    ordinal: 0,
};

/// All fields are filled: the event was sent once.
pub const COMPLETE: u32 = TRANSLATION | EGRESS | INGRESS | EXTERNAL;

/// Fills the fields that nothing has filled: nothing was translated, no policy was evaluated.
#[inline(always)]
pub const fn complete(event: &mut FlowEvent) {
    let filled = event.reserved;
    event.reserved = 0;
    if filled & TRANSLATION == 0 {
        event.translated_source = event.source;
        event.translated_destination = event.destination;
        event.translated_ports = event.ports;
    }
    if filled & EGRESS == 0 {
        event.egress = NO_POLICY;
    }
    if filled & INGRESS == 0 {
        event.ingress = NO_POLICY;
    }
    if filled & EXTERNAL == 0 {
        event.beyond = NO_POLICY;
    }
}
