//! Defines the service tables: the backends of a virtual address and port.
//!
//! A list of backends is complete before a row of `SERVICES` refers to it, and outlives the last reference for a while.
//! `ADDRESSES` has a row for each virtual address, so that a packet from pod to pod costs no service lookup.

use crate::map_types::map_types;

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

/// Without backends the packet is dropped instead of refused: backends exist, but none on this node, and the service
/// has a local traffic policy.
pub const SERVICE_DROP_IF_EMPTY: u32 = 1;
