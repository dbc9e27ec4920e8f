//! Builds the rows of `ENDPOINTS` and `ENDPOINT_POLICIES` from the configuration of an endpoint.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use kni_common::{
    IFINDEX_BASE,
    endpoint::{
        EndpointPolicy, EndpointRow, FLAG_HOST_ACCESS, FLAG_PLUGIN, FLAG_READY, FLAG_ROUTED, FLAG_SHAPED, FLAG_XDP,
        MacPair,
    },
};
use kni_model::{Attachment, EndpointId, Enforcement, MacAddr, NetworkId};

/// The configuration of an endpoint for the programs.
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
    /// Whether `xdp_pod` runs at the host end, and the pod end accepts frames from that of another endpoint.
    pub xdp: bool,
    /// Index of the host interface, if a CNI plugin created it and its datapath carries the packets.
    pub plugin: Option<u32>,
    /// Whether a queueing discipline at the host end limits the rate towards the pod.
    pub shaped: bool,
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
            host_access: attachment.host_access || attachment.kind.is_plugins(),
            xdp: attachment.xdp,
            plugin: attachment.kind.is_plugins().then_some(attachment.host_ifindex),
            shaped: attachment.bandwidth.to_pod.is_some(),
        }
    }
}

impl EndpointConfig {
    /// The configuration that the rows were written for; `None` for a free row.
    pub(super) fn of_rows(endpoint: EndpointId, row: &EndpointRow, policy: &EndpointPolicy) -> Option<Self> {
        let has = |flag| row.flags & flag != 0;
        let (ipv4, ipv6) = (Ipv4Addr::from(row.ipv4), Ipv6Addr::from(row.ipv6));
        Some(Self {
            endpoint,
            network: NetworkId::try_from(row.network).ok()?,
            ipv4: Some(ipv4).filter(|ip| !ip.is_unspecified()),
            ipv6: Some(ipv6).filter(|ip| !ip.is_unspecified()),
            mac: MacAddr(row.to_pod.destination),
            host_mac: MacAddr(row.to_pod.source),
            host_access: has(FLAG_HOST_ACCESS),
            xdp: has(FLAG_XDP),
            plugin: has(FLAG_PLUGIN).then_some(policy.ifindex),
            shaped: has(FLAG_SHAPED),
        })
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.ipv4.map(IpAddr::V4).into_iter().chain(self.ipv6.map(IpAddr::V6))
    }

    /// The row of `ENDPOINT_POLICIES`, with the policy words that are applied.
    pub(super) fn policy(&self, enforcement: Enforcement) -> EndpointPolicy {
        EndpointPolicy {
            policy: enforcement.policy,
            identity4: enforcement.identity4,
            identity6: enforcement.identity6,
            ifindex: self.plugin.unwrap_or(IFINDEX_BASE + self.endpoint.0),
        }
    }

    /// The row of `ENDPOINTS`. `routed`: its network's packets leave the node with the pods' own addresses.
    pub(super) fn row(&self, age: Age, routed: bool, ready: bool) -> EndpointRow {
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        let flags = [
            flag(ready, FLAG_READY),
            flag(self.host_access, FLAG_HOST_ACCESS),
            flag(routed, FLAG_ROUTED),
            // Packets that XDP sends bypass queueing disciplines.
            flag(self.xdp && !self.shaped, FLAG_XDP),
            flag(self.plugin.is_some(), FLAG_PLUGIN),
            flag(self.shaped, FLAG_SHAPED),
        ];
        EndpointRow {
            from_pod: MacPair {
                destination: self.host_mac.0,
                source: self.mac.0,
            },
            to_pod: MacPair {
                destination: self.mac.0,
                source: self.host_mac.0,
            },
            network: self.network.get(),
            generation: age.generation,
            incarnation: age.incarnation,
            epoch: age.epoch,
            flags: flags.iter().sum(),
            ipv4: self.ipv4.map_or([0; 4], |ip| ip.octets()),
            ipv6: self.ipv6.map_or([0; 16], |ip| ip.octets()),
        }
    }
}

/// The generations that associate flows with a row's content and owner.
#[derive(Debug, Clone, Copy)]
pub(super) struct Age {
    generation: u32,
    incarnation: u32,
    epoch: u32,
}

impl Age {
    /// Of a row with a new owner.
    pub(super) const fn new(generation: u32) -> Self {
        Self {
            generation,
            incarnation: generation,
            epoch: generation,
        }
    }

    /// Of an existing row.
    pub(super) const fn of(row: &EndpointRow) -> Self {
        Self {
            generation: row.generation,
            incarnation: row.incarnation,
            epoch: row.epoch,
        }
    }
}
