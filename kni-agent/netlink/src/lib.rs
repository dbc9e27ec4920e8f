//! The only place that speaks with the kernel's network configuration: namespaces, links, addresses, routes, rules.
//! Layer: driver.
//!
//! Everything goes through rtnetlink and a few files below `/proc/sys/net`; nothing is executed. Every object that is
//! made here can be recognised by a fresh process (see [`own`]). Functions are idempotent where their documentation
//! says so. Interface indexes are those of the namespace of the [`Netlink`] handle.
//!
//! A future that is dropped early does not take its request back: the kernel may still carry it out.

mod address;
mod connection;
mod delete;
mod device;
mod error;
mod host;
mod inside;
mod link;
mod macvlan;
mod message;
pub mod netns;
mod offload;
pub mod own;
mod plain;
mod pod;
mod pod_state;
mod rule;
mod shaper;
mod sysctl;
mod tap;
mod veth;
mod watch;
mod way_out;

#[cfg(test)]
mod tests;

pub use address::LinkAddress;
pub use connection::Netlink;
pub use device::{alias_of_lent, lent_by_alias};
pub use error::{Error, Existing, Place, Refusal};
pub use host::OurRoute;
pub use inside::{InterfaceFacts, look_inside};
pub use link::{Link, LinkKey, OurLink};
pub use macvlan::MacvlanSpec;
pub use netns::Netns;
pub use offload::prepare_xdp_pod_interface;
pub use plain::PlainConfig;
pub use pod::PodInterfaceConfig;
pub use pod_state::{PodInterface, PodRoute};
pub use rule::OurRule;
pub use sysctl::{prepare_host_interface, prepare_pod_interface};
pub use tap::create_tap;
pub use veth::{VethIndexes, VethSpec};
pub use watch::Changes;
pub use way_out::DefaultRoute;

/// Result of everything in this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;
