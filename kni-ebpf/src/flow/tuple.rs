//! Builds the keys of the two flow tables and accesses their rows.

use aya_ebpf::bindings::BPF_NOEXIST;
use kni_common::{
    Verdict,
    address::bytes,
    flow::{EndPorts, FLOW_FROM_SECOND, FLOW_TRANSLATED, FlowKey4, FlowKey6, FlowValue, is_second, scope, swapped},
};

use super::scratch;
use crate::{
    maps::{FLOWS4, FLOWS6},
    packet::Packet,
};

/// Identifies one direction of a flow within a network.
///
/// VERIFIER: by reference; copies of the addresses would cost stack in every function that looks up a row.
#[derive(Clone, Copy)]
pub(super) struct Tuple<'a> {
    source: &'a [u32; 4],
    destination: &'a [u32; 4],
    ports: u32,
    protocol: u8,
}

impl<'a> Tuple<'a> {
    #[inline(always)]
    pub(super) const fn of(packet: &'a Packet) -> Self {
        Self {
            source: &packet.source,
            destination: &packet.destination,
            ports: packet.ports,
            protocol: packet.protocol,
        }
    }

    #[inline(always)]
    pub(super) const fn reversed(self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            ports: swapped(self.ports),
            protocol: self.protocol,
        }
    }

    /// The tuple after the translation of the row.
    #[inline(always)]
    pub(super) fn translated(self, row: &'a FlowValue) -> Self {
        Self {
            source: as_words(&row.source),
            destination: as_words(&row.destination),
            ports: row.ports.word(),
            protocol: self.protocol,
        }
    }

    /// Whether the sender is the second end of the key.
    #[inline(always)]
    pub(super) fn is_second(&self) -> bool {
        flow_is_second(self.source, self.destination) != 0
    }

    #[inline(always)]
    pub(super) fn key4(self, network: u32) -> FlowKey4 {
        let ([.., mut first], [.., mut last]) = (*self.source, *self.destination);
        // The other words of the two are equal.
        let second = first > last;
        if second {
            (first, last) = (last, first);
        }
        FlowKey4 {
            scope: scope(network, self.protocol),
            first: first.to_ne_bytes(),
            second: last.to_ne_bytes(),
            ports: EndPorts::from_word(self.ports, second),
        }
    }

    /// The key in scratch memory.
    ///
    /// VERIFIER: not on the stack, of which the callers have little.
    #[inline(always)]
    pub(super) fn key6(self, network: u32) -> Option<&'static FlowKey6> {
        let key = &mut scratch::rows()?.key6;
        let second = self.is_second();
        let (first, last) = if second {
            (self.destination, self.source)
        } else {
            (self.source, self.destination)
        };
        key.first = bytes(*first);
        key.second = bytes(*last);
        key.scope = scope(network, self.protocol);
        key.ports = EndPorts::from_word(self.ports, second);
        Some(key)
    }

    /// The row with the tuple's key, whichever direction it is of.
    #[inline(always)]
    pub(super) fn find_any(self, network: u32, v4: bool) -> Option<&'static mut FlowValue> {
        let value = if v4 {
            FLOWS4.get_ptr_mut(self.key4(network))
        } else {
            FLOWS6.get_ptr_mut(self.key6(network)?)
        };
        // SAFETY: the memory of an LRU row stays mapped. Another flow may take it over while the program runs: callers
        // copy what they need once and check the copy against the endpoints' rows, and a lost refresh does no harm.
        value.map(|row| unsafe { &mut *row })
    }

    /// The row of the tuple's packets.
    #[inline(always)]
    pub(super) fn find(self, network: u32, v4: bool) -> Option<&'static mut FlowValue> {
        let row = self.find_any(network, v4)?;
        is_of(row.flags, self.is_second()).then_some(row)
    }

    #[inline(always)]
    pub(super) fn claim(self, network: u32, v4: bool, value: &FlowValue) -> bool {
        let unless_there = u64::from(BPF_NOEXIST);
        if v4 {
            FLOWS4.insert(self.key4(network), value, unless_there).is_ok()
        } else {
            self.key6(network)
                .is_some_and(|key| FLOWS6.insert(key, value, unless_there).is_ok())
        }
    }

    #[inline(always)]
    pub(super) fn remove(self, network: u32, v4: bool) {
        let _gone_already = if v4 {
            FLOWS4.remove(self.key4(network))
        } else {
            self.key6(network).map_or(Ok(()), |key| FLOWS6.remove(key))
        };
    }

    #[inline(always)]
    pub(super) fn put(self, network: u32, v4: bool, value: &FlowValue) -> Result<(), Verdict> {
        let written = if v4 {
            FLOWS4.insert(self.key4(network), value, 0)
        } else {
            let key = self.key6(network).ok_or(Verdict::FlowTableFull)?;
            FLOWS6.insert(key, value, 0)
        };
        written.map_err(|_errno| Verdict::FlowTableFull)
    }
}

/// Whether a row with these flags is of packets of the first or the second end: a translated row is of one direction.
#[inline(always)]
pub(super) const fn is_of(flags: u16, second: bool) -> bool {
    let expected = if second {
        FLOW_TRANSLATED | FLOW_FROM_SECOND
    } else {
        FLOW_TRANSLATED
    };
    flags & FLOW_TRANSLATED == 0 || flags & (FLOW_TRANSLATED | FLOW_FROM_SECOND) == expected
}

/// [`is_second`].
///
/// VERIFIER: a global function, see `global`: the comparison has four branches, which would multiply the states of its
/// callers.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_is_second(source: *const [u32; 4], destination: *const [u32; 4]) -> u32 {
    // SAFETY: the caller's own memory, or a row that stays mapped.
    let source = unsafe { source.as_ref() };
    // SAFETY: as above.
    let destination = unsafe { destination.as_ref() };
    match (source, destination) {
        (Some(source), Some(destination)) => u32::from(is_second(*source, *destination)),
        _ => 0,
    }
}

/// An address of a row as words.
#[inline(always)]
const fn as_words(address: &[u8; 16]) -> &[u32; 4] {
    const {
        assert!(
            core::mem::align_of::<FlowValue>() == 4
                && core::mem::offset_of!(FlowValue, source) % 4 == 0
                && core::mem::offset_of!(FlowValue, destination) % 4 == 0
        );
    }
    // SAFETY: the address of a `FlowValue`, where it is aligned to four bytes; any bytes are valid words.
    unsafe { &*core::ptr::from_ref(address).cast() }
}
