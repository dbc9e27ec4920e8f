//! Connects several nodes by a bridge in its own namespace, which is also their default gateway.

use std::fs;

use anyhow::{Context as _, Result};

use crate::namespaces::Namespaces;

/// The address of the fabric's end of an uplink: the default gateway of nodes.
pub const FABRIC_V4: &str = "198.51.100.1";
/// See [`FABRIC_V4`].
pub const FABRIC_V6: &str = "2001:db8:100::1";

/// The name of the bridge.
const BRIDGE: &str = "fabric0";

/// A link that nodes share. It disappears with the value and its clones in nodes.
#[derive(Debug, Clone)]
pub struct Fabric {
    inside: Namespaces,
}

impl Fabric {
    /// Makes a fabric without nodes. `name` appears in messages only.
    pub fn new(name: &str) -> Result<Self> {
        let inside = Namespaces::fresh_net(&format!("{name}-fabric"))?;
        inside.ip(&[
            &format!("link add {BRIDGE} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"),
            &format!("link set {BRIDGE} up"),
        ])?;
        inside.add_address(BRIDGE, &format!("{FABRIC_V4}/24"))?;
        inside.add_address(BRIDGE, &format!("{FABRIC_V6}/64"))?;
        Ok(Self { inside })
    }

    /// The addresses of the node with a number, IPv4 first. Both contain the same digits.
    pub fn addresses(number: u8) -> [String; 2] {
        [format!("198.51.100.{number}"), format!("2001:db8:100::{number}")]
    }

    /// The fabric's namespace: an external host at [`FABRIC_V4`] and [`FABRIC_V6`].
    pub fn inside(&self) -> &Namespaces {
        &self.inside
    }

    /// Enables forwarding beyond the link, as on a router.
    pub fn forward(&self) -> Result<()> {
        for name in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            let file = format!("/proc/sys/net/{name}");
            self.inside
                .enter(|| fs::write(&file, "1"))?
                .with_context(|| format!("write {file}"))?;
        }
        Ok(())
    }

    /// Creates `link` inside a node and connects it to a separate port.
    pub(crate) fn plug(&self, node: &Namespaces, link: &str, number: u8) -> Result<()> {
        let port = format!("port{number}");
        node.veth(link, &self.inside, &port)?;
        self.inside.ip(&[&format!("link set {port} master {BRIDGE}")])
    }
}
