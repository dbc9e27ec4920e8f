//! Connects the pods of this node with those of others: the tunnel device, the rows of nodes, the host's routes.
//! Layer: service.
//!
//! ```text
//! desired state (which nodes have which addresses) -> device and its programs -> rows -> routes of the host's stack
//! ```
//!
//! Level-triggered: [`Fabric::apply`] takes the whole desired state and changes what differs. Until its first call
//! everything that an earlier agent made stays as it is.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use kni_dataplane::{
    Answering, Dataplane, DataplaneError, EgressShares, FabricRows, Hop, NetworkFabric, TunnelEnds, Way,
};
use kni_model::{NetworkId, error_chain};
use kni_netlink::{Netlink, RemoteRoute, own::OVERLAY_NAME};

/// Why the desired state could not be applied. It is retried.
#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    /// The tunnel device, or the routes of the host.
    #[error("{}", error_chain(.0))]
    Netlink(#[from] kni_netlink::Error),
    /// Rows or programs.
    #[error("{}", error_chain(.0))]
    Dataplane(#[from] DataplaneError),
    /// The thread that wrote rows.
    #[error("writing what is known of other nodes: {0}")]
    Ended(#[from] tokio::task::JoinError),
}

/// The tunnel of this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tunnel {
    /// The node's IPv4 address in the underlay.
    pub ipv4: Option<Ipv4Addr>,
    /// The node's IPv6 address there.
    pub ipv6: Option<Ipv6Addr>,
    /// UDP port of all nodes' tunnels.
    pub port: u16,
    /// The largest inner IP packet, in bytes.
    pub mtu: u32,
    /// The network whose pods exchange packets with the stacks of all nodes.
    pub host_network: Option<NetworkId>,
}

/// The node's stack as other nodes' pods see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stack {
    /// The network whose pods exchange packets with it.
    pub network: NetworkId,
    /// Its IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// Its IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
}

/// What a way to another node needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// The largest IP packet before any outer header, in bytes.
    pub mtu: u32,
    /// Another value means another node, or another state of it.
    pub stamp: u64,
}

/// The tunnel, and the index of its device, which may be missing.
type TunnelDevice = (Option<Tunnel>, Option<u32>);

/// The next hop of a way without a tunnel.
type NextHops = BTreeMap<IpAddr, (u32, Option<IpAddr>)>;

/// Everything that this node should know of others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Desired {
    /// `None` where no network of the cluster needs it, or the node has no address yet.
    pub tunnel: Option<Tunnel>,
    /// What the node's stack sends to pods of other nodes with.
    pub stack: Option<Stack>,
    /// The ways that the networks refer to.
    pub ways: BTreeMap<Way, Path>,
    /// The networks.
    pub networks: BTreeMap<NetworkId, NetworkFabric>,
    /// The egress addresses that several nodes share.
    pub egress: BTreeMap<IpAddr, EgressShares>,
    /// The names of all nodes, by each of their addresses.
    pub names: Arc<BTreeMap<IpAddr, String>>,
}

/// Applies the desired state.
pub struct Fabric {
    dataplane: Arc<Dataplane>,
    netlink: Netlink,
    problem: Mutex<Option<String>>,
    /// The names of nodes by address.
    names: RwLock<Arc<BTreeMap<IpAddr, String>>>,
    /// The tunnel to other nodes' stacks, as applied.
    stacks: RwLock<Option<Stacks>>,
    /// The next hops that were found last.
    hops: Mutex<NextHops>,
}

/// The other nodes whose stacks this node's stack reaches through the tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stacks {
    /// The network whose pods exchange packets with them.
    pub network: NetworkId,
    /// UDP port of the tunnel.
    pub port: u16,
    /// Index of the tunnel device.
    pub device: u32,
    /// Each node by name: its address in the underlay, and this node's of the same family.
    pub nodes: BTreeMap<String, (IpAddr, IpAddr)>,
}

impl Fabric {
    /// Changes nothing. Call it in the node's network namespace.
    pub fn new(dataplane: Arc<Dataplane>) -> Result<Self, FabricError> {
        Ok(Self {
            dataplane,
            netlink: Netlink::new()?,
            problem: Mutex::default(),
            names: RwLock::default(),
            stacks: RwLock::default(),
            hops: Mutex::default(),
        })
    }

    /// Applies the desired state: the device before the rows that lead to it, rows before the host's routes. Logs a
    /// failure once; the caller repeats the call. Whatever fails, what other nodes have no longer is removed.
    pub async fn apply(&self, desired: &Desired) -> Result<(), FabricError> {
        *self.names.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&desired.names);
        let done = self.carry_out(desired).await;
        let problem = done.as_ref().err().map(ToString::to_string);
        let mut known = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != problem {
            if let Some(reason) = &problem {
                tracing::error!(
                    reason,
                    "packets between this node and others are not forwarded as they should be"
                );
            } else {
                tracing::info!("packets between this node and others are forwarded again");
            }
            *known = problem;
        }
        done
    }

    /// Why the last call of [`Self::apply`] failed.
    pub fn problem(&self) -> Option<String> {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The name of the node, this one or another, that has an address in the underlay. Does not block.
    pub fn node_at(&self, address: IpAddr) -> Option<String> {
        let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        names.get(&address).cloned()
    }

    /// The other nodes that are reached through the tunnel; `None` where the nodes' stacks do not use it. Does not
    /// block.
    pub fn stacks(&self) -> Option<Stacks> {
        self.stacks.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn carry_out(&self, desired: &Desired) -> Result<(), FabricError> {
        let (device, made) = self.device(desired).await;
        let (hops, found) = self.next_hops(desired).await;
        let rows = rows(desired, device, &hops);
        let dataplane = Arc::clone(&self.dataplane);
        let written = tokio::task::spawn_blocking(move || dataplane.set_fabric(&rows)).await?;
        let routes = host_routes(desired, device, &hops);
        let reconciled = self.netlink.ensure_remote_routes(&routes).await;
        // Neither a device that cannot be made nor rows without room keep what other nodes have no longer.
        made?;
        found?;
        reconciled?;
        written?;
        if desired.tunnel.is_none() {
            self.netlink.remove_overlay().await?;
        }
        *self.stacks.write().unwrap_or_else(PoisonError::into_inner) = stacks(desired, device);
        Ok(())
    }

    /// The tunnel device, and whether it is as desired. Beside an error it is the one that is there, if any.
    async fn device(&self, desired: &Desired) -> (Option<u32>, Result<(), FabricError>) {
        let Some(Tunnel { port, mtu, .. }) = desired.tunnel else {
            return (None, Ok(()));
        };
        match self.netlink.ensure_overlay(port, mtu, self.attach()).await {
            Ok(device) => (Some(device), Ok(())),
            Err(error) => (self.netlink.find_overlay().await.ok().flatten(), Err(error)),
        }
    }

    /// Attaches the programs of the tunnel device.
    async fn attach(&self) -> Result<(), FabricError> {
        let dataplane = Arc::clone(&self.dataplane);
        tokio::task::spawn_blocking(move || dataplane.attach_overlay(OVERLAY_NAME)).await??;
        Ok(())
    }

    /// Where the node's own routes lead to other nodes. One without a route is left out; one that cannot be looked up
    /// is where it was.
    async fn next_hops(&self, desired: &Desired) -> (NextHops, Result<(), FabricError>) {
        let before = std::mem::take(&mut *self.hops.lock().unwrap_or_else(PoisonError::into_inner));
        let (mut hops, mut result) = (NextHops::new(), Ok(()));
        for way in desired.ways.keys().filter(|way| !way.overlay) {
            let found = self.netlink.way_to(way.underlay).await.unwrap_or_else(|error| {
                result = Err(error.into());
                before.get(&way.underlay).copied()
            });
            hops.extend(found.map(|found| (way.underlay, found)));
        }
        self.hops
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone_from(&hops);
        (hops, result)
    }
}

/// Removes the tunnel device and the routes, while the agent is stopped. Rows and programs go with their pins.
pub async fn cleanup() -> Result<(), FabricError> {
    let netlink = Netlink::for_teardown()?;
    netlink.ensure_remote_routes(&BTreeSet::new()).await?;
    Ok(netlink.remove_overlay().await?)
}

/// The way and its hop in the dataplane's terms. Behind a router several nodes have the same way, which is specific to
/// none of them.
fn resolve(way: &Way, path: &Path, (tunnel, device): TunnelDevice, hops: &NextHops) -> Option<(Way, Hop)> {
    let Path { mtu, stamp } = *path;
    if way.overlay {
        tunnel?;
        let ifindex = device;
        return Some((*way, Hop { ifindex, mtu, stamp }));
    }
    let (ifindex, router) = *hops.get(&way.underlay)?;
    let stamp = if router.is_some() { 0 } else { stamp };
    let underlay = router.unwrap_or(way.underlay);
    let hop = Hop {
        ifindex: Some(ifindex),
        mtu,
        stamp,
    };
    Some((Way { underlay, ..*way }, hop))
}

fn rows(desired: &Desired, device: Option<u32>, hops: &NextHops) -> FabricRows {
    let mut ways: BTreeMap<Way, Hop> = BTreeMap::new();
    let mut resolved: BTreeMap<Way, Way> = BTreeMap::new();
    for (way, path) in &desired.ways {
        if let Some((to, hop)) = resolve(way, path, (desired.tunnel, device), hops) {
            resolved.insert(*way, to);
            let known = ways.entry(to).or_insert(hop);
            known.mtu = known.mtu.min(hop.mtu);
        }
    }
    let networks = desired.networks.iter().map(|(network, fabric)| {
        let blocks = fabric.blocks.iter();
        let nodes = fabric.nodes.iter();
        let fabric = NetworkFabric {
            number: fabric.number,
            blocks: blocks
                .filter_map(|(net, way)| Some((*net, *resolved.get(way)?)))
                .collect(),
            nodes: nodes.filter_map(|(ip, way)| Some((*ip, *resolved.get(way)?))).collect(),
            own: fabric.own.clone(),
            exposed: fabric.exposed,
        };
        (*network, fabric)
    });
    FabricRows {
        tunnel: desired.tunnel.map(|tunnel| TunnelEnds {
            ipv4: tunnel.ipv4,
            ipv6: tunnel.ipv6,
            port: tunnel.port,
            host_network: tunnel.host_network,
        }),
        networks: networks.collect(),
        ways,
        egress: shares(desired, &resolved),
    }
}

/// The egress addresses, without those that another node answers for to which there is no way.
fn shares(desired: &Desired, resolved: &BTreeMap<Way, Way>) -> BTreeMap<IpAddr, EgressShares> {
    let shares = desired.egress.iter().filter_map(|(address, shares)| {
        let answering = match shares.answering {
            Answering::Here => Answering::Here,
            Answering::There(way) => Answering::There(*resolved.get(&way)?),
        };
        let others = shares.others.iter();
        let others = others.map(|(unit, way)| (*unit, way.and_then(|way| resolved.get(&way).copied())));
        let shares = EgressShares {
            answering,
            unit: shares.unit,
            others: others.collect(),
        };
        Some((*address, shares))
    });
    shares.collect()
}

/// The nodes whose own addresses are destinations of the network with host access, through the tunnel.
fn stacks(desired: &Desired, device: Option<u32>) -> Option<Stacks> {
    let tunnel = desired.tunnel?;
    let (device, id) = (device?, tunnel.host_network?);
    let network = desired.networks.get(&id)?;
    let nodes = network.nodes.values().filter(|way| way.overlay).filter_map(|way| {
        let own = match way.underlay {
            IpAddr::V4(_) => IpAddr::V4(tunnel.ipv4?),
            IpAddr::V6(_) => IpAddr::V6(tunnel.ipv6?),
        };
        Some((desired.names.get(&way.underlay)?.clone(), (way.underlay, own)))
    });
    Some(Stacks {
        network: id,
        port: tunnel.port,
        device,
        nodes: nodes.collect(),
    })
}

/// The stack reaches the pods of the network with host access the way that its own pods do, with the node's address in
/// the underlay: other nodes know it by that. Through the tunnel it sends packets that fit the way, whatever fits the
/// device.
fn host_routes(desired: &Desired, device: Option<u32>, hops: &NextHops) -> BTreeSet<RemoteRoute> {
    let Some(stack) = desired.stack else {
        return BTreeSet::new();
    };
    let network = desired.networks.get(&stack.network);
    let blocks = network.into_iter().flat_map(|network| &network.blocks);
    let routes = blocks.filter_map(|(block, way)| {
        let source = match block.addr() {
            IpAddr::V4(_) => IpAddr::V4(stack.ipv4?),
            IpAddr::V6(_) => IpAddr::V6(stack.ipv6?),
        };
        let (ifindex, gateway, mtu) = if way.overlay {
            (device?, None, desired.ways.get(way).map_or(0, |path| path.mtu))
        } else {
            let (ifindex, router) = *hops.get(&way.underlay)?;
            (ifindex, Some(router.unwrap_or(way.underlay)), 0)
        };
        Some(RemoteRoute {
            destination: *block,
            ifindex,
            gateway,
            source,
            mtu,
        })
    });
    routes.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(address: &str, overlay: bool) -> Way {
        Way {
            underlay: address.parse().unwrap(),
            overlay,
        }
    }

    fn desired() -> Desired {
        let path = Path { mtu: 1450, stamp: 1 };
        let network = |ways: [Way; 2]| NetworkFabric {
            number: Some(5000),
            blocks: [
                ("10.0.1.0/26".parse().unwrap(), ways[0]),
                ("fd00:1::/122".parse().unwrap(), ways[1]),
            ]
            .into(),
            ..NetworkFabric::default()
        };
        let (tunnel, direct) = (way("192.0.2.2", true), way("192.0.2.2", false));
        Desired {
            tunnel: Some(Tunnel {
                ipv4: Some([192, 0, 2, 1].into()),
                ipv6: None,
                port: 4789,
                mtu: 1450,
                host_network: Some(1.try_into().unwrap()),
            }),
            stack: Some(Stack {
                network: 1.try_into().unwrap(),
                ipv4: Some([192, 0, 2, 1].into()),
                ipv6: None,
            }),
            ways: [(tunnel, path), (direct, path)].into(),
            networks: [
                (1.try_into().unwrap(), network([tunnel, tunnel])),
                (2.try_into().unwrap(), network([direct, tunnel])),
            ]
            .into(),
            egress: BTreeMap::new(),
            names: Arc::default(),
        }
    }

    fn hops(router: Option<&str>) -> NextHops {
        let router = router.map(|router| router.parse().unwrap());
        [("192.0.2.2".parse().unwrap(), (9, router))].into()
    }

    fn shown(routes: &BTreeSet<RemoteRoute>) -> Vec<String> {
        let routes = routes.iter().map(|route| {
            let gateway = route
                .gateway
                .map(|gateway| format!(" via {gateway}"))
                .unwrap_or_default();
            let mtu = Some(route.mtu).filter(|mtu| *mtu > 0);
            let mtu = mtu.map(|mtu| format!(" mtu {mtu}")).unwrap_or_default();
            format!(
                "{}{gateway} dev {} src {}{mtu}",
                route.destination, route.ifindex, route.source
            )
        });
        routes.collect()
    }

    #[test]
    fn the_stack_has_routes_to_pods_of_the_network_with_host_access_only() {
        let mut desired = desired();
        // What fits the way, which may be less than what fits the device.
        desired
            .ways
            .insert(way("192.0.2.2", true), Path { mtu: 1330, stamp: 1 });
        let routes = host_routes(&desired, Some(7), &hops(None));
        // The node has no IPv6 address to send from.
        assert_eq!(shown(&routes), ["10.0.1.0/26 dev 7 src 192.0.2.1 mtu 1330"]);
        assert!(host_routes(&desired, None, &hops(None)).is_empty());
        desired.stack = desired.stack.map(|stack| Stack {
            network: 2.try_into().unwrap(),
            ..stack
        });
        let routes = host_routes(&desired, None, &hops(None));
        assert_eq!(shown(&routes), ["10.0.1.0/26 via 192.0.2.2 dev 9 src 192.0.2.1"]);
        let routes = host_routes(&desired, None, &hops(Some("192.0.2.254")));
        assert_eq!(shown(&routes), ["10.0.1.0/26 via 192.0.2.254 dev 9 src 192.0.2.1"]);
    }

    #[test]
    fn ways_through_the_tunnel_need_its_device_and_others_a_route() {
        let desired = desired();
        let with = rows(&desired, Some(7), &hops(None));
        let interfaces = |rows: &FabricRows| -> Vec<(bool, Option<u32>)> {
            rows.ways.iter().map(|(way, hop)| (way.overlay, hop.ifindex)).collect()
        };
        assert_eq!(interfaces(&with), [(false, Some(9)), (true, Some(7))]);
        let lost = rows(&desired, None, &hops(None));
        assert_eq!(
            interfaces(&lost),
            [(false, Some(9)), (true, None)],
            "ways stay as they are"
        );
        assert_eq!(lost.networks, with.networks);
        let untunnelled = Desired {
            tunnel: None,
            ..desired.clone()
        };
        assert_eq!(rows(&untunnelled, None, &hops(None)).ways.len(), 1);
        let without = rows(&desired, Some(7), &NextHops::new());
        assert_eq!(without.ways.len(), 1);
        assert_eq!(
            without.networks[&2.try_into().unwrap()].blocks.len(),
            1,
            "the one behind the tunnel"
        );
        let routed = rows(&desired, None, &hops(Some("192.0.2.254")));
        let (way, hop) = routed.ways.iter().find(|(way, _)| !way.overlay).unwrap();
        assert_eq!((way.underlay, hop.stamp), ("192.0.2.254".parse().unwrap(), 0));
        assert_eq!(
            routed.networks[&2.try_into().unwrap()].blocks.values().next(),
            Some(way)
        );
    }

    #[test]
    fn nodes_are_asked_by_the_address_that_the_tunnel_leads_to() {
        let mut desired = desired();
        let to = way("192.0.2.2", true);
        let nodes = [
            ("192.0.2.2", to),
            ("2001:db8::2", to),
            ("192.0.2.3", way("192.0.2.3", false)),
        ];
        let network = desired.networks.get_mut(&1.try_into().unwrap()).unwrap();
        network.nodes = nodes.map(|(ip, way)| (ip.parse().unwrap(), way)).into();
        let names = [("192.0.2.2", "n2"), ("2001:db8::2", "n2"), ("192.0.2.3", "n3")];
        let names = names.map(|(ip, name)| (ip.parse().unwrap(), name.to_owned()));
        desired.names = Arc::new(names.into());
        let found = stacks(&desired, Some(7)).unwrap();
        assert_eq!((found.network.get(), found.port, found.device), (1, 4789, 7));
        let addresses = ("192.0.2.2".parse().unwrap(), "192.0.2.1".parse().unwrap());
        assert_eq!(found.nodes, [("n2".to_owned(), addresses)].into());
        assert_eq!(stacks(&desired, None), None);
    }
}
