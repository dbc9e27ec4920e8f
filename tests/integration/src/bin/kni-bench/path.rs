//! Describes a path between two namespaces for workloads.

use std::{any::Any, net::IpAddr, ops::Range};

use kni_integration::Namespaces;

/// A path of packets from one namespace to another.
pub(crate) struct Path {
    /// Its name in the JSON.
    pub(crate) key: &'static str,
    /// Its name in the table.
    pub(crate) title: &'static str,
    /// The namespaces of the client.
    pub(crate) client: Namespaces,
    /// The namespaces of the server.
    pub(crate) server: Namespaces,
    /// The server's address.
    pub(crate) address: IpAddr,
    /// The services through which the client reaches the server, if it does not use the server's own address.
    pub(crate) services: Option<Services>,
    /// Resources that must outlive the measurement.
    pub(crate) keep: Vec<Box<dyn Any + Send + Sync>>,
}

/// Services in front of the server.
pub(crate) struct Services {
    /// Their virtual addresses; connections use them in turn.
    pub(crate) addresses: Vec<IpAddr>,
    /// The server's ports behind each of them.
    pub(crate) endpoints: Range<u16>,
}

/// The port of services, and the server's first port behind it.
pub(crate) const SERVICE_PORT: u16 = 8080;
