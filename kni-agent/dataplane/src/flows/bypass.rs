//! Recognises flows that lead past a Service or a port of the node, because they began before it was there.
//!
//! A connection keeps the meaning that its destination had when it began. Other protocols have no beginning: their
//! senders use a port for as long as they run.

use std::collections::HashSet;

use kni_common::{
    address::AddressKey,
    flow::{FLOW_SERVICE, FlowValue},
    service::ServiceKey,
    uplink::HostPortKey,
};

use super::service_key;
use crate::{
    DataplaneError,
    table::{Row, Table},
    tuple::{FlowKey, Tuple, is_reply_row},
};

/// Destinations that are translated by now.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    /// Virtual addresses of Services: network and address.
    addresses: HashSet<(u32, [u8; 16])>,
    /// Ports of Services, of which some are at addresses outside.
    services: HashSet<ServiceKey>,
    /// Ports of the node: address, protocol and port.
    ports: HashSet<([u8; 16], u16, [u8; 2])>,
}

impl Taken {
    pub(crate) fn add_service_ports<'a>(&mut self, keys: impl IntoIterator<Item = &'a ServiceKey>) {
        self.services.extend(keys);
    }

    pub(crate) fn add_addresses<'a>(&mut self, keys: impl IntoIterator<Item = &'a AddressKey>) {
        let keys = keys.into_iter();
        self.addresses.extend(keys.map(|key| (key.network, key.address)));
    }

    pub(crate) fn add_ports<'a>(&mut self, keys: impl IntoIterator<Item = &'a HostPortKey>) {
        let keys = keys.into_iter();
        self.ports.extend(keys.map(|key| (key.address, key.protocol, key.port)));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.addresses.is_empty() && self.services.is_empty() && self.ports.is_empty()
    }

    /// Whether the flow goes to one of these destinations and is not translated to what is behind it.
    fn is_bypassed(&self, tuple: &Tuple, value: &FlowValue) -> bool {
        let has_connections = matches!(i32::from(tuple.protocol), libc::IPPROTO_TCP | libc::IPPROTO_SCTP);
        if has_connections || value.flags & FLOW_SERVICE != 0 || is_reply_row(value) {
            return false;
        }
        let service = service_key(tuple);
        self.addresses.contains(&(tuple.network, tuple.destination))
            || self.services.contains(&service)
            || self.ports.contains(&(service.address, service.protocol, service.port))
    }
}

pub(super) fn remove_bypasses<K: FlowKey + Row>(
    table: &Table<K, FlowValue>,
    taken: &Taken,
) -> Result<(), DataplaneError> {
    table.walk(|keys, values| {
        let rows = keys.iter().zip(values);
        let rows = rows.filter(|(key, value)| taken.is_bypassed(&key.tuple(value), value));
        table.remove_all(&rows.map(|(key, _)| *key).collect::<Vec<_>>())
    })
}
