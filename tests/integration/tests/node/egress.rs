//! Tests egress of the node and ingress from outside: masquerading, host ports, egress policies, dropped sources.

mod checksums;
mod churn;
mod errors;
mod host_port_tuples;
mod host_ports;
mod leave;
mod masquerade_full;
mod node_ports;
mod node_sockets;
mod owners;
mod policies;
mod port_owners;
mod port_ranges;
mod ports;
mod quoted_fragments;
mod renumbered;
mod sequences;
mod strict;
mod takeover;
mod uplink;
mod verdicts;
pub(crate) mod world;
mod xdp;

/// The port of servers.
pub(crate) const PORT: u16 = 8080;

/// Both families, IPv4 first.
pub(crate) const FAMILIES: [bool; 2] = [true, false];
