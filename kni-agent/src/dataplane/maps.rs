//! Typed handles of the maps and the order in which rows are written.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use aya::{
    Ebpf,
    maps::{Array, HashMap, LpmTrie, MapData, MapError, PerCpuArray, PerCpuHashMap, RingBuf, lpm_trie::Key},
};
use ipnet::IpNet;
use kni_common::{
    IFINDEX_BASE,
    address::{AddressKey, AddressValue, from_ip},
    counter::{COUNTERS_PER_ENDPOINT, Counter, DropKey},
    endpoint::{EndpointRow, FLAG_HOST_ACCESS, FLAG_READY},
    flow::{FlowKey4, FlowKey6, FlowValue, FragmentKey, FragmentValue},
    layout::{ALL_MAPS, MapSpec},
    route::{ACTION_STACK, ACTION_UNREACHABLE, RouteData, RouteValue},
};

use super::DataplaneError;
use crate::model::{Attachment, EndpointId, MacAddr, NetworkId};

/// All that the programs need to know of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointConfig {
    /// Its number.
    pub endpoint: EndpointId,
    /// Its network.
    pub network: NetworkId,
    /// Its IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// Its IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
    /// MAC of the pod end.
    pub mac: MacAddr,
    /// MAC of the host end.
    pub host_mac: MacAddr,
    /// Whether the node's stack may exchange packets with it.
    pub host_access: bool,
}

impl From<&Attachment> for EndpointConfig {
    fn from(attachment: &Attachment) -> Self {
        Self {
            endpoint: attachment.endpoint,
            network: attachment.network_id,
            ipv4: attachment.ipv4,
            ipv6: attachment.ipv6,
            mac: attachment.mac,
            host_mac: attachment.host_mac,
            host_access: attachment.host_access,
        }
    }
}

impl EndpointConfig {
    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.ipv4.map(IpAddr::V4).into_iter().chain(self.ipv6.map(IpAddr::V6))
    }

    fn row(&self, generation: u32, ready: bool) -> EndpointRow {
        let ready = if ready { FLAG_READY } else { 0 };
        let host = if self.host_access { FLAG_HOST_ACCESS } else { 0 };
        EndpointRow {
            network: self.network.get(),
            generation,
            flags: ready | host,
            ipv4: self.ipv4.map_or([0; 4], |ip| ip.octets()),
            ipv6: self.ipv6.map_or([0; 16], |ip| ip.octets()),
            mac: self.mac.0,
            host_mac: self.host_mac.0,
            ifindex: IFINDEX_BASE + self.endpoint.0,
        }
    }
}

/// The expected maps for the configured sizes.
pub(super) fn specs(max_endpoints: u32, max_flows: u32) -> Vec<MapSpec> {
    ALL_MAPS
        .iter()
        .map(|spec| {
            let max_entries = match spec.name {
                "ENDPOINTS" | "EVENT_GATES" => max_endpoints,
                "ADDRESSES" => 2 * max_endpoints,
                "COUNTERS" => max_endpoints * COUNTERS_PER_ENDPOINT,
                "DROPS" => 16 * max_endpoints,
                "FLOWS4" | "FLOWS6" => max_flows,
                _ => spec.max_entries,
            };
            MapSpec { max_entries, ..*spec }
        })
        .collect()
}

/// Handles of all maps but the ring buffer.
pub(super) struct Maps {
    pub(super) endpoints: Array<MapData, EndpointRow>,
    pub(super) addresses: HashMap<MapData, AddressKey, AddressValue>,
    pub(super) routes: LpmTrie<MapData, RouteData, RouteValue>,
    pub(super) flows4: HashMap<MapData, FlowKey4, FlowValue>,
    pub(super) flows6: HashMap<MapData, FlowKey6, FlowValue>,
    pub(super) fragments: HashMap<MapData, FragmentKey, FragmentValue>,
    pub(super) counters: PerCpuArray<MapData, Counter>,
    pub(super) drops: PerCpuHashMap<MapData, DropKey, Counter>,
    /// The last generation that any row got; see [`Self::next_generation`].
    generation: u32,
}

fn take<T>(ebpf: &mut Ebpf, name: &'static str) -> Result<T, DataplaneError>
where
    T: TryFrom<aya::maps::Map, Error = MapError>,
{
    let map = ebpf
        .take_map(name)
        .ok_or(DataplaneError::Missing { what: "map", name })?;
    T::try_from(map).map_err(DataplaneError::map(name, "opening"))
}

impl Maps {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<(Self, RingBuf<MapData>), DataplaneError> {
        let mut maps = Self {
            endpoints: take(ebpf, "ENDPOINTS")?,
            addresses: take(ebpf, "ADDRESSES")?,
            routes: take(ebpf, "ROUTES")?,
            flows4: take(ebpf, "FLOWS4")?,
            flows6: take(ebpf, "FLOWS6")?,
            fragments: take(ebpf, "FRAGMENTS")?,
            counters: take(ebpf, "COUNTERS")?,
            drops: take(ebpf, "DROPS")?,
            generation: 0,
        };
        for id in 0..maps.endpoints.len() {
            maps.generation = maps.generation.max(maps.row(EndpointId(id))?.generation);
        }
        Ok((maps, take(ebpf, "EVENTS")?))
    }

    fn row(&self, endpoint: EndpointId) -> Result<EndpointRow, DataplaneError> {
        self.endpoints
            .get(&endpoint.0, 0)
            .map_err(DataplaneError::map("ENDPOINTS", "reading a row"))
    }

    fn write_row(&mut self, endpoint: EndpointId, row: EndpointRow) -> Result<(), DataplaneError> {
        self.endpoints
            .set(endpoint.0, row, 0)
            .map_err(DataplaneError::map("ENDPOINTS", "writing a row"))
    }

    /// A generation that no row has or had. Rows do not count for themselves: a flow names its sender by address and
    /// generation alone, and an address may come back in another row.
    fn next_generation(&mut self) -> u32 {
        self.generation = self.generation.wrapping_add(1).max(1);
        self.generation
    }

    /// New generation, not ready; then the addresses; then ready (I1, I2).
    pub(super) fn publish(&mut self, config: &EndpointConfig) -> Result<(), DataplaneError> {
        let generation = self.next_generation();
        self.write_row(config.endpoint, config.row(generation, false))?;
        self.write_addresses(config, generation)?;
        self.forget_early_drops(config.endpoint)?;
        self.write_row(config.endpoint, config.row(generation, true))
    }

    /// Same generation where the row is already right, so that flows and traffic go on.
    pub(super) fn republish(&mut self, config: &EndpointConfig) -> Result<(), DataplaneError> {
        let found = self.row(config.endpoint)?;
        if found != config.row(found.generation, true) {
            self.forget_addresses(config.endpoint)?;
            return self.publish(config);
        }
        self.write_addresses(config, found.generation)
    }

    fn write_addresses(&mut self, config: &EndpointConfig, generation: u32) -> Result<(), DataplaneError> {
        for address in config.addresses() {
            let key = AddressKey {
                network: config.network.get(),
                address: from_ip(address),
            };
            let value = AddressValue {
                endpoint: config.endpoint.0,
                generation,
            };
            self.addresses
                .insert(key, value, 0)
                .map_err(DataplaneError::map("ADDRESSES", "writing a row"))?;
        }
        Ok(())
    }

    /// Not ready first; what is left of the row is its generation, a new one, so that the highest is never forgotten.
    pub(super) fn withdraw(&mut self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        let row = self.row(endpoint)?;
        if row.network != 0 {
            let generation = self.next_generation();
            self.write_row(
                endpoint,
                EndpointRow {
                    generation,
                    ..EndpointRow::default()
                },
            )?;
        }
        self.forget_addresses_of(endpoint, &row)?;
        self.forget_counts(endpoint)
    }

    fn forget_addresses_of(&mut self, endpoint: EndpointId, row: &EndpointRow) -> Result<(), DataplaneError> {
        let v4 = IpAddr::V4(Ipv4Addr::from(row.ipv4));
        for address in [from_ip(v4), row.ipv6] {
            let key = AddressKey {
                network: row.network,
                address,
            };
            // Only rows that are this endpoint's: the address may have a new owner already.
            if self
                .addresses
                .get(&key, 0)
                .is_ok_and(|value| value.endpoint == endpoint.0)
            {
                ignore_absent(self.addresses.remove(&key))
                    .map_err(DataplaneError::map("ADDRESSES", "removing a row"))?;
            }
        }
        Ok(())
    }

    /// By a walk over all rows: for rows whose owner is not known.
    fn forget_addresses(&mut self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        let stale: Vec<AddressKey> = self
            .addresses
            .iter()
            .filter_map(Result::ok)
            .filter(|(_, value)| value.endpoint == endpoint.0)
            .map(|(key, _)| key)
            .collect();
        for key in stale {
            ignore_absent(self.addresses.remove(&key)).map_err(DataplaneError::map("ADDRESSES", "removing a row"))?;
        }
        Ok(())
    }

    /// By a walk: rows that no endpoint's row, network and generation stand behind.
    pub(super) fn forget_stale_addresses(&mut self) -> Result<(), DataplaneError> {
        let mut stale = Vec::new();
        for (key, value) in self.addresses.iter().filter_map(Result::ok) {
            let row = self.row(EndpointId(value.endpoint))?;
            if row.network != key.network || row.generation != value.generation {
                stale.push(key);
            }
        }
        for key in stale {
            ignore_absent(self.addresses.remove(&key)).map_err(DataplaneError::map("ADDRESSES", "removing a row"))?;
        }
        Ok(())
    }

    pub(super) fn published(&self, max_endpoints: u32) -> Result<Vec<EndpointId>, DataplaneError> {
        let mut found = Vec::new();
        for id in 1..max_endpoints {
            if self.row(EndpointId(id))?.network != 0 {
                found.push(EndpointId(id));
            }
        }
        found.extend(
            self.addresses
                .iter()
                .filter_map(Result::ok)
                .map(|(_, value)| EndpointId(value.endpoint)),
        );
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    pub(super) fn verify(&self, config: &EndpointConfig) -> Vec<String> {
        let mut problems = Vec::new();
        match self.row(config.endpoint) {
            Ok(row) if row == config.row(row.generation, true) => {
                for address in config.addresses() {
                    let key = AddressKey {
                        network: config.network.get(),
                        address: from_ip(address),
                    };
                    let expected = AddressValue {
                        endpoint: config.endpoint.0,
                        generation: row.generation,
                    };
                    if !self.addresses.get(&key, 0).is_ok_and(|found| found == expected) {
                        problems.push(format!("map ADDRESSES has no row for {address}"));
                    }
                }
            }
            Ok(_) => problems.push(format!(
                "map ENDPOINTS has another row for endpoint {}",
                config.endpoint
            )),
            Err(error) => problems.push(error.to_string()),
        }
        problems
    }

    pub(super) fn set_routes(
        &mut self,
        network: NetworkId,
        subnets: &[IpNet],
        host_access: bool,
    ) -> Result<(), DataplaneError> {
        let wanted = routes(network, subnets, host_access);
        for (key, value) in &wanted {
            self.routes
                .insert(key, value, 0)
                .map_err(DataplaneError::map("ROUTES", "writing a row"))?;
        }
        self.remove_routes(|data, length| {
            data.network == network.get().to_be_bytes()
                && !wanted
                    .iter()
                    .any(|(key, _)| key.data() == data && key.prefix_len() == length)
        })
    }

    pub(super) fn retain_routes(&mut self, networks: &[NetworkId]) -> Result<(), DataplaneError> {
        self.remove_routes(|data, _| !networks.iter().any(|id| id.get().to_be_bytes() == data.network))
    }

    fn remove_routes(&mut self, unwanted: impl Fn(RouteData, u32) -> bool) -> Result<(), DataplaneError> {
        let stale: Vec<Key<RouteData>> = self
            .routes
            .keys()
            .filter_map(Result::ok)
            .filter(|key| unwanted(key.data(), key.prefix_len()))
            .collect();
        for key in stale {
            ignore_absent(self.routes.remove(&key)).map_err(DataplaneError::map("ROUTES", "removing a row"))?;
        }
        Ok(())
    }
}

fn routes(network: NetworkId, subnets: &[IpNet], host_access: bool) -> Vec<(Key<RouteData>, RouteValue)> {
    let network = network.get().to_be_bytes();
    let route = |net: &IpNet, action: u32| {
        let offset = if matches!(net, IpNet::V4(_)) { 96 } else { 0 };
        let length = 32 + offset + u32::from(net.prefix_len());
        (
            Key::new(
                length,
                RouteData {
                    network,
                    address: from_ip(net.network()),
                },
            ),
            RouteValue { action },
        )
    };
    let mut rows: Vec<_> = subnets.iter().map(|net| route(net, ACTION_UNREACHABLE)).collect();
    if host_access {
        rows.push(route(&IpNet::V4(ipnet::Ipv4Net::default()), ACTION_STACK));
        rows.push(route(&IpNet::V6(ipnet::Ipv6Net::default()), ACTION_STACK));
    }
    rows
}

/// A row that is gone already is what was wanted.
pub(super) fn ignore_absent(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other,
    }
}
