//! Defines the contract between the eBPF programs and user space: map layouts, verdicts and shared pure functions.
//!
//! Rules for all data in maps and on the ring buffer:
//! - fixed `repr(C)` layout without padding, no `bool` and no enum (`map_types` proves it);
//! - addresses and ports are in network byte order, as in a packet; the field's doc comment names the order;
//! - IPv4 addresses in fields shared with IPv6 occupy the last four bytes, after `::ffff:0:0/96`;
//! - every key that selects a packet's path (addresses, routes, flows, fragments) contains the network, so that an
//!   entry of one network never matches a packet of another; the other maps are indexed by endpoint.

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
mod map_types;
pub mod overlay;
pub mod policy;
pub mod route;
pub mod service;
pub mod uplink;
pub mod verdict;

pub use verdict::{Direction, Verdict};

/// Host interfaces of endpoints have the index `IFINDEX_BASE + endpoint id`, so that the programs find an endpoint's
/// row by array index instead of a hash lookup (27 ns less per packet). Far above the indexes that the kernel assigns
/// by itself, which count up from 1.
pub const IFINDEX_BASE: u32 = 1_000_000;

/// The IPv4 gateway address of every pod (link-local, RFC 3927), in network byte order.
pub const GATEWAY_V4: [u8; 4] = [169, 254, 1, 1];

/// The IPv6 gateway address of every pod.
pub const GATEWAY_V6: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
