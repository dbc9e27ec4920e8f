//! Builds the keys of the two flow tables and accesses their rows.

use aya_ebpf::bindings::BPF_NOEXIST;
use kni_common::{
    Verdict,
    address::{bytes, mapped, words},
    flow::{FLOW_FROM, FLOW_TO, FlowKey4, FlowKey6, FlowValue, KIND_UPLINK, Ports, swapped},
};

use crate::{
    maps::{FLOWS4, FLOWS6},
    packet::Packet,
};

/// Identifies one direction of a flow within a network. By value and small: each copy costs stack.
#[derive(Clone, Copy)]
pub(super) struct Tuple {
    pub(super) source: [u32; 4],
    pub(super) destination: [u32; 4],
    pub(super) ports: u32,
    protocol: u32,
}

impl Tuple {
    #[inline(always)]
    pub(super) const fn of(packet: &Packet) -> Self {
        Self {
            source: packet.source,
            destination: packet.destination,
            ports: packet.ports,
            protocol: packet.protocol as u32,
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

    #[inline(always)]
    pub(super) fn translated(self, row: &FlowValue) -> Self {
        self.translated_if::<true>(row)
    }

    /// [`Self::translated`], where `BOTH` is false for flows that are not translated at both ends.
    #[inline(always)]
    pub(super) fn translated_if<const BOTH: bool>(self, row: &FlowValue) -> Self {
        let mut to = self;
        if row.flags & (FLOW_TO | FLOW_FROM) == 0 {
            return to;
        }
        to.ports = row.ports.word();
        if row.flags & FLOW_TO == 0 {
            to.source = words(row.address);
            return to;
        }
        if row.flags & FLOW_FROM != 0 {
            if BOTH && row.kind == KIND_UPLINK {
                let [source, destination, ..] = words(row.address);
                to.source = mapped(source);
                to.destination = mapped(destination);
                return to;
            }
            to.source = self.destination;
        }
        to.destination = words(row.address);
        to
    }

    #[inline(always)]
    fn key4(self, network: u32) -> FlowKey4 {
        let [.., source] = self.source;
        let [.., destination] = self.destination;
        FlowKey4 {
            network,
            source: source.to_ne_bytes(),
            destination: destination.to_ne_bytes(),
            ports: Ports::from_word(self.ports),
            protocol: self.protocol,
        }
    }

    #[inline(always)]
    fn key6(self, network: u32) -> FlowKey6 {
        FlowKey6 {
            network,
            source: bytes(self.source),
            destination: bytes(self.destination),
            ports: Ports::from_word(self.ports),
            protocol: self.protocol,
        }
    }

    #[inline(always)]
    pub(super) fn find(self, network: u32, v4: bool) -> Option<&'static mut FlowValue> {
        let value = if v4 {
            FLOWS4.get_ptr_mut(self.key4(network))
        } else {
            FLOWS6.get_ptr_mut(self.key6(network))
        };
        // SAFETY: an LRU row's memory stays mapped while the program runs (RCU); a row that is reused meanwhile is
        // detected by its generations, and a lost refresh does no harm.
        value.map(|row| unsafe { &mut *row })
    }

    #[inline(always)]
    pub(super) fn claim(self, network: u32, v4: bool, value: &FlowValue) -> bool {
        let unless_there = u64::from(BPF_NOEXIST);
        if v4 {
            FLOWS4.insert(self.key4(network), value, unless_there).is_ok()
        } else {
            FLOWS6.insert(self.key6(network), value, unless_there).is_ok()
        }
    }

    #[inline(always)]
    pub(super) fn remove(self, network: u32, v4: bool) {
        let _gone_already = if v4 {
            FLOWS4.remove(self.key4(network))
        } else {
            FLOWS6.remove(self.key6(network))
        };
    }

    #[inline(always)]
    pub(super) fn put(self, network: u32, v4: bool, value: &FlowValue) -> Result<(), Verdict> {
        let written = if v4 {
            FLOWS4.insert(self.key4(network), value, 0)
        } else {
            FLOWS6.insert(self.key6(network), value, 0)
        };
        written.map_err(|_errno| Verdict::FlowTableFull)
    }
}
