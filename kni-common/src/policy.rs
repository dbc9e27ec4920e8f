//! Defines the policy tables: the traffic that an endpoint may send and receive, by policy set and peer identity.
//!
//! A *policy set* is the union of all policies that select an endpoint; endpoints selected by the same policies share
//! one. An *identity* stands for all peers that the policies of a network treat alike. The rows of a set are complete
//! before an endpoint's row refers to it, and never change their meaning afterwards.
//!
//! An evaluation takes at most three lookups per direction, however many rules there are: the row of (set, identity),
//! which already includes what is allowed to every peer; without one, the row of (set, [`IDENTITY_ANY`]); and the port
//! row, unless the first row is decisive. A missing row is a denial.

use crate::map_types::map_types;

map_types! {
    /// Key of `POLICY`.
    pub struct PolicyKey {
        /// Policy set.
        pub set: u32,
        /// Identity of the peer, or [`IDENTITY_ANY`].
        pub identity: u32,
        /// [`EGRESS`], [`INGRESS`] or [`EXTERNAL`].
        pub direction: u32,
    }

    /// Value of `POLICY`.
    pub struct PolicyValue {
        /// [`PORTS_ALL`], [`PORTS_NONE`], or the port set to look up, key of `PORTS`.
        pub ports: u32,
        /// Identifies policies and rules for the agent. 0 where no policy isolates the endpoint in this direction.
        pub rule: u32,
    }

    /// Data of a key of `PORTS`, after the trie's own 32-bit prefix length.
    pub struct PortData {
        /// Port set, network byte order.
        pub ports: [u8; 4],
        /// Transport protocol number.
        pub protocol: u8,
        /// Zero.
        pub zero: u8,
        /// Destination port, network byte order.
        pub port: [u8; 2],
    }

    /// The whole key of `PORTS` as the kernel sees it.
    pub struct PortKey {
        /// Significant bits of `data`: [`PREFIX_ANY_PROTOCOL`], or [`PREFIX_ANY_PORT`] and up to 16 more.
        pub prefix_length: u32,
        /// Matched data.
        pub data: PortData,
    }

    /// Value of `PORTS`.
    pub struct PortValue {
        /// Position among the port set's entries; together with [`PolicyValue::rule`] it identifies a rule.
        pub ordinal: u16,
        /// 1 to allow, 0 to deny.
        pub allow: u16,
    }

    /// Data of a key of `IDENTITIES`, after the trie's own 32-bit prefix length, which includes the network's 32 bits.
    pub struct IdentityData {
        /// Network id in network byte order.
        pub network: [u8; 4],
        /// Address prefix, IPv4 as `::ffff:a.b.c.d`.
        pub address: [u8; 16],
    }

    /// The whole key of `IDENTITIES` as the kernel sees it.
    pub struct IdentityKey {
        /// Significant bits of `data`.
        pub prefix_length: u32,
        /// Matched data.
        pub data: IdentityData,
    }

    /// Value of `IDENTITIES`: identity of addresses that belong to no local endpoint.
    pub struct IdentityValue {
        /// The identity.
        pub identity: u32,
    }
}

/// In place of an identity: every peer without a row of its own.
pub const IDENTITY_ANY: u32 = 0;

/// The row denies everything.
pub const PORTS_NONE: u32 = 0;

/// The row allows every protocol and port.
pub const PORTS_ALL: u32 = 1;

/// Traffic that the endpoint sends (NetworkPolicy).
pub const EGRESS: u32 = 0;

/// Traffic that the endpoint receives (NetworkPolicy).
pub const INGRESS: u32 = 1;

/// Traffic that the endpoint sends to destinations outside the pod networks (EgressPolicy).
pub const EXTERNAL: u32 = 2;

/// Prefix length of a port row for every protocol.
pub const PREFIX_ANY_PROTOCOL: u32 = 32;

/// Prefix length of a port row for every port of a protocol.
pub const PREFIX_ANY_PORT: u32 = 48;

/// Prefix length of a port row for one port.
pub const PREFIX_PORT: u32 = 64;
