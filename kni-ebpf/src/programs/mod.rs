//! Contains one module per program.

pub mod clock;
mod from_node;
pub mod from_overlay;
pub mod from_pod;
pub mod from_uplink;
pub mod node_socket;
pub mod to_overlay;
pub mod to_pod;
pub mod to_uplink;
pub mod xdp_pod;
pub mod xdp_uplink;
