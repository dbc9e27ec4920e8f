//! Defines the service tables: the backends of a virtual address and port.
//!
//! A list of backends is complete before a row of `SERVICES` refers to it, and outlives the last reference for a while.
//! `ADDRESSES` has a row for each virtual address, so that a packet from pod to pod costs no service lookup.

use crate::{address::words, map_types::map_types};

map_types! {
    /// Key of `SERVICES`.
    pub struct ServiceKey {
        /// Network id.
        pub network: u32,
        /// Virtual address, network byte order, IPv4 as `::ffff:a.b.c.d`.
        pub address: [u8; 16],
        /// Port, network byte order.
        pub port: [u8; 2],
        /// Transport protocol number.
        pub protocol: u16,
    }

    /// Value of `SERVICES`.
    pub struct ServiceValue {
        /// Id of the service port, stable as long as the port exists, also across restarts of the agent.
        pub service: u32,
        /// List of backends, key of `BACKENDS`; a new one after each change.
        pub backends: u32,
        /// Backends in the list.
        pub count: u32,
        /// Bits `SERVICE_*`.
        pub flags: u32,
        /// jiffies of inactivity after which a client loses its backend; 0 without session affinity.
        pub affinity: u32,
        /// In the table [`ServiceValue::seal`] of the row, in the agent's memory 0: a program that reads it while the
        /// kernel reuses its memory for another row notices.
        pub check: u32,
    }

    /// Key of `BACKENDS`.
    pub struct BackendKey {
        /// The list.
        pub backends: u32,
        /// Position in it, from 0.
        pub slot: u32,
    }

    /// Value of `BACKENDS`.
    pub struct BackendValue {
        /// Address, network byte order, IPv4 as `::ffff:a.b.c.d`.
        pub address: [u8; 16],
        /// Port, network byte order.
        pub port: [u8; 2],
        /// Zero.
        pub zero: u16,
        /// [`BackendValue::seal`] of the row, used as [`ServiceValue::check`].
        pub check: u32,
    }

    /// Key of `AFFINITY`.
    pub struct AffinityKey {
        /// Id of the service port.
        pub service: u32,
        /// Network of the client.
        pub network: u32,
        /// Address of the client, network byte order, IPv4 as `::ffff:a.b.c.d`.
        pub client: [u8; 16],
    }

    /// Value of `AFFINITY`.
    pub struct AffinityValue {
        /// jiffies of the last new flow.
        pub last_used: u64,
        /// Address of the backend.
        pub address: [u8; 16],
        /// Port of the backend, network byte order.
        pub port: [u8; 2],
        /// Zero.
        pub zero: [u8; 6],
    }
}

impl ServiceValue {
    /// The check word of a row with this key and these contents.
    #[inline(always)]
    #[must_use]
    pub const fn seal(&self, key: &ServiceKey) -> u32 {
        let [a, b] = key.port;
        let [c, d] = key.protocol.to_ne_bytes();
        let sum = mixed(0, key.network);
        let sum = mixed_address(sum, key.address);
        let sum = mixed(sum, u32::from_ne_bytes([a, b, c, d]));
        let sum = mixed(mixed(sum, self.service), self.backends);
        mixed(mixed(mixed(sum, self.count), self.flags), self.affinity)
    }
}

impl BackendValue {
    /// The check word of a row with this key and these contents.
    #[inline(always)]
    #[must_use]
    pub const fn seal(&self, key: &BackendKey) -> u32 {
        let [a, b] = self.port;
        let sum = mixed(mixed(0, key.backends), key.slot);
        mixed(mixed_address(sum, self.address), u32::from_ne_bytes([a, b, 0, 0]))
    }
}

#[inline(always)]
const fn mixed_address(sum: u32, address: [u8; 16]) -> u32 {
    let [a, b, c, d] = words(address);
    mixed(mixed(mixed(mixed(sum, a), b), c), d)
}

/// Adds a word, so that the result depends on its place. Not against forgery: only the agent writes the rows.
#[inline(always)]
const fn mixed(sum: u32, word: u32) -> u32 {
    (sum ^ word).wrapping_mul(0x9e37_79b1).rotate_left(15)
}

/// Without backends the packet is dropped instead of refused: backends exist, but none on this node, and the service
/// has a local traffic policy.
pub const SERVICE_DROP_IF_EMPTY: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_mixture_of_two_rows_has_the_check_word_of_either() {
        let key = |last| ServiceKey {
            network: 1,
            address: [last; 16],
            port: [0, 80],
            protocol: 6,
        };
        let row = |service, backends, count, last| {
            let row = ServiceValue {
                service,
                backends,
                count,
                flags: 0,
                affinity: 0,
                check: 0,
            };
            let check = row.seal(&key(last));
            ServiceValue { check, ..row }
        };
        let (one, other) = (row(1, 10, 1, 7), row(2, 11, 5, 8));
        assert_ne!(other.seal(&key(7)), other.check, "a whole row in the place of another");
        let words = |row: ServiceValue| [row.service, row.backends, row.count, row.flags, row.affinity, row.check];
        // Each word from either row.
        for choice in 1..63_u32 {
            let mut mixture = words(one);
            for (index, word) in words(other).into_iter().enumerate() {
                if choice & (1 << index) != 0 {
                    mixture[index] = word;
                }
            }
            let [service, backends, count, flags, affinity, check] = mixture;
            let mixture = ServiceValue {
                service,
                backends,
                count,
                flags,
                affinity,
                check,
            };
            assert_eq!(mixture.seal(&key(7)) == check, mixture == one, "{mixture:?}");
        }
    }

    #[test]
    fn a_backend_of_another_list_or_position_is_noticed() {
        let key = |backends, slot| BackendKey { backends, slot };
        let row = BackendValue {
            address: [9; 16],
            port: [0, 80],
            zero: 0,
            check: 0,
        };
        let seal = row.seal(&key(3, 1));
        assert_ne!(row.seal(&key(4, 1)), seal);
        assert_ne!(row.seal(&key(3, 0)), seal);
        assert_ne!(BackendValue { port: [0, 81], ..row }.seal(&key(3, 1)), seal);
    }
}
