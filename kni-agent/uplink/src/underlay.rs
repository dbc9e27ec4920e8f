//! Reads the addresses of the node at which other nodes may reach it.

use std::{collections::BTreeMap, net::IpAddr};

use kni_netlink::{Link, LinkAddress};
use tokio::sync::watch;

use super::{Uplink, UplinkError, lock, node};

/// An address of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnderlayAddress {
    /// The address.
    pub address: IpAddr,
    /// The interface that has it. For an address of the loopback interface the uplink, through which its packets pass.
    pub ifname: String,
    /// MTU of that interface, in bytes of IP packet.
    pub mtu: u32,
}

impl Uplink {
    /// The addresses of the node's interfaces that are up, in the order of the kernel. Not those of pods, not those
    /// added for pods, and none that is not confirmed to be unique yet. Reads them anew.
    pub async fn underlay_addresses(&self) -> Result<Vec<UnderlayAddress>, UplinkError> {
        let addresses = node::read_addresses(&self.netlink).await?;
        let links = self.netlink.list_links().await?;
        let uplink = lock(&self.shown).uplink.as_ref().map(|uplink| uplink.ifindex);
        Ok(underlay_addresses(&addresses, &links, uplink))
    }

    /// Notifies of changes of the node's interfaces and addresses from now on.
    pub fn network_changes(&self) -> watch::Receiver<()> {
        self.network_changes.subscribe()
    }
}

fn underlay_addresses(addresses: &[LinkAddress], links: &[Link], uplink: Option<u32>) -> Vec<UnderlayAddress> {
    let up = links.iter().filter(|link| link.up);
    let links: BTreeMap<u32, &Link> = up.map(|link| (link.ifindex, link)).collect();
    let usable = addresses.iter().filter(|found| found.usable && !found.ours);
    usable
        .filter_map(|found| {
            let link = links.get(&found.ifindex)?;
            let carrier = if link.name == "lo" { links.get(&uplink?)? } else { link };
            Some(UnderlayAddress {
                address: found.address,
                ifname: carrier.name.clone(),
                mtu: carrier.mtu,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(ifindex: u32, text: &str) -> LinkAddress {
        LinkAddress {
            ifindex,
            address: text.parse().unwrap(),
            prefix_len: 24,
            usable: true,
            deprecated: false,
            ours: false,
        }
    }

    fn link(ifindex: u32, name: &str, mtu: u32) -> Link {
        Link {
            ifindex,
            name: name.to_owned(),
            mtu,
            up: true,
            ..Link::default()
        }
    }

    #[test]
    fn an_address_has_the_mtu_of_the_interface_that_carries_its_packets() {
        let mut links = [link(1, "lo", 65536), link(2, "eth0", 1400), link(3, "eth1", 9000)];
        let mut addresses = [
            address(1, "192.0.2.1"),
            address(2, "192.0.2.2"),
            address(3, "192.0.2.3"),
            address(4, "192.0.2.4"),
        ];
        let read = |addresses: &[LinkAddress], links: &[Link], uplink| -> Vec<(String, u32)> {
            let read = underlay_addresses(addresses, links, uplink).into_iter();
            read.map(|found| (found.address.to_string(), found.mtu)).collect()
        };
        let is = |all: &[(&str, u32)]| -> Vec<(String, u32)> {
            all.iter().map(|(text, mtu)| ((*text).to_owned(), *mtu)).collect()
        };
        let expected = is(&[("192.0.2.1", 1400), ("192.0.2.2", 1400), ("192.0.2.3", 9000)]);
        assert_eq!(read(&addresses, &links, Some(2)), expected);
        assert_eq!(
            read(&addresses, &links, None),
            expected[1..],
            "nothing carries that of lo"
        );
        addresses[0].usable = false;
        addresses[1].ours = true;
        links[2].up = false;
        assert_eq!(read(&addresses, &links, Some(2)), is(&[]));
    }
}
