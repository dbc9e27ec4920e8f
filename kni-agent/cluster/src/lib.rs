//! Caches the objects of the cluster, and derives from them the networks of one node and of its pods.
//! Layer: service.
//!
//! `kni-reflectors` fills the cache from the API server. Attach reads it and never calls the API server.

mod blocks;
mod cache;
pub mod egress;
pub mod joining;
mod meant;
mod networks;
mod numbers;
mod others;
mod policy_row;
mod table;
mod tables;

pub use blocks::{Addresses, BlockDemand, HeldBlocks, Waiting, block_with, needs_blocks};
pub use cache::ClusterCache;
pub use networks::{Networks, taken_blocks};
pub use numbers::{Claim, Numbers, objects_by_uid};
pub use others::{Following, Others};
pub use policy_row::{EgressPolicyRow, PolicyRow, PolicySource};
pub use table::{ABSENCE_GRACE, Key, OfNetwork, Refused, Table, Written};
pub use tables::{AttachmentRow, NodeRow, Tables};
