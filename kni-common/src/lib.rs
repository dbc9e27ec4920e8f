//! The contract between the eBPF programs and user space: map layouts, verdicts and the decisions both sides share.
//!
//! Rules for everything that lies in a map or on the ring buffer:
//! - fixed `repr(C)` layout without padding, no `bool` and no enum (see [`layout`], which proves it);
//! - addresses and ports are in network byte order, as they stand in a packet; the field's doc says so;
//! - IPv4 addresses that share a field with IPv6 lie in its last four bytes behind `::ffff:0:0/96`;
//! - every key by which a packet's way is looked up (addresses, routes, flows, fragments) holds the network, so that no
//!   entry of one network can match a packet of another; the other maps are indexed by endpoint.

#![cfg_attr(not(any(test, feature = "user")), no_std)]
#![expect(clippy::inline_always, reason = "in an eBPF program a call costs 12 to 16 ns")]

pub mod address;
pub mod config;
pub mod counter;
pub mod crc32c;
pub mod endpoint;
pub mod event;
pub mod flow;
pub mod layout;
pub mod policy;
pub mod route;
pub mod service;
pub mod uplink;
pub mod verdict;

pub use verdict::{Direction, Verdict};

/// Host-side interfaces of endpoints have the index `IFINDEX_BASE + endpoint id`, so that the programs find an
/// endpoint's row by array index instead of a hash lookup (27 ns less per packet). Far above what the kernel assigns
/// by itself, which counts up from 1.
pub const IFINDEX_BASE: u32 = 1_000_000;

/// The IPv4 address that every pod uses as its gateway (link-local, RFC 3927), in network byte order.
pub const GATEWAY_V4: [u8; 4] = [169, 254, 1, 1];

/// The IPv6 address that every pod uses as its gateway.
pub const GATEWAY_V6: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
