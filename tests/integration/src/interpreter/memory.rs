//! Models the memory that programs address: the number of a region in the upper half of a pointer, an offset in the
//! lower half.

#![expect(
    clippy::cast_possible_truncation,
    reason = "registers hold narrower numbers, as the instruction set defines"
)]

use anyhow::{Context as _, Result, bail};

use super::{counts::Memory as Kind, map::Map};

/// Length of `struct __sk_buff` (linux/bpf.h), and the offsets of the fields with a meaning here.
pub(super) const CONTEXT_LENGTH: usize = 192;
pub(super) const LENGTH: usize = 0;
pub(super) const PROTOCOL: usize = 16;
pub(super) const INGRESS_IFINDEX: usize = 36;
pub(super) const IFINDEX: usize = 40;
const DATA: u64 = 76;
const DATA_END: u64 = 80;

const CONTEXT: u64 = 1;
const PACKET: u64 = 2;
const STACK: u64 = 3;
/// Objects of the kernel that programs can only pass on: maps.
const HANDLES: u64 = 1 << 16;
/// Values of the maps.
const VALUES: u64 = 2 << 16;
/// Records that a program has reserved in a ring buffer.
const RECORDS: u64 = 3 << 16;

/// Bytes in front of the packet, so that a pointer to it never has offset 0.
const HEADROOM: u64 = 256;
/// Bytes of a function's stack, and depth of calls: the limits of the kernel.
const FRAME: u64 = 512;
pub(super) const DEPTH: usize = 8;

const fn pointer(region: u64, offset: u64) -> u64 {
    region << 32 | offset
}

/// All memory of an execution.
#[derive(Debug)]
pub(super) struct Memory<'a> {
    context: [u8; CONTEXT_LENGTH],
    pub(super) packet: Vec<u8>,
    stack: Vec<u8>,
    records: Vec<Vec<u8>>,
    pub(super) maps: &'a mut [Map],
}

impl<'a> Memory<'a> {
    pub(super) fn new(context: [u8; CONTEXT_LENGTH], packet: Vec<u8>, maps: &'a mut [Map]) -> Self {
        Self {
            context,
            packet,
            stack: vec![0; DEPTH * FRAME as usize],
            records: Vec::new(),
            maps,
        }
    }

    pub(super) fn context_pointer() -> u64 {
        pointer(CONTEXT, 0)
    }

    /// The end of the stack of the function at this depth: register 10.
    pub(super) fn frame_pointer(depth: usize) -> u64 {
        pointer(STACK, (depth as u64 + 1) * FRAME)
    }

    pub(super) fn map_pointer(number: u64) -> u64 {
        pointer(HANDLES + number, 0)
    }

    pub(super) fn value_pointer(number: usize, offset: usize) -> u64 {
        pointer(VALUES + number as u64, offset as u64)
    }

    /// The number of the map that the pointer stands for.
    pub(super) fn map(&self, pointer: u64) -> Result<usize> {
        let number = (pointer >> 32).checked_sub(HANDLES).context("no map")? as usize;
        self.maps.get(number).context("no map")?;
        Ok(number)
    }

    /// Room for a record of a ring buffer.
    pub(super) fn reserve(&mut self, size: usize) -> u64 {
        self.records.push(vec![0; size]);
        pointer(RECORDS + self.records.len() as u64 - 1, 0)
    }

    /// Loads a number of 1, 2, 4 or 8 bytes.
    pub(super) fn load(&self, address: u64, size: usize) -> Result<(u64, Kind)> {
        if address >> 32 == CONTEXT {
            // Loads of these two become loads of a whole pointer.
            match address & 0xffff_ffff {
                DATA => return Ok((pointer(PACKET, HEADROOM), Kind::Context)),
                DATA_END => return Ok((pointer(PACKET, HEADROOM + self.packet.len() as u64), Kind::Context)),
                _ => {}
            }
        }
        let (bytes, kind) = self.at(address, size)?;
        let mut word = [0; 8];
        word[..size].copy_from_slice(bytes);
        Ok((u64::from_le_bytes(word), kind))
    }

    /// Stores the low bytes of a number.
    pub(super) fn store(&mut self, address: u64, size: usize, value: u64) -> Result<Kind> {
        let (bytes, kind) = self.at_mut(address, size)?;
        bytes.copy_from_slice(&value.to_le_bytes()[..size]);
        Ok(kind)
    }

    /// The bytes at an address.
    pub(super) fn at(&self, address: u64, size: usize) -> Result<(&[u8], Kind)> {
        let (region, offset) = (address >> 32, address & 0xffff_ffff);
        let (memory, start, kind): (&[u8], u64, Kind) = match region {
            CONTEXT => (&self.context, 0, Kind::Context),
            PACKET => (&self.packet, HEADROOM, Kind::Packet),
            STACK => (&self.stack, 0, Kind::Stack),
            RECORDS.. => (
                self.records.get(number(region, RECORDS)).context("a record")?,
                0,
                Kind::Map,
            ),
            VALUES.. => (
                &self.maps.get(number(region, VALUES)).context("a map")?.memory,
                0,
                Kind::Map,
            ),
            _ => bail!("{address:#x} points to nothing"),
        };
        let bytes = range(offset, start, size).and_then(|range| memory.get(range));
        Ok((bytes.with_context(|| outside(address, size, memory.len()))?, kind))
    }

    /// [`Self::at`], for writing.
    pub(super) fn at_mut(&mut self, address: u64, size: usize) -> Result<(&mut [u8], Kind)> {
        let (region, offset) = (address >> 32, address & 0xffff_ffff);
        let (memory, start, kind): (&mut [u8], u64, Kind) = match region {
            CONTEXT => (&mut self.context, 0, Kind::Context),
            PACKET => (&mut self.packet, HEADROOM, Kind::Packet),
            STACK => (&mut self.stack, 0, Kind::Stack),
            RECORDS.. => {
                let record = self.records.get_mut(number(region, RECORDS)).context("a record")?;
                (record, 0, Kind::Map)
            }
            VALUES.. => {
                let map = self.maps.get_mut(number(region, VALUES)).context("a map")?;
                (&mut map.memory, 0, Kind::Map)
            }
            _ => bail!("{address:#x} points to nothing"),
        };
        let length = memory.len();
        let bytes = range(offset, start, size).and_then(|range| memory.get_mut(range));
        Ok((bytes.with_context(|| outside(address, size, length))?, kind))
    }
}

fn number(region: u64, first: u64) -> usize {
    (region - first) as usize
}

fn range(offset: u64, start: u64, size: usize) -> Option<std::ops::Range<usize>> {
    let from = offset.checked_sub(start)? as usize;
    Some(from..from + size)
}

fn outside(address: u64, size: usize, length: usize) -> String {
    format!("{size} bytes at {address:#x} are outside of the {length} bytes there")
}
