//! The only place that speaks with the kernel's network configuration: namespaces, links, addresses, routes, rules.
//! Layer: driver.
//!
//! Everything goes through rtnetlink and a few files below `/proc/sys/net`; nothing is executed. Every object that is
//! made here can be recognised by a fresh process (see [`own`]). Functions are idempotent where their documentation
//! says so. Interface indexes are those of the namespace of the [`Netlink`] handle.
//!
//! A future that is dropped early does not take its request back: the kernel may still carry it out.

mod connection;
mod delete;
mod error;
mod host;
mod link;
mod message;
pub mod netns;
pub mod own;
mod pod;
mod pod_state;
mod rule;
mod sysctl;
mod veth;

#[cfg(test)]
mod tests;

pub use connection::Netlink;
pub use error::{Error, Existing, Place, Refusal};
pub use host::OurRoute;
pub use link::{Link, LinkKey, OurLink};
pub use netns::Netns;
pub use pod::PodInterfaceConfig;
pub use pod_state::{PodInterface, PodRoute};
pub use rule::OurRule;
pub use sysctl::{prepare_host_interface, prepare_pod_interface};
pub use veth::{VethIndexes, VethSpec};

/// Result of everything in this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;
