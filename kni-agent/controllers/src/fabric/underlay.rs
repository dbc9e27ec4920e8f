//! Defines where nodes are in the network between them, and the way from one to the other.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use kni_api::NodeEndpoint;
use kni_dataplane::Way;
use kni_fabric::Path;
use kni_model::{
    Fabric,
    network::{OVERHEAD_V4, OVERHEAD_V6},
};

/// The addresses of a node in the underlay, the preferred family first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Underlay {
    pub(super) addresses: Vec<IpAddr>,
    pub(super) port: u16,
    pub(super) mtu: u32,
    stamp: u64,
}

impl Underlay {
    pub(super) fn of(endpoint: &NodeEndpoint) -> Self {
        let mut stamp = DefaultHasher::new();
        (&endpoint.spec.node_uid, endpoint.spec.epoch).hash(&mut stamp);
        Self {
            addresses: endpoint
                .confirmed()
                .filter_map(|address| address.parse().ok())
                .collect(),
            port: endpoint.spec.port,
            mtu: endpoint.spec.mtu,
            stamp: stamp.finish(),
        }
    }

    pub(super) fn ipv4(&self) -> Option<Ipv4Addr> {
        self.addresses.iter().find_map(|address| match address {
            IpAddr::V4(v4) => Some(*v4),
            IpAddr::V6(_) => None,
        })
    }

    pub(super) fn ipv6(&self) -> Option<Ipv6Addr> {
        self.addresses.iter().find_map(|address| match address {
            IpAddr::V6(v6) => Some(*v6),
            IpAddr::V4(_) => None,
        })
    }

    fn of_family(&self, v4: bool) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| address.is_ipv4() == v4)
    }

    /// Both ends must choose the same family, as each accepts packets from one address of the other only: IPv6 where
    /// both have it and one of them prefers it, otherwise IPv4.
    fn common(&self, other: &Self) -> Option<(IpAddr, IpAddr)> {
        let both = |v4| Some((self.of_family(v4)?, other.of_family(v4)?));
        let prefers = |underlay: &Self| underlay.addresses.first().is_some_and(IpAddr::is_ipv6);
        let (v4, v6) = (both(true), both(false));
        if prefers(self) || prefers(other) {
            v6.or(v4)
        } else {
            v4.or(v6)
        }
    }
}

/// The way to a node's block; none where the two nodes have no family, or no port, in common. As long as each address
/// has one node only, the path is determined by the way.
pub(super) fn way(own: &Underlay, other: &Underlay, fabric: Fabric, block: &IpNet) -> Option<(Way, Path)> {
    let mtu = own.mtu.min(other.mtu);
    let (underlay, overhead) = match fabric {
        Fabric::Overlay if own.port != other.port => return None,
        Fabric::Overlay => {
            let (_, underlay) = own.common(other)?;
            (underlay, if underlay.is_ipv4() { OVERHEAD_V4 } else { OVERHEAD_V6 })
        }
        Fabric::Native => (other.of_family(block.addr().is_ipv4())?, 0),
        Fabric::None => return None,
    };
    let way = Way {
        underlay,
        overlay: fabric == Fabric::Overlay,
    };
    let path = Path {
        mtu: mtu.saturating_sub(overhead),
        stamp: other.stamp,
    };
    Some((way, path))
}
