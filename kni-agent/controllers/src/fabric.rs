//! Derives from the cluster's objects which node has which pods' addresses, and has that applied.
//!
//! A node is known by the addresses of its `NodeEndpoint` that kni-controller has confirmed, and has the addresses of its
//! `AddressBlock`s. Both are written by that node alone, with its token.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use ipnet::IpNet;
use kni_api::NodeEndpoint;
use kni_cluster::Tables;
use kni_dataplane::{NetworkFabric, Way};
use kni_fabric::{Desired, Path, Stack, Tunnel};
use kni_model::{
    Fabric,
    network::{OVERHEAD_V4, OVERHEAD_V6},
    view::NetworkView,
};

use super::{ObjectControllers, retry::Retry};

/// Changes that arrive within this time are applied together.
const GATHER: Duration = Duration::from_millis(10);

/// The addresses of a node in the underlay, the preferred family first.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Underlay {
    addresses: Vec<IpAddr>,
    port: u16,
    mtu: u32,
    stamp: u64,
}

impl Underlay {
    fn of(endpoint: &NodeEndpoint) -> Self {
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

    fn ipv4(&self) -> Option<Ipv4Addr> {
        self.addresses.iter().find_map(|address| match address {
            IpAddr::V4(v4) => Some(*v4),
            IpAddr::V6(_) => None,
        })
    }

    fn ipv6(&self) -> Option<Ipv6Addr> {
        self.addresses.iter().find_map(|address| match address {
            IpAddr::V6(v6) => Some(*v6),
            IpAddr::V4(_) => None,
        })
    }

    fn of_family(&self, v4: bool) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| address.is_ipv4() == v4)
    }

    /// Both ends must choose the same family, as each accepts packets from one address of the other only: IPv6 where both
    /// have it and one of them prefers it, otherwise IPv4.
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

impl ObjectControllers {
    /// Applies changes of nodes and their blocks for as long as the agent runs, and repeats what fails.
    pub(super) async fn reconcile_fabric(self) {
        let mut changes = self.cache.changes();
        let mut attached = self.state.changes.clone();
        let mut seen = None;
        let mut applied = None;
        let mut retry = Retry::default();
        loop {
            let versions = {
                let tables = self.cache.tables();
                let versions = [
                    tables.node_endpoints.version(),
                    tables.other_blocks.version(),
                    tables.networks.version(),
                    tables.numbers.version(),
                ];
                (versions, *attached.borrow_and_update())
            };
            if seen != Some(versions) || retry.is_over() {
                seen = Some(versions);
                if let Some(desired) = self.desired_fabric()
                    && (applied.as_ref() != Some(&desired) || retry.is_over())
                {
                    let done = (self.state.apply_fabric)(desired.clone()).await;
                    retry.ended(done);
                    applied = done.then_some(desired);
                    self.node_changed.notify_one();
                }
            }
            let next = async {
                tokio::select! {
                    sent = changes.changed() => sent.is_ok(),
                    sent = attached.changed() => sent.is_ok(),
                    () = retry.wait() => true,
                }
            };
            if !kni_tasks::waiting(next).await {
                return;
            }
            tokio::time::sleep(GATHER).await;
        }
    }

    /// `None` until the nodes and their blocks are known: what an earlier agent made stays.
    fn desired_fabric(&self) -> Option<Desired> {
        let views = (self.state.networks)();
        let tables = self.cache.tables();
        let known = tables.node_endpoints.is_synced() && tables.other_blocks.is_synced() && tables.networks.is_synced();
        known.then(|| desired(&tables, &views, &self.node))
    }
}

/// What this node should know of others.
fn desired(tables: &Tables, views: &[NetworkView], node: &str) -> Desired {
    let own = tables.node_endpoints.get("", node).map(|object| Underlay::of(object));
    let Some(own) = own.filter(|own| !own.addresses.is_empty()) else {
        return Desired::default();
    };
    let others: BTreeMap<&str, (&str, Underlay)> = {
        let rows = tables.node_endpoints.rows().iter();
        let others = rows.filter(|(key, object)| key.name == object.spec.node_name && key.name != node);
        others
            .map(|(key, object)| (key.name.as_str(), (object.spec.node_uid.as_str(), Underlay::of(object))))
            .collect()
    };
    let blocks = blocks(tables);
    let mut desired = Desired {
        tunnel: tunnel(views, &own),
        ..Desired::default()
    };
    let mut native: Vec<IpNet> = Vec::new();
    for view in views {
        let spec = &view.network.spec;
        let number = view.number.filter(|_| spec.fabric == Fabric::Overlay);
        if spec.fabric == Fabric::None || (spec.fabric == Fabric::Overlay && number.is_none()) {
            continue;
        }
        let exposed = spec.fabric == Fabric::Native;
        if exposed {
            let overlaps = |net: &IpNet| native.iter().any(|other| other.contains(net) || net.contains(other));
            if spec.subnets.iter().any(overlaps) {
                // Without a tunnel an address is that of one network only. All nodes choose the same one.
                continue;
            }
            native.extend(&spec.subnets);
        }
        let mut network = NetworkFabric {
            number,
            exposed,
            ..NetworkFabric::default()
        };
        for (block, (name, uid)) in blocks.get(spec.name.as_str()).into_iter().flatten() {
            let is_inside = spec.subnets.iter().any(|subnet| subnet.contains(block));
            let Some((of_uid, other)) = others.get(name).filter(|_| is_inside) else {
                continue;
            };
            if of_uid == uid
                && let Some((way, path)) = way(&own, other, spec.fabric, block)
            {
                desired.ways.insert(way, path);
                network.blocks.insert(*block, way);
            }
        }
        if spec.default {
            add_nodes(&mut network, &mut desired.ways, spec.fabric, (&own, &others));
            desired.stack = Some(Stack {
                network: view.network.id,
                ipv4: own.ipv4(),
                ipv6: own.ipv6(),
            });
        }
        desired.networks.insert(view.network.id, network);
    }
    desired
}

/// The blocks of joined networks, by network; each with its node and that node's UID.
fn blocks(tables: &Tables) -> BTreeMap<&str, BTreeMap<IpNet, (&str, &str)>> {
    let mut blocks: BTreeMap<&str, BTreeMap<IpNet, (&str, &str)>> = BTreeMap::new();
    for object in tables.other_blocks.rows().values() {
        let spec = &object.spec;
        let network = tables.networks.get("", &spec.network);
        let is_it = network.is_some_and(|network| network.metadata.uid.as_ref() == Some(&spec.network_uid));
        if let Some(block) = spec.cidr.parse::<IpNet>().ok().filter(|_| is_it) {
            let of_network = blocks.entry(&spec.network).or_default();
            of_network.insert(block, (&spec.node_name, &spec.node_uid));
        }
    }
    blocks
}

/// The tunnel exists while a network of the cluster needs it.
fn tunnel(views: &[NetworkView], own: &Underlay) -> Option<Tunnel> {
    let mut overlays = views.iter().filter(|view| view.network.spec.fabric == Fabric::Overlay);
    let default = overlays
        .clone()
        .find(|view| view.network.spec.default && view.number.is_some());
    overlays.next()?;
    let overhead = if own.ipv4().is_some() { OVERHEAD_V4 } else { OVERHEAD_V6 };
    Some(Tunnel {
        ipv4: own.ipv4(),
        ipv6: own.ipv6(),
        port: own.port,
        mtu: own.mtu.saturating_sub(overhead),
        host_network: default.map(|view| view.network.id),
    })
}

/// The way to a node's block; none where the two nodes have no family, or no port, in common.
fn way(own: &Underlay, other: &Underlay, fabric: Fabric, block: &IpNet) -> Option<(Way, Path)> {
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

/// The nodes' own addresses, in the network whose pods they exchange packets with.
fn add_nodes(
    network: &mut NetworkFabric,
    ways: &mut BTreeMap<Way, Path>,
    fabric: Fabric,
    (own, others): (&Underlay, &BTreeMap<&str, (&str, Underlay)>),
) {
    network.own = own.addresses.iter().copied().collect::<BTreeSet<_>>();
    for (_, other) in others.values() {
        for address in &other.addresses {
            if let Some((way, path)) = way(own, other, fabric, &IpNet::from(*address)) {
                ways.insert(way, path);
                network.nodes.insert(*address, way);
            }
        }
    }
}
