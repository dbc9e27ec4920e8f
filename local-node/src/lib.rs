//! A Kubernetes node in namespaces of its own: what it is made of, how it is started and how it goes.
//!
//! [`Node`] is a network and a mount namespace with an uplink to a fabric namespace. [`LocalNode`] runs containerd, and
//! on demand a whole cluster of one node, inside such a pair. The programs come from [`Programs`], which builds them
//! once; the images are made by [`image`] from the static programs of crate `kni-probe`. [`cri`] speaks to containerd
//! as the kubelet does.
//!
//! The machine is not touched, except for control groups named `kni-node-...`. Those, and every process of the node, go
//! with the [`LocalNode`] or, should its owner be killed, by a janitor process that notices.

pub mod cgroup;
mod config;
mod control_plane;
pub mod cri;
mod daemon;
pub mod fabric;
pub mod image;
mod kubernetes;
mod local;
pub mod namespaces;
pub mod node;
pub mod oci;
mod pki;
pub mod programs;
pub mod spawn;
pub mod static_programs;

pub use control_plane::ControlPlane;
pub use fabric::Fabric;
pub use local::{LocalNode, Part};
pub use namespaces::Namespaces;
pub use node::Node;
pub use programs::Programs;
pub use static_programs::StaticPrograms;
