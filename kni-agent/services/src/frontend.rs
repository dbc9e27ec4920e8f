//! Describes a service port at one address, with its backends.

use std::net::IpAddr;

use kni_model::{
    NetworkName,
    service::{ServicePort, ServiceRef},
};

use super::choose::Choice;

/// A service port at one address.
#[derive(Debug)]
pub(super) struct Frontend {
    pub(super) service: ServiceRef,
    pub(super) port: ServicePort,
    pub(super) network: NetworkName,
    pub(super) address: IpAddr,
    /// Whether the address is one outside of the cluster. It has no row of `ADDRESSES`: its other ports are left alone.
    pub(super) external: bool,
    pub(super) affinity_seconds: Option<u32>,
    pub(super) choice: Choice,
}
