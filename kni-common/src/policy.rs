//! The policy tables: what an endpoint may send and receive, by its policy set and the peer's identity.
//!
//! A *policy set* is what all policies that select an endpoint say together; endpoints that the same policies select share
//! one. An *identity* stands for the peers that all policies of a network treat alike. Rows of a set are complete before
//! an endpoint's row names it, and never change their meaning afterwards.
//!
//! Asking takes at most three lookups per direction, however many rules there are: the row of (set, identity), which
//! already holds what is allowed to everybody; without one the row of (set, [`IDENTITY_ANY`]); and where the row does not
//! decide alone, the port row. No row is a denial.

use crate::layout::map_types;

map_types! {
    /// Key of `POLICY`.
    pub struct PolicyKey {
        /// Policy set.
        pub set: u32,
        /// Identity of the peer, or [`IDENTITY_ANY`].
        pub identity: u32,
        /// [`EGRESS`], [`INGRESS`] or [`BEYOND`].
        pub direction: u32,
    }

    /// Value of `POLICY`.
    pub struct PolicyValue {
        /// [`PORTS_ALL`], [`PORTS_NONE`], or the port set to ask, key of `PORTS`.
        pub ports: u32,
        /// Leads back to policies and rules: the agent knows what it stands for. 0 where no policy isolates the
        /// endpoint in this direction.
        pub rule: u32,
    }

    /// Data of a key of `PORTS`, behind the trie's own 32-bit prefix length.
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
        /// What is matched.
        pub data: PortData,
    }

    /// Value of `PORTS`.
    pub struct PortValue {
        /// Which of the port set's entries this is: together with [`PolicyValue::rule`] it leads back to a rule.
        pub ordinal: u16,
        /// 1 to allow, 0 to deny.
        pub allow: u16,
    }

    /// Data of a key of `IDENTITIES`, behind the trie's own 32-bit prefix length, which counts the network's 32 bits too.
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
        /// What is matched.
        pub data: IdentityData,
    }

    /// Value of `IDENTITIES`: identity of addresses that are no local endpoint's.
    pub struct IdentityValue {
        /// The identity.
        pub identity: u32,
    }
}

/// In place of an identity: every peer that has no row of its own.
pub const IDENTITY_ANY: u32 = 0;

/// The row denies everything.
pub const PORTS_NONE: u32 = 0;

/// The row allows every protocol and port.
pub const PORTS_ALL: u32 = 1;

/// What the endpoint sends to pods and elsewhere (NetworkPolicy).
pub const EGRESS: u32 = 0;

/// What the endpoint receives (NetworkPolicy).
pub const INGRESS: u32 = 1;

/// What the endpoint sends beyond the pod networks (EgressPolicy).
pub const BEYOND: u32 = 2;

/// Prefix length of a port row for every protocol.
pub const PREFIX_ANY_PROTOCOL: u32 = 32;

/// Prefix length of a port row for every port of a protocol.
pub const PREFIX_ANY_PORT: u32 = 48;

/// Prefix length of a port row for one port.
pub const PREFIX_PORT: u32 = 64;
