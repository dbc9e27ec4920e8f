//! The node and the pods of its default network reach each other, at once and whatever the size, and the node stays as
//! it was.

mod capture;
mod checksums;
mod errors;
mod first_packet;
mod footprint;
mod path_mtu;
mod volume;

/// Where servers listen.
pub(crate) const PORT: u16 = 8080;

/// Both families, IPv4 first.
pub(crate) const FAMILIES: [bool; 2] = [true, false];
