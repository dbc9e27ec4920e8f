//! Contains the programs of the dataplane and their shared parts.
//!
//! ```text
//!  pod A eth0 ══ veth ══ host end A ── from_pod ──┬─ local endpoint B ── bpf_redirect_peer ──> pod B eth0
//!                                                 └─ node's stack (TC_ACT_UNSPEC) ─> routing, NAT, node
//!  node's stack ─> host end B ── to_pod ──> veth ══ pod B eth0
//! ```
//!
//! A packet of an established flow costs one flow lookup (hash), two array reads and two per-CPU counters.

#![cfg_attr(target_arch = "bpf", no_std, feature(asm_experimental_arch))]
#![expect(
    clippy::inline_always,
    reason = "a BPF-to-BPF call costs 12 to 16 ns and loses what the verifier knows"
)]

mod action;
mod atomic;
pub mod config;
pub mod count;
pub mod decision;
pub mod delivery;
pub mod egress;
pub mod endpoint;
pub mod event;
pub mod event_fields;
pub mod explanation;
pub mod flow;
pub mod fragment;
mod global;
pub mod host_port;
pub mod maps;
pub mod masquerade;
pub mod neighbour;
pub mod packet;
pub mod policy;
pub mod programs;
pub mod reject;
pub mod related;
pub mod remote;
pub mod service;
pub mod shares;
pub mod skb;
pub mod socket;
mod straight;
pub mod time;
pub mod translate;
pub mod work;
pub mod xdp;
