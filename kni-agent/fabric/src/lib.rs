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
    sync::{Arc, Mutex, PoisonError},
};

use kni_dataplane::{Dataplane, DataplaneError, FabricRows, Hop, NetworkFabric, TunnelEnds, Way};
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

/// What a way to another node needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// The largest IP packet before any outer header, in bytes.
    pub mtu: u32,
    /// Another value means another node, or another state of it.
    pub stamp: u64,
    /// Without a tunnel: the interface that leads to the node.
    pub ifindex: u32,
}

/// Everything that this node should know of others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Desired {
    /// `None` where no network of the cluster needs it, or the node has no address yet.
    pub tunnel: Option<Tunnel>,
    /// The ways that the networks refer to.
    pub ways: BTreeMap<Way, Path>,
    /// The networks.
    pub networks: BTreeMap<NetworkId, NetworkFabric>,
}

/// Applies the desired state.
pub struct Fabric {
    dataplane: Arc<Dataplane>,
    netlink: Netlink,
    problem: Mutex<Option<String>>,
}

impl Fabric {
    /// Changes nothing. Call it in the node's network namespace.
    pub fn new(dataplane: Arc<Dataplane>) -> Result<Self, FabricError> {
        Ok(Self {
            dataplane,
            netlink: Netlink::new()?,
            problem: Mutex::default(),
        })
    }

    /// Applies the desired state: the device before the rows that lead to it, rows before the host's routes. Logs a
    /// failure once; the caller repeats the call.
    pub async fn apply(&self, desired: &Desired) -> Result<(), FabricError> {
        let done = self.carry_out(desired).await;
        let problem = done.as_ref().err().map(ToString::to_string);
        let mut known = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != problem {
            match &problem {
                Some(reason) => tracing::error!(
                    reason,
                    "packets between this node and others are not forwarded as they should be"
                ),
                None => tracing::info!("packets between this node and others are forwarded again"),
            }
            *known = problem;
        }
        done
    }

    /// Why the last call of [`Self::apply`] failed.
    pub fn problem(&self) -> Option<String> {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn carry_out(&self, desired: &Desired) -> Result<(), FabricError> {
        let device = match desired.tunnel {
            Some(tunnel) => Some(self.netlink.ensure_overlay(tunnel.port, tunnel.mtu).await?),
            None => None,
        };
        let rows = rows(desired, device);
        let dataplane = Arc::clone(&self.dataplane);
        tokio::task::spawn_blocking(move || {
            if device.is_some() {
                dataplane.attach_overlay(OVERLAY_NAME)?;
            }
            dataplane.set_fabric(&rows)
        })
        .await??;
        self.netlink.ensure_remote_routes(&host_routes(desired, device)).await?;
        if device.is_none() {
            self.netlink.remove_overlay().await?;
        }
        Ok(())
    }
}

/// Removes the tunnel device and the routes, while the agent is stopped. Rows and programs go with their pins.
pub async fn cleanup() -> Result<(), FabricError> {
    let netlink = Netlink::for_teardown()?;
    netlink.ensure_remote_routes(&BTreeSet::new()).await?;
    Ok(netlink.remove_overlay().await?)
}

fn rows(desired: &Desired, device: Option<u32>) -> FabricRows {
    let hop = |way: &Way, path: &Path| {
        let ifindex = if way.overlay { device? } else { path.ifindex };
        let Path { mtu, stamp, .. } = *path;
        Some(Hop { ifindex, mtu, stamp })
    };
    let ways = desired.ways.iter();
    FabricRows {
        tunnel: desired.tunnel.map(|tunnel| TunnelEnds {
            ipv4: tunnel.ipv4,
            ipv6: tunnel.ipv6,
            port: tunnel.port,
            host_network: tunnel.host_network,
        }),
        ways: ways.filter_map(|(way, path)| Some((*way, hop(way, path)?))).collect(),
        networks: desired.networks.clone(),
    }
}

/// The stack reaches the pods of the network with host access through the tunnel, with the node's address in the underlay:
/// other nodes know it by that.
fn host_routes(desired: &Desired, device: Option<u32>) -> BTreeSet<RemoteRoute> {
    let (Some(ifindex), Some(tunnel)) = (device, desired.tunnel) else {
        return BTreeSet::new();
    };
    let network = tunnel.host_network.and_then(|network| desired.networks.get(&network));
    let blocks = network.into_iter().flat_map(|network| &network.blocks);
    let through = blocks.filter(|(_, way)| way.overlay);
    let routes = through.filter_map(|(block, _)| {
        let source = match block.addr() {
            IpAddr::V4(_) => IpAddr::V4(tunnel.ipv4?),
            IpAddr::V6(_) => IpAddr::V6(tunnel.ipv6?),
        };
        Some(RemoteRoute {
            destination: *block,
            ifindex,
            gateway: None,
            source,
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
        let path = Path {
            mtu: 1450,
            stamp: 1,
            ifindex: 9,
        };
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
            ways: [(tunnel, path), (direct, path)].into(),
            networks: [
                (1.try_into().unwrap(), network([tunnel, tunnel])),
                (2.try_into().unwrap(), network([direct, tunnel])),
            ]
            .into(),
        }
    }

    #[test]
    fn the_stack_has_routes_to_pods_of_the_network_with_host_access_only() {
        let routes = host_routes(&desired(), Some(7));
        let shown: Vec<(String, String, u32)> = routes
            .iter()
            .map(|route| (route.destination.to_string(), route.source.to_string(), route.ifindex))
            .collect();
        // The node has no IPv6 address to send from.
        assert_eq!(shown, [("10.0.1.0/26".to_owned(), "192.0.2.1".to_owned(), 7)]);
        assert!(host_routes(&desired(), None).is_empty());
    }

    #[test]
    fn ways_through_the_tunnel_need_its_device() {
        let desired = desired();
        let with = rows(&desired, Some(7));
        let interfaces: Vec<(bool, u32)> = with.ways.iter().map(|(way, hop)| (way.overlay, hop.ifindex)).collect();
        assert_eq!(interfaces, [(false, 9), (true, 7)]);
        assert_eq!(rows(&desired, None).ways.len(), 1);
    }
}
