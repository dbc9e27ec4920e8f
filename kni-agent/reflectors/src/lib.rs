//! Connects to the API server and follows its objects: one watch per kind fills the tables of `kni-cluster`.
//! Layer: service.
//!
//! kni-agent and kni-controller share it. It decides nothing and writes nothing.

mod client;
mod decoded;
mod later;
mod of_others;
mod own_view;
mod pace;
mod reflector;
mod requests;
mod resources;
mod served;
mod streamed;
mod watches;

pub use client::{ClientError, Connection, Sender, connect};
pub use reflector::version_of;
pub use requests::{Interruptions, RequestCount, RequestCounts, RequestLimits};
pub use resources::{Reflector, node_row, reflect_cluster, reflect_node, refused_of_cluster};
pub use watches::{WatchState, WatchView};
