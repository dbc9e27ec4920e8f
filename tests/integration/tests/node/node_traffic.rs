//! Tests traffic between the node and the pods of its default network: immediately, for all sizes, and without changes
//! of the node's settings.

mod capture;
pub(crate) mod checksums;
mod errors;
mod first_packet;
mod footprint;
mod path_mtu;
mod volume;

/// The port of servers.
pub(crate) const PORT: u16 = 8080;

/// Both families, IPv4 first.
pub(crate) const FAMILIES: [bool; 2] = [true, false];
