//! Connects to the API server and follows its objects: one watch per kind fills the tables of `kni-cluster`.
//! Layer: service.
//!
//! kni-agent and kni-controller share it. It decides nothing and writes nothing.

mod client;
mod reflector;
mod resources;

pub use client::{ClientError, connect};
pub use resources::{node_row, reflect_cluster, reflect_node};
