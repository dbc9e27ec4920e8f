//! Describes a service port at one virtual address, with its backends.

use std::net::IpAddr;

use kni_model::{
    NetworkName,
    service::{ServicePort, ServiceRef},
};

use super::choose::Choice;

/// A service port at one virtual address.
#[derive(Debug)]
pub(super) struct Frontend {
    pub(super) service: ServiceRef,
    pub(super) port: ServicePort,
    pub(super) network: NetworkName,
    pub(super) address: IpAddr,
    pub(super) affinity_seconds: Option<u32>,
    pub(super) choice: Choice,
}
