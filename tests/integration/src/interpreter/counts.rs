//! Counts what a program executes for a packet.

use std::{collections::BTreeMap, fmt};

/// A kind of memory that programs access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Memory {
    /// The program's own stack.
    Stack,
    /// The packet.
    Packet,
    /// A value of a map, or a constant of the object.
    Map,
    /// A field of `__sk_buff`.
    Context,
}

/// What a program executed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions of the object; a 64-bit constant is one.
    pub instructions: u64,
    /// Of these, conditional jumps.
    pub branches: u64,
    /// Calls of other functions of the object.
    pub calls: u64,
    /// Atomic operations.
    pub atomics: u64,
    /// Loads by kind of memory.
    pub loads: BTreeMap<Memory, u64>,
    /// Stores by kind of memory.
    pub stores: BTreeMap<Memory, u64>,
    /// Calls of kernel functions by name. The kernel inlines some of them, for example lookups in arrays.
    pub helpers: BTreeMap<&'static str, u64>,
    /// Lookups by name of the map.
    pub lookups: BTreeMap<String, u64>,
}

impl Counts {
    /// Loads from and stores to the stack.
    #[must_use]
    pub fn stack(&self) -> u64 {
        let of = |counts: &BTreeMap<Memory, u64>| counts.get(&Memory::Stack).copied().unwrap_or(0);
        of(&self.loads) + of(&self.stores)
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} instructions, {} stack accesses, {} branches, {} calls, {} atomics; loads {:?}, stores {:?}; helpers \
             {:?}; lookups {:?}",
            self.instructions,
            self.stack(),
            self.branches,
            self.calls,
            self.atomics,
            self.loads,
            self.stores,
            self.helpers,
            self.lookups
        )
    }
}
