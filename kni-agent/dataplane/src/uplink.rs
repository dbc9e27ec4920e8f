//! The way out of the node: the programs of the uplink, and the rows that say with which address pods leave, which node
//! ports are theirs, and who stays outside.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use kni_common::{
    Verdict,
    address::from_ip,
    uplink::{HostPortKey, HostPortValue, Masquerade, SourceData, SourceKey, SourceValue},
};
use kni_model::{EndpointId, view::ProgramView};

use super::{
    Dataplane, DataplaneError, Hook, XdpChoice, XdpMode,
    batch::Table,
    hook::{self, Seat, Target},
    link_info, lock,
    pin::Pins,
    xdp,
};

/// With which address and ports an endpoint's packets leave the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressSource {
    /// IPv4 address; without one no IPv4 packet leaves.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address, likewise.
    pub ipv6: Option<Ipv6Addr>,
    /// First port.
    pub first: u16,
    /// Last port, not smaller, not 0.
    pub last: u16,
}

impl EgressSource {
    fn row(&self) -> Masquerade {
        Masquerade {
            ipv4: self.ipv4.map_or([0; 4], |ip| ip.octets()),
            first: self.first,
            last: self.last,
            ipv6: self.ipv6.map_or([0; 16], |ip| ip.octets()),
        }
    }
}

/// Where a port of the node leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPort {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Port of the pod.
    pub port: u16,
}

/// The tables of the uplink, under a lock of their own.
pub(super) struct UplinkMaps {
    masquerade: Table<u32, Masquerade>,
    host_ports: Table<HostPortKey, HostPortValue>,
    /// What `host_ports` holds, so that nobody who goes waits for a walk.
    mapped: BTreeMap<HostPortKey, HostPortValue>,
    sources: Table<SourceKey, SourceValue>,
}

impl UplinkMaps {
    pub(super) fn open(pins: &Pins) -> Result<Self, DataplaneError> {
        let host_ports: Table<HostPortKey, HostPortValue> = Table::open("HOST_PORTS", &pins.map("HOST_PORTS"))?;
        let mapped = host_ports.rows()?.into_iter().collect();
        Ok(Self {
            masquerade: Table::open("MASQUERADE", &pins.map("MASQUERADE"))?,
            host_ports,
            mapped,
            sources: Table::open("SOURCES", &pins.map("SOURCES"))?,
        })
    }

    /// What an endpoint's next owner must not find.
    pub(super) fn forget(&mut self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        self.set_masquerade(endpoint, Masquerade::default())?;
        let its = self.mapped.iter().filter(|(_, value)| value.endpoint == endpoint.0);
        let its: Vec<HostPortKey> = its.map(|(key, _)| *key).collect();
        if its.is_empty() {
            return Ok(());
        }
        self.host_ports.remove(&its)?;
        self.mapped.retain(|_, value| value.endpoint != endpoint.0);
        Ok(())
    }

    fn set_host_ports(&mut self, rows: BTreeMap<HostPortKey, HostPortValue>) -> Result<(), DataplaneError> {
        // Of what fails half way both the old and the new may be there.
        self.mapped.extend(rows.iter().map(|(key, value)| (*key, *value)));
        replace(&self.host_ports, &rows)?;
        self.mapped = rows;
        Ok(())
    }

    fn set_masquerade(&self, endpoint: EndpointId, row: Masquerade) -> Result<(), DataplaneError> {
        if self.masquerade.get(&endpoint.0)? == Some(row) {
            return Ok(());
        }
        self.masquerade.put(&endpoint.0, &row)
    }
}

/// Makes a table what is wanted: writes what differs, then removes what is too much.
fn replace<K, V>(table: &Table<K, V>, wanted: &BTreeMap<K, V>) -> Result<(), DataplaneError>
where
    K: super::batch::Row + Ord,
    V: super::batch::Row + PartialEq,
{
    let found: BTreeMap<K, V> = table.rows()?.into_iter().collect();
    let changed = wanted.iter().filter(|(key, value)| found.get(key) != Some(value));
    table.write(&changed.map(|(key, value)| (*key, *value)).collect::<Vec<_>>())?;
    let gone = found.keys().filter(|key| !wanted.contains_key(key));
    table.remove(&gone.copied().collect::<Vec<_>>())
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
    /// Brings the TC programs to the uplink, and the XDP program as asked. Links of an earlier agent are taken over in
    /// place; those of another interface go when the new ones work. Idempotent. Blocking: about 16 ms for each new link.
    pub fn attach_uplink(&self, ifname: &str, ifindex: u32) -> Result<(), DataplaneError> {
        let mut programs = lock(&self.programs);
        for seat in Seat::of_uplink(&self.pins, ifname) {
            let target = Target {
                program: seat.direction.as_str(),
                ifname,
            };
            let here = match self.hook {
                Hook::Tcx => link_info::ifindex(&seat.path)
                    .map_err(target.failed("asking for the pinned link's interface"))?
                    .is_some_and(|found| found == ifindex),
                Hook::Clsact => true,
            };
            if here {
                hook::adopt(&mut programs, self.hook, &seat)?;
            } else {
                hook::attach(&mut programs, self.hook, &seat)?;
            }
        }
        Ok(())
    }

    /// Takes the TC programs from the uplink. `ifname` is the interface that they are at, if that is known; it may be
    /// gone.
    pub fn detach_uplink(&self, ifname: Option<&str>) -> Result<(), DataplaneError> {
        for seat in Seat::of_uplink(&self.pins, ifname.unwrap_or_default()) {
            link_info::detach(&seat.path);
            Pins::remove_link(&seat.path)?;
        }
        if let Some(ifname) = ifname {
            hook::remove_filters(ifname);
        }
        Ok(())
    }

    /// Brings the XDP program to the uplink as asked, or takes it away. Idempotent. Blocking.
    pub fn set_uplink_xdp(&self, ifname: &str, ifindex: u32, choice: XdpChoice) -> Result<(), DataplaneError> {
        xdp::set(&mut lock(&self.programs), &self.pins, ifname, ifindex, choice)
    }

    /// The programs at the uplink, where XDP runs there, and what is wrong with the TC programs.
    pub fn uplink_programs(&self, ifname: &str, ifindex: u32) -> (Vec<ProgramView>, Option<XdpMode>, Vec<String>) {
        let seats = Seat::of_uplink(&self.pins, ifname);
        let (mut views, problems) = hook::inspect(&self.program_ids, self.hook, &seats);
        let xdp = xdp::inspect(&self.program_ids, &self.pins, ifindex);
        let mode = xdp.as_ref().map(|(_, mode)| *mode);
        views.extend(xdp.map(|(view, _)| view));
        (views, mode, problems)
    }

    /// Says with which address an endpoint leaves the node; `None`: not at all. What leaves already goes on as it is.
    pub fn set_masquerade(&self, endpoint: EndpointId, source: Option<&EgressSource>) -> Result<(), DataplaneError> {
        let row = source.map(EgressSource::row).unwrap_or_default();
        lock(&self.uplink).set_masquerade(endpoint, row)
    }

    /// Says which ports of the node lead to pods, all of them. Those of endpoints that are not published are left out.
    pub fn set_host_ports(&self, wanted: &BTreeMap<HostPortKey, HostPort>) -> Result<(), DataplaneError> {
        let mut tables = lock(&self.uplink);
        let mut rows = BTreeMap::new();
        for (key, target) in wanted {
            if let Some(incarnation) = lock(&self.maps).incarnation(target.endpoint)? {
                let value = HostPortValue {
                    endpoint: target.endpoint.0,
                    incarnation,
                    port: target.port.to_be_bytes(),
                    zero: 0,
                };
                rows.insert(*key, value);
            }
        }
        tables.set_host_ports(rows)
    }

    /// Says which sources stay outside, all of them, and why.
    pub fn set_sources(&self, wanted: &BTreeMap<IpNet, Verdict>) -> Result<(), DataplaneError> {
        let rows = wanted
            .iter()
            .map(|(range, verdict)| {
                let value = SourceValue {
                    verdict: u32::from(*verdict as u16),
                };
                (source_key(range), value)
            })
            .collect();
        replace(&lock(&self.uplink).sources, &rows)
    }

    /// Index of the interface through which masqueraded packets leave, as the programs know it.
    pub fn uplink(&self) -> Result<Option<u32>, DataplaneError> {
        let row = lock(&self.maps).config.get(&0)?.unwrap_or_default();
        Ok(Some(row.uplink).filter(|index| *index != 0))
    }

    /// Tells the programs through which interface masqueraded packets leave.
    pub fn set_uplink(&self, ifindex: Option<u32>) -> Result<(), DataplaneError> {
        let maps = lock(&self.maps);
        let mut row = maps.config.get(&0)?.unwrap_or_default();
        let uplink = ifindex.unwrap_or(0);
        if row.uplink == uplink {
            return Ok(());
        }
        row.uplink = uplink;
        maps.config.put(&0, &row)
    }
}

/// Takes away clsact filters of ours at an interface, with the agent stopped. Links go with their pins.
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
    fn keys_stand_as_the_programs_read_them() {
        let key = host_port_key("192.0.2.1".parse().unwrap(), 6, 8080);
        assert_eq!(key.address[10..], [0xff, 0xff, 192, 0, 2, 1]);
        assert_eq!((key.port, key.protocol), ([0x1f, 0x90], 6));
        let key = |range: &str| source_key(&range.parse().unwrap());
        assert_eq!(key("10.0.0.0/8").prefix_length, 104);
        assert_eq!(key("0.0.0.0/0").prefix_length, 96, "not every IPv6 address");
        assert_eq!(key("fd00::/8").prefix_length, 8);
    }

    #[test]
    fn an_endpoint_without_a_source_has_no_last_port() {
        let source = EgressSource {
            ipv4: Some([192, 0, 2, 1].into()),
            ipv6: None,
            first: 61_000,
            last: 65_535,
        };
        let row = source.row();
        assert_eq!((row.ipv4, row.ipv6, row.last), ([192, 0, 2, 1], [0; 16], 65_535));
        assert_eq!(Masquerade::default().last, 0);
    }
}
