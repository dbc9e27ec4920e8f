//! A path between two namespaces, over which workloads run.

use std::{any::Any, net::IpAddr, ops::Range};

use kni_integration::Namespaces;

/// What packets take from one namespace to another.
pub(crate) struct Path {
    /// Its name in the JSON.
    pub(crate) key: &'static str,
    /// Its name in the table.
    pub(crate) title: &'static str,
    /// Where the client runs.
    pub(crate) client: Namespaces,
    /// Where the server runs.
    pub(crate) server: Namespaces,
    /// The server's address.
    pub(crate) address: IpAddr,
    /// Where the client finds the server, if not at its own address.
    pub(crate) services: Option<Services>,
    /// What has to live as long.
    pub(crate) keep: Vec<Box<dyn Any + Send + Sync>>,
}

/// Services in front of the server.
pub(crate) struct Services {
    /// Their virtual addresses; connections go to each in turn.
    pub(crate) addresses: Vec<IpAddr>,
    /// The server's ports behind each of them.
    pub(crate) endpoints: Range<u16>,
}

/// The port of services, and the server's first port behind it.
pub(crate) const SERVICE_PORT: u16 = 8080;
