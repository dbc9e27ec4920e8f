//! Drives the kernel's network configuration: namespaces, links, addresses, routes and rules. No other crate does.
//! Layer: driver.
//!
//! Uses rtnetlink, a few files below `/proc/sys/net`, packet sockets to look for other hosts with an address, raw
//! sockets to ask other nodes for echo replies, and `sock_diag` to end sockets; executes no program. A new process
//! recognises every object that this crate creates (see [`own`]). Functions are idempotent where their documentation
//! states it. Interface indexes are those of the namespace of the [`Netlink`] handle.
//!
//! Dropping a future does not cancel its request: the kernel may still perform it.

mod address;
mod connection;
mod delete;
mod device;
mod direct;
mod echo;
mod egress;
mod error;
mod filter;
mod frames;
mod host;
mod inside;
mod link;
mod local_ports;
mod macvlan;
mod message;
mod neighbours;
pub mod netns;
mod offload;
mod overlay;
pub mod own;
mod plain;
mod pod;
mod pod_state;
mod probe;
mod rule;
mod shaper;
mod sockets;
mod source_routing;
mod sysctl;
mod tap;
mod veth;
mod watch;

#[cfg(test)]
mod tests;

pub use address::LinkAddress;
pub use connection::Netlink;
pub use device::{moved_device_alias, moved_device_from_alias};
pub use direct::{DirectNetlink, Entrance};
pub use echo::{EchoAnswers, EchoPeer};
pub use egress::DefaultRoute;
pub use error::{Error, Existing, Place, Refusal};
pub use host::{HostEnd, OurRoute};
pub use inside::{InterfaceFacts, look_inside};
pub use link::{Link, LinkKey, OurLink};
pub use local_ports::LocalPorts;
pub use macvlan::MacvlanSpec;
pub use neighbours::Neighbour;
pub use netns::Netns;
pub use offload::prepare_xdp_pod_interface;
pub use overlay::RemoteRoute;
pub use plain::PlainConfig;
pub use pod::PodInterfaceConfig;
pub use pod_state::{PodInterface, PodRoute};
pub use rule::OurRule;
pub use sockets::{ConnectedSocket, end_connected};
pub use source_routing::SourceRouting;
pub use sysctl::{
    prepare_host_interface, prepare_host_interface_here, prepare_pod_interface, prepare_pod_interface_here,
};
pub use tap::create_tap;
pub use veth::{VethIndexes, VethSpec};
pub use watch::Changes;

/// Result of every operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
