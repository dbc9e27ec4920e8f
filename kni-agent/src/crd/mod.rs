//! The Kubernetes objects of group kni.dev, and what makes one of them valid.
//! Layer: model.

pub mod pod_network;
mod validate;

pub use pod_network::{PodNetwork, PodNetworkSpec, Topology};
pub use validate::InvalidNetwork;
