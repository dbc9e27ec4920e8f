//! Tests address translation by other programs on the node (kube-proxy, port mappings) for pods of the default network
//! as clients and as backends.

mod answers;
mod reuse;
mod ruleset;
mod survival;

use std::net::{IpAddr, SocketAddr};

use anyhow::Result;
use kni_integration::{
    Manifest, Node, Pod, Stage,
    node::{NODE_V4, NODE_V6},
    stage::{address, forwarding},
    traffic::Servers,
};

/// The port of the backend's server.
pub(crate) const PORT: u16 = 8080;
/// A port of the backend without a server.
pub(crate) const CLOSED: u16 = 9;
/// A port with servers of individual tests.
pub(crate) const ECHO: u16 = 9090;
/// Ports of the virtual address that are translated to the three above.
pub(crate) const VIP_PORT: u16 = 80;
pub(crate) const VIP_CLOSED: u16 = 81;
pub(crate) const VIP_ECHO: u16 = 82;
/// A port of the node that is translated to [`PORT`], masqueraded as kube-proxy does for node ports.
pub(crate) const NODE_PORT: u16 = 30_080;
/// The same without masquerading, as a host port.
pub(crate) const HOST_PORT: u16 = 8080;

/// Both families, IPv4 first.
pub(crate) const FAMILIES: [bool; 2] = [true, false];

/// A node with kube-proxy's rules, a backend server and a client, both in the default network.
pub(crate) struct Scene {
    pub(crate) server: Servers,
    pub(crate) backend: Pod,
    pub(crate) client: Pod,
    pub(crate) stage: Stage,
}

impl Scene {
    pub(crate) async fn set(name: &str) -> Result<Self> {
        let node = Node::new(name)?;
        forwarding(&node)?;
        let stage = Stage::on(node, Manifest::overlapping()).await?;
        let (backend, client) = (stage.pod("backend").await?, stage.pod("client").await?);
        let server = Servers::start(&backend.inside, "backend", PORT)?;
        for v4 in FAMILIES {
            stage.node.nft(&ruleset::ruleset(address(&backend, v4)))?;
        }
        Ok(Self {
            server,
            backend,
            client,
            stage,
        })
    }
}

/// The virtual address.
pub(crate) fn vip(v4: bool) -> IpAddr {
    if v4 {
        IpAddr::from([10, 96, 0, 10])
    } else {
        IpAddr::from([0xfd96, 0, 0, 0, 0, 0, 0, 0x10])
    }
}

/// The virtual address with a port.
pub(crate) fn vip_at(v4: bool, port: u16) -> SocketAddr {
    SocketAddr::new(vip(v4), port)
}

/// The node's address.
pub(crate) fn node(v4: bool) -> IpAddr {
    let text = if v4 { NODE_V4 } else { NODE_V6 };
    text.parse().expect("an address")
}
