//! Creates the pods as the agent does: namespaces, interfaces, rows.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use kni_common::IFINDEX_BASE;
use kni_dataplane::{Dataplane, EndpointConfig};
use kni_integration::{Namespaces, frames::Mac, programs, traffic::Servers};
use kni_model::{EndpointId, IfName, MacAddr, NetworkId};
use kni_netlink as netlink;
use kni_netlink::{Netlink, PodInterfaceConfig, VethSpec, netns};

/// Two isolated networks, and one with access to the node's stack; all with the same subnets.
pub(crate) const NETWORKS: [(u32, &str); 3] = [(1, "blue"), (2, "red"), (3, "default")];
/// The network whose pods have the fast path.
pub(crate) const XDP: u32 = 2;
/// The port of the server of every pod.
pub(crate) const PORT: u16 = 8080;
/// The node's own addresses.
const NODE: [&str; 2] = ["198.51.100.2/32", "2001:db8:100::2/128"];

/// A pod. Its number is that of its endpoint; `host` is the last part of both addresses.
pub(crate) struct Pod {
    pub(crate) id: u32,
    pub(crate) network: u32,
    pub(crate) host: u8,
    pub(crate) name: String,
    pub(crate) inside: Namespaces,
    pub(crate) servers: Servers,
}

/// All pods.
pub(crate) struct Pods {
    pub(crate) node: Namespaces,
    pub(crate) all: Vec<Pod>,
    made: Vec<PathBuf>,
}

pub(crate) fn v4(host: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 10, 0, host)
}

pub(crate) fn v6(host: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x10, 0, 0, 0, 0, 0, host.into())
}

pub(crate) fn addresses(host: u8) -> [IpAddr; 2] {
    [v4(host).into(), v6(host).into()]
}

fn last(id: u32) -> u8 {
    u8::try_from(id).expect("a small number")
}

pub(crate) fn mac(id: u32) -> Mac {
    [2, 0, 0, 0, 0, last(id)]
}

pub(crate) fn host_mac(id: u32) -> Mac {
    [2, 0, 0, 0, 1, last(id)]
}

pub(crate) fn host_ifname(id: u32) -> String {
    format!("kni{id}")
}

pub(crate) fn subnets() -> [IpNet; 2] {
    [IpNet::new_assert(v4(0).into(), 24), IpNet::new_assert(v6(0).into(), 64)]
}

impl Pod {
    pub(crate) fn config(&self) -> Result<EndpointConfig> {
        config(self.id, self.network, self.host)
    }
}

fn config(id: u32, network: u32, host: u8) -> Result<EndpointConfig> {
    Ok(EndpointConfig {
        endpoint: EndpointId(id),
        network: NetworkId::try_from(network)?,
        ipv4: Some(v4(host)),
        ipv6: Some(v6(host)),
        mac: MacAddr(mac(id)),
        host_mac: MacAddr(host_mac(id)),
        host_access: network == 3,
        xdp: network == XDP,
        plugin: None,
        shaped: false,
    })
}

/// Attaches an interface of a network with `spec.xdp`, as the agent does.
async fn attach_xdp(dataplane: &Dataplane, netns: &netlink::Netns, id: u32) -> Result<()> {
    netlink::prepare_xdp_pod_interface(netns, &"eth0".parse()?).await?;
    Ok(dataplane.attach_xdp(&host_ifname(id), IFINDEX_BASE + id, EndpointId(id))?)
}

impl Pods {
    pub(crate) fn new(node: Namespaces) -> Self {
        Self {
            node,
            all: Vec::new(),
            made: Vec::new(),
        }
    }

    /// Two pods in each network with the same addresses, and one in red with a unique address.
    pub(crate) async fn start(&mut self, dataplane: &Dataplane) -> Result<()> {
        for address in NODE {
            run("ip", &["address", "add", address, "dev", "lo"])?;
        }
        let host = Netlink::new()?;
        host.ensure_rules(&subnets()).await?;
        for (network, _) in NETWORKS {
            dataplane.set_routes(
                NetworkId::try_from(network)?,
                &programs::routes(&subnets(), network == 3),
            )?;
        }
        let places = [(1, 2), (1, 3), (2, 2), (2, 3), (2, 4), (3, 2), (3, 3)];
        for (id, (network, address)) in (1..).zip(places) {
            self.add(dataplane, &host, id, network, address)
                .await
                .with_context(|| format!("making pod {id}"))?;
        }
        Ok(())
    }

    async fn namespace(&mut self, path: &Path) -> Result<netlink::Netns> {
        netns::create(path).await?;
        self.made.push(path.to_owned());
        Ok(netns::open(path)?)
    }

    async fn add(&mut self, dataplane: &Dataplane, host: &Netlink, id: u32, network: u32, address: u8) -> Result<()> {
        let network_name = NETWORKS
            .iter()
            .find(|(known, _)| *known == network)
            .map_or("", |(_, name)| name);
        let name = format!("{network_name}-{address}");
        let path = PathBuf::from(format!("/run/kni-vmtest/{name}"));
        let netns = self.namespace(&path).await?;
        let (ifname, host_name): (IfName, IfName) = ("eth0".parse()?, host_ifname(id).parse()?);
        let spec = VethSpec {
            host_name: host_name.clone(),
            host_ifindex: Some(IFINDEX_BASE + id),
            host_mac: MacAddr(host_mac(id)),
            alias: format!("kni:{name}"),
            pod_name: ifname.clone(),
            pod_mac: MacAddr(mac(id)),
            mtu: 1500,
        };
        let indexes = host.create_veth(&spec, &netns).await?;
        netlink::prepare_pod_interface(&netns, &ifname).await?;
        netlink::prepare_host_interface(&host_name).await?;
        dataplane.attach(host_name.as_str(), EndpointId(id))?;
        host.set_up(indexes.host).await?;
        let pod = Netlink::in_namespace(&netns).await?;
        pod.configure_pod(&PodInterfaceConfig {
            ifindex: indexes.pod,
            ipv4: Some(v4(address)),
            ipv6: Some(v6(address)),
            gateway_mac: MacAddr(host_mac(id)),
            mtu: 1500,
            default_route: true,
            routes: Vec::new(),
            route_metric: 0,
        })
        .await?;
        if network == XDP {
            attach_xdp(dataplane, &netns, id).await?;
        }
        host.wait_for_carrier(indexes.host).await?;
        if network == 3 {
            for to in addresses(address) {
                host.add_pod_neighbour(indexes.host, to, MacAddr(mac(id))).await?;
                host.add_pod_route(to, indexes.host).await?;
            }
        }
        programs::publish_unrestricted(dataplane, &config(id, network, address)?)?;
        let inside = self.node.net_at(&name, &path)?;
        let servers = Servers::start(&inside, &name, PORT)?;
        self.all.push(Pod {
            id,
            network,
            host: address,
            name,
            inside,
            servers,
        });
        Ok(())
    }

    /// Adopts the attachments of an earlier process without affecting traffic.
    pub(crate) async fn adopt(&self, dataplane: &Dataplane) -> Result<()> {
        let host = Netlink::new()?;
        let ours = host.list_our_links().await?;
        ensure!(
            ours.len() == self.all.len(),
            "{} of {} links are known",
            ours.len(),
            self.all.len()
        );
        for pod in &self.all {
            dataplane.adopt(&host_ifname(pod.id), EndpointId(pod.id))?;
            dataplane.republish(&pod.config()?)?;
        }
        Ok(())
    }

    /// Removes everything again.
    pub(crate) async fn remove(&mut self) -> Result<()> {
        self.all.clear();
        let host = Netlink::new()?;
        host.remove_rules().await?;
        for link in host.list_our_links().await? {
            host.delete_link(link.ifindex, &link.name).await?;
        }
        for path in self.made.drain(..) {
            netns::remove(&path).await?;
        }
        for address in NODE {
            run("ip", &["address", "del", address, "dev", "lo"])?;
        }
        Ok(())
    }

    /// The pod with that name.
    pub(crate) fn named(&self, name: &str) -> Result<&Pod> {
        let found = self.all.iter().find(|pod| pod.name == name);
        found.with_context(|| format!("no pod {name}"))
    }
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let status = Command::new(program).args(arguments).status()?;
    ensure!(status.success(), "{program} {}: {status}", arguments.join(" "));
    Ok(())
}
