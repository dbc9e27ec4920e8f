//! Builds, starts and removes Kubernetes nodes in their own namespaces.
//!
//! [`Node`] is a network and a mount namespace with an uplink to a fabric namespace. [`LocalNode`] runs containerd, and
//! on demand a cluster of one node with an API server that pods reach and a DNS, inside such a pair. [`LocalCluster`]
//! is a [`ControlPlane`] and several nodes on a [`Fabric`]. The programs come from [`Programs`], which builds them
//! once; [`image`] wraps static programs into images. [`cri`] calls containerd as the kubelet does.
//!
//! Outside its namespaces a node has only control groups named `kni-node-...`. Dropping the [`LocalNode`] removes them
//! and every process of the node; if its owner is killed, a janitor process does.

mod cache;
pub mod cgroup;
mod cluster;
mod config;
mod control_plane;
pub mod cri;
mod daemon;
mod deployment;
mod dns;
pub mod fabric;
mod hidden;
pub mod image;
mod kni;
mod kubernetes;
pub mod kustomize;
mod local;
pub mod namespaces;
pub mod node;
pub mod oci;
mod pki;
pub mod programs;
mod saved;
pub mod spawn;
pub mod static_programs;

pub use cluster::LocalCluster;
pub use config::COLLECTION;
pub use control_plane::{ControlPlane, Nodes};
pub use fabric::Fabric;
pub use kni::Kni;
pub use local::{LocalNode, Part};
pub use namespaces::Namespaces;
pub use node::Node;
pub use programs::Programs;
pub use static_programs::StaticPrograms;
