//! Defines the rows and steps that engines pass to the dataplane driver for policies and services.
//!
//! Keys and values are those of `kni_common`, so that a test can compare the result of an engine with a dump of the
//! maps.

use std::collections::BTreeMap;

use kni_common::{
    address::AddressKey,
    policy::{IdentityKey, PolicyKey, PolicyValue, PortKey, PortValue},
    service::{BackendKey, BackendValue, ServiceKey, ServiceValue},
};

use super::EndpointId;

/// The policy enforced at an endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Enforcement {
    /// Policy set, 0 when no policy selects the endpoint.
    pub policy: u32,
    /// Identity of its IPv4 address, for the policies of other endpoints.
    pub identity4: u32,
    /// Identity of its IPv6 address.
    pub identity6: u32,
}

/// All rows of policies in the dataplane's maps: the desired ones of an engine, or those found there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicyTables {
    /// Rows of `POLICY`.
    pub policy: BTreeMap<PolicyKey, PolicyValue>,
    /// Rows of `PORTS`.
    pub ports: BTreeMap<PortKey, PortValue>,
    /// Rows of `IDENTITIES`: identity by prefix.
    pub identities: BTreeMap<IdentityKey, u32>,
    /// The policy enforced at each endpoint.
    pub endpoints: BTreeMap<EndpointId, Enforcement>,
}

/// One step from one state of the policy tables to another. Steps are carried out in order; after each one every packet
/// is evaluated by the old state or by the new one, never by a mixture that denies what both allow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyStep {
    /// Writes rows of `PORTS`.
    PutPorts(Vec<(PortKey, PortValue)>),
    /// Writes rows of `POLICY`.
    PutPolicy(Vec<(PolicyKey, PolicyValue)>),
    /// Writes rows of `IDENTITIES`.
    PutIdentities(Vec<(IdentityKey, u32)>),
    /// Changes the policy of endpoints: for each the new values first, then a new generation.
    Enforce(Vec<(EndpointId, Enforcement)>),
    /// Removes rows of `IDENTITIES`.
    RemoveIdentities(Vec<IdentityKey>),
    /// Removes rows of `POLICY`.
    RemovePolicy(Vec<PolicyKey>),
    /// Removes rows of `PORTS`.
    RemovePorts(Vec<PortKey>),
}

/// All rows of services in the dataplane's maps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServiceTables {
    /// Rows of `SERVICES`.
    pub services: BTreeMap<ServiceKey, ServiceValue>,
    /// Rows of `BACKENDS`.
    pub backends: BTreeMap<BackendKey, BackendValue>,
    /// Rows of `ADDRESSES` that belong to services.
    pub addresses: Vec<AddressKey>,
}

/// A backend that stopped serving a service port: UDP flows to it must move, and clients with affinity to it must
/// choose again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GoneBackend {
    /// The service port.
    pub service: ServiceKey,
    /// Its id.
    pub id: u32,
    /// The backend.
    pub backend: BackendValue,
}

/// One step from one state of the service tables to another, carried out in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServiceStep {
    /// Writes rows of `BACKENDS`: lists that no row names yet.
    PutBackends(Vec<(BackendKey, BackendValue)>),
    /// Writes rows of `SERVICES`.
    PutServices(Vec<(ServiceKey, ServiceValue)>),
    /// Writes rows of `ADDRESSES`.
    PutAddresses(Vec<AddressKey>),
    /// Removes rows of `ADDRESSES`.
    RemoveAddresses(Vec<AddressKey>),
    /// Removes rows of `SERVICES`.
    RemoveServices(Vec<ServiceKey>),
    /// Removes UDP flows to these backends, and affinities to them.
    RemoveFlows(Vec<GoneBackend>),
    /// Removes rows of `BACKENDS` that no row has named for at least a second.
    RemoveBackends(Vec<BackendKey>),
}
