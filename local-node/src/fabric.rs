//! Connects several nodes in a namespace of its own, which is also their default gateway: by a bridge, or by routing
//! between a subnet for each node.

use anyhow::Result;

use crate::namespaces::Namespaces;

/// The address of the bridge: the default gateway of nodes on one link.
pub const FABRIC_V4: &str = "198.51.100.1";
/// See [`FABRIC_V4`].
pub const FABRIC_V6: &str = "2001:db8:100::1";

/// The name of the bridge.
const BRIDGE: &str = "fabric0";

/// How nodes are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// All nodes are neighbours on one link.
    Bridge,
    /// Each node has a link and a subnet per family of its own; no node is a neighbour of another.
    Router,
}

/// A network that nodes share. It disappears with the value and its clones in nodes.
#[derive(Debug, Clone)]
pub struct Fabric {
    inside: Namespaces,
    layout: Layout,
}

/// What a node configures on its link to the fabric.
#[derive(Debug)]
pub(crate) struct Uplink {
    /// Its addresses, IPv4 first.
    pub(crate) addresses: [String; 2],
    /// The fabric's addresses on the same link, IPv4 first: the default gateways.
    pub(crate) gateways: [String; 2],
}

impl Fabric {
    /// Makes a fabric without nodes, which will be neighbours on one link. `name` appears in messages only.
    pub fn new(name: &str) -> Result<Self> {
        let inside = Namespaces::fresh_net(&format!("{name}-fabric"))?;
        inside.ip(&[
            &format!("link add {BRIDGE} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"),
            &format!("link set {BRIDGE} up"),
        ])?;
        inside.add_address(BRIDGE, &format!("{FABRIC_V4}/24"))?;
        inside.add_address(BRIDGE, &format!("{FABRIC_V6}/64"))?;
        Ok(Self {
            inside,
            layout: Layout::Bridge,
        })
    }

    /// Makes a fabric without nodes, each of which will have subnets of its own, `198.18.<number>.0/24` and
    /// `2001:db8:18:<number>::/64`, with a router between them. The router knows these subnets and no others, so that
    /// it drops packets with addresses of pods. `name` appears in messages only.
    pub fn routed(name: &str) -> Result<Self> {
        let inside = Namespaces::fresh_net(&format!("{name}-router"))?;
        inside.set_forwarding(true)?;
        Ok(Self {
            inside,
            layout: Layout::Router,
        })
    }

    /// The addresses of the node with a number, IPv4 first. Both contain the same digits.
    pub fn addresses(&self, number: u8) -> [String; 2] {
        match self.layout {
            Layout::Bridge => [format!("198.51.100.{number}"), format!("2001:db8:100::{number}")],
            Layout::Router => [format!("198.18.{number}.2"), format!("2001:db8:18:{number}::2")],
        }
    }

    /// The fabric's namespace: an external host at the gateways of its nodes.
    pub fn inside(&self) -> &Namespaces {
        &self.inside
    }

    /// Enables forwarding between links, as on a router.
    pub fn forward(&self) -> Result<()> {
        self.inside.set_forwarding(true)
    }

    /// Creates `link` inside a node and connects it to a separate port of the fabric.
    pub(crate) fn plug(&self, node: &Namespaces, link: &str, number: u8) -> Result<Uplink> {
        let port = format!("port{number}");
        node.veth(link, &self.inside, &port)?;
        let gateways = match self.layout {
            Layout::Bridge => {
                self.inside.ip(&[&format!("link set {port} master {BRIDGE}")])?;
                [FABRIC_V4.to_owned(), FABRIC_V6.to_owned()]
            }
            Layout::Router => {
                let own = [format!("198.18.{number}.1"), format!("2001:db8:18:{number}::1")];
                for (address, length) in own.iter().zip([24, 64]) {
                    self.inside.add_address(&port, &format!("{address}/{length}"))?;
                }
                own
            }
        };
        Ok(Uplink {
            addresses: self.addresses(number),
            gateways,
        })
    }
}
