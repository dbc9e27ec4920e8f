//! Tests a node under attack: floods of connections, lookups, closed connections, fragments and resets. Flows of others
//! lose nothing, attacked pods still open connections, and the counters name the attacker.
//!
//! Long runs have the sizes and rates of a real attack; otherwise the numbers just exceed the limits.

mod closed;
mod connections;
mod fragments;
mod lookups;
mod resets;
mod scene;

/// The port of servers.
pub(crate) const PORT: u16 = 8080;
