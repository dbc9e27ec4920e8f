//! Drives the uplink: its programs, and the rows of masquerading, host ports and denied sources.

mod masquerade;
mod node_sockets;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
};

use ipnet::{IpNet, Ipv6Net};
use kni_common::{
    Verdict,
    address::from_ip,
    uplink::{HostPortKey, HostPortValue, Masquerade, NodePeerKey, NodePeerValue, SourceData, SourceKey, SourceValue},
};
use kni_model::{EndpointId, view::ProgramView};

use super::{
    Dataplane, DataplaneError, EndpointConfig, Hook, XdpChoice, XdpMode,
    bpf::link,
    flows::Taken,
    hook::{self, AttachPoint, Target},
    lock, membarrier,
    pin::Pins,
    table::{Row, Table},
    xdp,
};
pub use masquerade::{EgressRow, EgressSource};
use masquerade::{MasqueradeStep, masquerade_steps};

/// Target of a port of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPort {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Port of the pod.
    pub port: u16,
}

/// The tables of the uplink, under their own lock.
pub(super) struct UplinkMaps {
    masquerade: Table<u32, Masquerade>,
    shared: Table<u32, u32>,
    host_ports: PortRows,
    node_ports: PortRows,
    node_peers: Table<NodePeerKey, NodePeerValue>,
    /// Host ports that are new, past which flows may lead; at the start all, as an earlier agent may have been
    /// interrupted.
    bypassed: BTreeSet<HostPortKey>,
    sources: Table<SourceKey, SourceValue>,
}

/// A table of ports of the node.
struct PortRows {
    table: Table<HostPortKey, HostPortValue>,
    /// Copy of the table, so that a detach does not wait for a walk.
    mapped: BTreeMap<HostPortKey, HostPortValue>,
}

impl PortRows {
    fn open(pins: &Pins, name: &'static str) -> Result<Self, DataplaneError> {
        let table: Table<HostPortKey, HostPortValue> = Table::open(name, &pins.map(name))?;
        let mapped = table.rows()?.into_iter().collect();
        Ok(Self { table, mapped })
    }

    fn remove(&mut self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        let ports = self.mapped.iter().filter(|(_, value)| value.endpoint == endpoint.0);
        let ports: Vec<HostPortKey> = ports.map(|(key, _)| *key).collect();
        if ports.is_empty() {
            return Ok(());
        }
        self.table.remove_all(&ports)?;
        self.mapped.retain(|_, value| value.endpoint != endpoint.0);
        Ok(())
    }

    fn set(&mut self, rows: BTreeMap<HostPortKey, HostPortValue>) -> Result<(), DataplaneError> {
        // After a failure both old and new rows may exist.
        self.mapped.extend(rows.iter().map(|(key, value)| (*key, *value)));
        replace(&self.table, &rows)?;
        self.mapped = rows;
        Ok(())
    }

    fn set_incarnations(&mut self, incarnations: &BTreeMap<u32, u32>) -> Result<(), DataplaneError> {
        for (key, value) in &mut self.mapped {
            if let Some(incarnation) = incarnations.get(&value.endpoint) {
                value.incarnation = *incarnation;
                self.table.put(key, value)?;
            }
        }
        Ok(())
    }
}

impl UplinkMaps {
    pub(super) fn open(pins: &Pins) -> Result<Self, DataplaneError> {
        let host_ports = PortRows::open(pins, "HOST_PORTS")?;
        Ok(Self {
            masquerade: Table::open("MASQUERADE", &pins.map("MASQUERADE"))?,
            shared: Table::open("SHARED_EGRESS", &pins.map("SHARED_EGRESS"))?,
            bypassed: host_ports.mapped.keys().copied().collect(),
            host_ports,
            node_ports: PortRows::open(pins, "NODE_PORTS")?,
            node_peers: Table::open("NODE_PEERS", &pins.map("NODE_PEERS"))?,
            sources: Table::open("SOURCES", &pins.map("SOURCES"))?,
        })
    }

    /// Removes an endpoint's rows, which its next owner must not find.
    pub(super) fn remove(&mut self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        let _changed = self.set_masquerade(endpoint, Masquerade::default())?;
        self.set_shared(endpoint, 0)?;
        self.host_ports.remove(endpoint)?;
        self.node_ports.remove(endpoint)
    }

    /// What endpoints leave the node with.
    pub(super) fn egress(&self) -> Result<Vec<(u32, Masquerade)>, DataplaneError> {
        self.masquerade.rows()
    }

    /// Writes other incarnations of endpoints into their rows.
    pub(super) fn set_incarnations(&mut self, incarnations: &BTreeMap<u32, u32>) -> Result<(), DataplaneError> {
        self.host_ports.set_incarnations(incarnations)?;
        self.node_ports.set_incarnations(incarnations)
    }

    fn shared(&self, endpoint: EndpointId) -> Result<u32, DataplaneError> {
        Ok(self.shared.get(&endpoint.0)?.unwrap_or_default())
    }

    fn set_shared(&self, endpoint: EndpointId, families: u32) -> Result<(), DataplaneError> {
        if self.shared(endpoint)? == families {
            return Ok(());
        }
        self.shared.put(&endpoint.0, &families)
    }

    /// Whether the row has changed.
    fn set_masquerade(&self, endpoint: EndpointId, row: Masquerade) -> Result<bool, DataplaneError> {
        let current = self.masquerade.get(&endpoint.0)?.unwrap_or_default();
        if current == row {
            return Ok(false);
        }
        for step in masquerade_steps(current, row) {
            match step {
                MasqueradeStep::Put(row) => self.masquerade.put(&endpoint.0, &row)?,
                MasqueradeStep::Wait => membarrier::wait_for_programs(),
            }
        }
        Ok(true)
    }
}

/// Replaces a table's content: writes rows that differ, from the last key on, then removes surplus ones.
fn replace<K, V>(table: &Table<K, V>, desired: &BTreeMap<K, V>) -> Result<(), DataplaneError>
where
    K: Row + Ord,
    V: Row + PartialEq,
{
    let found: BTreeMap<K, V> = table.rows()?.into_iter().collect();
    let changed = desired.iter().rev();
    let changed = changed.filter(|(key, value)| found.get(key) != Some(value));
    table.put_all(&changed.map(|(key, value)| (*key, *value)).collect::<Vec<_>>())?;
    let gone = found.keys().filter(|key| !desired.contains_key(key));
    table.remove_all(&gone.copied().collect::<Vec<_>>())
}

/// The rows of sources. Longer prefixes have later keys: no range of IPv6 is written before the exception in it.
fn source_rows(desired: &BTreeMap<IpNet, Verdict>) -> BTreeMap<SourceKey, SourceValue> {
    /// Where the rows have IPv4. No packet has such an address.
    const IPV4_MAPPED: Ipv6Net = Ipv6Net::new_assert(Ipv4Addr::UNSPECIFIED.to_ipv6_mapped(), 96);
    let ipv4 = IpNet::V6(IPV4_MAPPED);
    let mut rows = BTreeMap::new();
    if desired.keys().any(|range| range.contains(&ipv4)) {
        // No reason to drop, where no longer prefix has one.
        rows.insert(source_key(&ipv4), SourceValue { verdict: 0 });
    }
    let desired = desired.iter().filter(|(range, _)| !ipv4.contains(*range));
    rows.extend(desired.map(|(range, verdict)| {
        let verdict = u32::from(*verdict as u16);
        (source_key(range), SourceValue { verdict })
    }));
    rows
}

fn source_key(range: &IpNet) -> SourceKey {
    let offset = if matches!(range, IpNet::V4(_)) { 96 } else { 0 };
    SourceKey {
        prefix_length: offset + u32::from(range.prefix_len()),
        data: SourceData {
            address: from_ip(range.network()),
        },
    }
}

impl Dataplane {
    /// Attaches the TC programs to the uplink. Links of an earlier agent are taken over in place; those of another
    /// interface are removed when the new ones work. Idempotent. Blocking: about 16 ms for each new link.
    pub fn attach_uplink(&self, ifname: &str, ifindex: u32) -> Result<(), DataplaneError> {
        let mut programs = lock(&self.programs);
        for point in AttachPoint::of_uplink(&self.pins, ifname) {
            let target = Target {
                program: point.direction.as_str(),
                ifname,
            };
            let here = match self.hook {
                Hook::Tcx => link::ifindex(&point.path)
                    .map_err(target.failed("reading the interface of the pinned link"))?
                    .is_some_and(|found| found == ifindex),
                Hook::Clsact => true,
            };
            if here {
                hook::adopt(&mut programs, self.hook, &point)?;
            } else {
                hook::attach(&mut programs, self.hook, &point)?;
            }
            self.hold_link(self.hook, &point);
        }
        Ok(())
    }

    /// Detaches the TC programs from the uplink. `ifname` is the interface that has them, if it is known; it may be
    /// gone.
    pub fn detach_uplink(&self, ifname: Option<&str>) -> Result<(), DataplaneError> {
        for point in AttachPoint::of_uplink(&self.pins, ifname.unwrap_or_default()) {
            self.held.release(&point.path);
            link::detach(&point.path);
            Pins::remove_link(&point.path)?;
        }
        if let Some(ifname) = ifname {
            hook::remove_filters(ifname);
        }
        Ok(())
    }

    /// Attaches the XDP program to the uplink in the selected mode, or detaches it. Idempotent. Blocking.
    pub fn set_uplink_xdp(&self, ifname: &str, ifindex: u32, choice: XdpChoice) -> Result<(), DataplaneError> {
        xdp::set(&mut lock(&self.programs), &self.pins, ifname, ifindex, choice)
    }

    /// The programs at the uplink, the mode of XDP there, and problems of the TC programs.
    pub fn uplink_programs(&self, ifname: &str, ifindex: u32) -> (Vec<ProgramView>, Option<XdpMode>, Vec<String>) {
        let points = AttachPoint::of_uplink(&self.pins, ifname);
        let (mut views, problems) = hook::inspect(&self.program_ids, self.hook, &points);
        let xdp = xdp::inspect(&self.program_ids, &self.pins, ifindex);
        let mode = xdp.as_ref().map(|(_, mode)| *mode);
        views.extend(xdp.map(|(view, _)| view));
        (views, mode, problems)
    }

    /// Sets the egress of an endpoint. When it returns, no packet leaves with an address that the endpoint had before:
    /// a flow that began with another address is dropped.
    pub fn set_masquerade(&self, endpoint: EndpointId, egress: &EgressRow) -> Result<(), DataplaneError> {
        let tables = lock(&self.uplink);
        let (before, shared) = (tables.shared(endpoint)?, egress.shared());
        // Until no flow has the former address, it leaves by the node that answers for it, or not at all.
        tables.set_shared(endpoint, before | shared)?;
        if tables.set_masquerade(endpoint, egress.row())? || before != shared {
            // After the row, so that a flow that is evaluated again finds it.
            lock(&self.endpoints).renew_generation(endpoint)?;
        }
        if before & !shared != 0 {
            membarrier::wait_for_programs();
        }
        tables.set_shared(endpoint, shared)
    }

    /// Replaces the host ports of all pods. Those of unpublished endpoints are omitted. UDP flows of pods that reached
    /// the node's stack at a new one are removed, so that the next packet reaches the pod.
    pub fn set_host_ports(&self, desired: &BTreeMap<HostPortKey, HostPort>) -> Result<(), DataplaneError> {
        let mut tables = lock(&self.uplink);
        let rows = self.port_rows(desired, |_any| true)?;
        let new = rows.keys().filter(|key| !tables.host_ports.mapped.contains_key(*key));
        let new: Vec<HostPortKey> = new.copied().collect();
        tables.bypassed.extend(new);
        tables.host_ports.set(rows)?;
        let bypassed = tables.bypassed.clone();
        // A detach waits for no walk.
        drop(tables);
        let mut taken = Taken::default();
        taken.add_ports(&bypassed);
        self.flows.remove_bypasses(&taken)?;
        lock(&self.uplink).bypassed.retain(|key| !bypassed.contains(key));
        Ok(())
    }

    /// Replaces the host ports that the node's own sockets reach, and attaches their programs while there are any.
    /// Those of endpoints without host access are omitted: the node does not reach them. The rows are replaced even if
    /// no program can be attached.
    pub fn set_node_ports(&self, desired: &BTreeMap<HostPortKey, HostPort>) -> Result<(), DataplaneError> {
        let mut tables = lock(&self.uplink);
        let rows = self.port_rows(desired, |config| config.host_access)?;
        let is_used = !rows.is_empty();
        tables.node_ports.set(rows)?;
        drop(tables);
        if is_used {
            self.attach_sockets()
        } else {
            self.detach_sockets()
        }
    }

    /// The rows of ports of published endpoints.
    fn port_rows(
        &self,
        desired: &BTreeMap<HostPortKey, HostPort>,
        is_wanted: impl Fn(&EndpointConfig) -> bool,
    ) -> Result<BTreeMap<HostPortKey, HostPortValue>, DataplaneError> {
        let endpoints = lock(&self.endpoints);
        let mut rows = BTreeMap::new();
        for (key, target) in desired {
            let Some(incarnation) = endpoints.incarnation(target.endpoint)? else {
                continue;
            };
            if !endpoints
                .config_of(target.endpoint)?
                .is_some_and(|config| is_wanted(&config))
            {
                continue;
            }
            let value = HostPortValue {
                endpoint: target.endpoint.0,
                incarnation,
                port: target.port.to_be_bytes(),
                zero: 0,
            };
            rows.insert(*key, value);
        }
        Ok(rows)
    }

    /// Replaces the sources whose packets are dropped at the uplink, with the reason. A range of IPv6 matches no IPv4
    /// address.
    pub fn set_sources(&self, desired: &BTreeMap<IpNet, Verdict>) -> Result<(), DataplaneError> {
        replace(&lock(&self.uplink).sources, &source_rows(desired))
    }

    /// Index of the interface through which masqueraded packets leave, from the programs' configuration.
    pub fn uplink(&self) -> Result<Option<u32>, DataplaneError> {
        let row = lock(&self.endpoints).config.get(&0)?.unwrap_or_default();
        Ok(Some(row.uplink).filter(|index| *index != 0))
    }

    /// Sets the interface through which masqueraded packets leave.
    pub fn set_uplink(&self, ifindex: Option<u32>) -> Result<(), DataplaneError> {
        let endpoints = lock(&self.endpoints);
        let mut row = endpoints.config.get(&0)?.unwrap_or_default();
        let uplink = ifindex.unwrap_or(0);
        if row.uplink == uplink {
            return Ok(());
        }
        row.uplink = uplink;
        endpoints.config.put(&0, &row)
    }
}

/// Removes KNI's clsact filters from an interface while the agent is stopped. Links are removed with their pins.
pub fn remove_uplink_filters(ifname: &str) {
    hook::remove_filters(ifname);
}

/// Key of a port of the node.
pub fn host_port_key(address: IpAddr, protocol: u8, port: u16) -> HostPortKey {
    HostPortKey {
        address: from_ip(address),
        port: port.to_be_bytes(),
        protocol: protocol.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_layout_that_the_programs_read() {
        let key = host_port_key("192.0.2.1".parse().unwrap(), 6, 8080);
        assert_eq!(key.address[10..], [0xff, 0xff, 192, 0, 2, 1]);
        assert_eq!((key.port, key.protocol), ([0x1f, 0x90], 6));
        let key = |range: &str| source_key(&range.parse().unwrap());
        assert_eq!(key("10.0.0.0/8").prefix_length, 104);
        assert_eq!(key("0.0.0.0/0").prefix_length, 96, "not every IPv6 address");
        assert_eq!(key("fd00::/8").prefix_length, 8);
    }

    #[test]
    fn a_range_of_ipv6_denies_no_ipv4_source() {
        let denied = |ranges: &[&str]| -> Vec<(u32, u32)> {
            let ranges = ranges.iter().map(|range| (range.parse().unwrap(), Verdict::DenyListed));
            let rows = source_rows(&ranges.collect()).into_iter();
            rows.map(|(key, value)| (key.prefix_length, value.verdict)).collect()
        };
        let listed = Verdict::DenyListed as u32;
        assert_eq!(denied(&["::/8"]), [(8, listed), (96, 0)]);
        assert_eq!(denied(&["::/0", "::ffff:0:0/95"]), [(0, listed), (95, listed), (96, 0)]);
        assert_eq!(denied(&["::/8", "0.0.0.0/0"]), [(8, listed), (96, listed)]);
        assert_eq!(denied(&["::/8", "10.0.0.0/8"]), [(8, listed), (96, 0), (104, listed)]);
        assert_eq!(denied(&["::ffff:0:0/96", "::ffff:10.0.0.0/104"]), [(96, 0)]);
        assert_eq!(denied(&["fd00::/8", "::1/128"]), [(8, listed), (128, listed)]);
    }
}
