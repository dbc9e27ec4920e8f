//! Rebuilds records of sandboxes and namespaces from links, their aliases, rows of the dataplane and the pods' own
//! interfaces.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
};

use kni_dataplane::EndpointConfig;
use kni_model::{
    Attachment, Bandwidth, EndpointId, IfName, InterfaceKind, NetworkId, NetworkName, Phase, PodRef, Sandbox,
    SandboxId, error_chain,
};
use kni_netlink::{Netlink, Netns, OurLink, PodInterface, PodRoute, own};
use kni_store::{Contents, NamespaceRecord, NamespaceUse, Quarantined, WarmInterface};

use super::{endpoint_of, namespaces};
use crate::{
    alias::{Owner, parent_of},
    error::{AttachError, Subject},
    kernel::Kernel,
    namespaces::{RECOVERED_PREFIX, is_own_path, now},
};

/// Rebuilt records.
#[derive(Debug, Default)]
pub(super) struct Rebuilt {
    pub(super) sandboxes: Vec<Sandbox>,
    pub(super) namespaces: Vec<NamespaceRecord>,
}

/// The sources besides the links.
pub(super) struct Rebuild<'a> {
    kernel: &'a Kernel,
    namespaces: BTreeMap<i32, Netns>,
    recorded: &'a [Sandbox],
    recorded_namespaces: BTreeSet<&'a Path>,
    quarantined: &'a [Quarantined],
    networks: BTreeMap<NetworkName, NetworkId>,
    /// Addresses with a route from the node.
    routed: BTreeSet<IpAddr>,
}

/// An attachment with the owner and the namespace that it was found with.
struct Found {
    owner: Owner,
    netns: Netns,
    attachment: Attachment,
}

impl<'a> Rebuild<'a> {
    pub(super) async fn new(kernel: &'a Kernel, netns_dir: &Path, contents: &'a Contents) -> Result<Self, AttachError> {
        let routes = kernel.netlink.list_our_routes().await;
        let routes = routes.map_err(Subject::node().failed("listing routes"))?;
        let networks = contents.networks.iter();
        let mut networks: BTreeMap<NetworkName, NetworkId> = networks
            .map(|network| (network.spec.name.clone(), network.id))
            .collect();
        let attached = contents.sandboxes.iter().flat_map(|sandbox| &sandbox.attachments);
        networks.extend(attached.map(|attachment| (attachment.network.clone(), attachment.network_id)));
        Ok(Self {
            kernel,
            namespaces: namespaces::by_number(&kernel.netlink, netns_dir).await,
            recorded: &contents.sandboxes,
            recorded_namespaces: contents.namespaces.iter().map(|record| record.path.as_path()).collect(),
            quarantined: &contents.quarantined,
            networks,
            routed: routes.iter().map(|route| route.destination.addr()).collect(),
        })
    }

    /// The records of all links that still have enough of one. The others are left as they are.
    pub(super) async fn all(mut self, links: &[OurLink]) -> Rebuilt {
        let mut rebuilt = Rebuilt::default();
        let mut found = Vec::new();
        for link in links {
            let Some(endpoint) = endpoint_of(link) else { continue };
            let netns = link
                .peer_netnsid
                .and_then(|number| self.namespaces.get(&number))
                .cloned();
            let Some(netns) = netns else {
                tracing::error!(ifname = link.name, "the namespace of its other end is not found");
                continue;
            };
            let Some(inside) = self.inside(link, &netns).await else {
                continue;
            };
            match Owner::parse(&link.alias) {
                Some(owner) => found.extend(self.attachment(link, endpoint, owner, netns, &inside)),
                None => rebuilt
                    .namespaces
                    .extend(self.prewarmed(link, endpoint, &netns, &inside)),
            }
        }
        rebuilt.sandboxes = self.sandboxes(found);
        let bound = self.bound(&rebuilt.sandboxes);
        rebuilt.namespaces.extend(bound);
        rebuilt
    }

    /// The other end of a link.
    async fn inside(&self, link: &OurLink, netns: &Netns) -> Option<PodInterface> {
        let inside = Netlink::in_namespace(netns).await;
        let interfaces = match inside {
            Ok(inside) => inside.pod_interfaces().await,
            Err(error) => Err(error),
        };
        match interfaces {
            Ok(interfaces) => interfaces
                .into_iter()
                .find(|interface| Some(interface.link.ifindex) == link.peer_ifindex),
            Err(error) => {
                tracing::error!(
                    ifname = link.name,
                    error = error_chain(&error),
                    "cannot read its other end"
                );
                None
            }
        }
    }

    fn attachment(
        &mut self,
        link: &OurLink,
        endpoint: EndpointId,
        owner: Owner,
        netns: Netns,
        inside: &PodInterface,
    ) -> Option<Found> {
        let row = self.kernel.dataplane.published(endpoint).ok().flatten();
        let config = row.or_else(|| self.config_from_inside(link, endpoint, &owner, inside))?;
        self.networks.insert(owner.network.clone(), config.network);
        let gateways = [IpAddr::V4(own::GATEWAY_V4), IpAddr::V6(own::GATEWAY_V6)];
        let routes = inside.routes.iter();
        let ours = routes.filter(|route| route.gateway.is_some_and(|gateway| gateways.contains(&gateway)));
        let (default, others): (Vec<&PodRoute>, Vec<&PodRoute>) =
            ours.partition(|route| route.destination.prefix_len() == 0);
        let attachment = Attachment {
            endpoint,
            network: owner.network.clone(),
            definition: None,
            network_id: config.network,
            ifname: owner.ifname.clone(),
            ifindex: inside.link.ifindex,
            host_ifname: link.name.parse().ok()?,
            host_ifindex: link.ifindex,
            mac: config.mac,
            host_mac: config.host_mac,
            ipv4: config.ipv4,
            ipv6: config.ipv6,
            mtu: link.mtu,
            default_route: !default.is_empty(),
            host_access: config.host_access,
            routes: others.iter().map(|route| route.destination).collect(),
            xdp: config.xdp,
            kind: InterfaceKind::Veth,
            bandwidth: Bandwidth::default(),
        };
        Some(Found {
            owner,
            netns,
            attachment,
        })
    }

    /// For an endpoint without a row: the maps were lost as well. One without addresses never had traffic.
    fn config_from_inside(
        &self,
        link: &OurLink,
        endpoint: EndpointId,
        owner: &Owner,
        inside: &PodInterface,
    ) -> Option<EndpointConfig> {
        let addresses = || inside.addresses.iter().map(ipnet::IpNet::addr);
        let ipv4 = addresses().find_map(|address| match address {
            IpAddr::V4(v4) => Some(v4),
            IpAddr::V6(_) => None,
        });
        let ipv6 = addresses().find_map(|address| match address {
            IpAddr::V6(v6) if !v6.is_unicast_link_local() => Some(v6),
            IpAddr::V4(_) | IpAddr::V6(_) => None,
        });
        if ipv4.is_none() && ipv6.is_none() {
            return None;
        }
        let unused = || {
            let highest = self.networks.values().map(|id| id.get()).max().unwrap_or(0);
            NetworkId::try_from(highest + 1).ok()
        };
        let addresses = [ipv4.map(IpAddr::V4), ipv6.map(IpAddr::V6)];
        Some(EndpointConfig {
            endpoint,
            network: self.networks.get(&owner.network).copied().or_else(unused)?,
            ipv4,
            ipv6,
            mac: inside.link.mac?,
            host_mac: link.mac?,
            host_access: addresses.iter().flatten().any(|address| self.routed.contains(address)),
            xdp: false,
            plugin: None,
            shaped: false,
        })
    }

    /// A prewarmed interface: whether a client has its namespace already is unknown, so no other client gets it.
    fn prewarmed(
        &self,
        link: &OurLink,
        endpoint: EndpointId,
        netns: &Netns,
        inside: &PodInterface,
    ) -> Option<NamespaceRecord> {
        let path = netns.path();
        if !is_own_path(path) || self.recorded_namespaces.contains(path) {
            return None;
        }
        Some(NamespaceRecord {
            path: path.to_owned(),
            identity: Some(netns.id()),
            used_by: NamespaceUse::Given {
                pod: PodRef::default(),
                since: now(),
            },
            warm: Some(WarmInterface {
                endpoint,
                ifname: inside.link.name.parse::<IfName>().ok()?,
                ifindex: inside.link.ifindex,
                host_ifname: link.name.parse().ok()?,
                host_ifindex: link.ifindex,
                mac: inside.link.mac?,
                host_mac: link.mac?,
            }),
        })
    }

    /// Groups attachments by sandbox; those of an unknown one by namespace.
    fn sandboxes(&self, found: Vec<Found>) -> Vec<Sandbox> {
        let mut sandboxes: BTreeMap<SandboxId, Sandbox> = BTreeMap::new();
        for one in found {
            let held = self
                .quarantined
                .iter()
                .find(|held| held.id.table == "sandboxes" && held.endpoints.contains(&one.attachment.endpoint));
            let named = held
                .and_then(|held| held.id.key.parse().ok())
                .or(one.owner.sandbox.clone());
            let unnamed = || format!("{RECOVERED_PREFIX}{}", one.netns.id().inode).parse().ok();
            let Some(id) = named.or_else(unnamed) else { continue };
            if self.recorded.iter().any(|sandbox| sandbox.id == id) {
                tracing::error!(sandbox = %id, ifname = %one.attachment.host_ifname, "its record lacks an interface");
                continue;
            }
            let parts = held.map(|held| held.parts.clone()).unwrap_or_default();
            let sandbox = sandboxes.entry(id.clone()).or_insert_with(|| Sandbox {
                pod: parts.pod.unwrap_or_else(|| one.owner.pod.clone()),
                phase: Phase::Ready,
                netns: parts.netns.unwrap_or_else(|| one.netns.path().to_owned()),
                netns_identity: one.netns.id(),
                labels: parts.labels.unwrap_or_default(),
                port_mappings: parts.port_mappings.unwrap_or_default(),
                container_ports: parts.container_ports.unwrap_or_default(),
                attachments: Vec::new(),
                cni: parts.cni.or_else(|| one.owner.cni(&id)),
                parent: parts.parent,
                id,
            });
            sandbox.attachments.push(one.attachment);
        }
        let mut sandboxes: Vec<Sandbox> = sandboxes.into_values().collect();
        let all: Vec<Sandbox> = self.recorded.iter().chain(&sandboxes).cloned().collect();
        for sandbox in &mut sandboxes {
            let primary = IfName::primary();
            sandbox
                .attachments
                .sort_by_key(|attachment| (attachment.ifname != primary, attachment.ifname.to_string()));
            if sandbox.parent.is_none() {
                sandbox.parent = parent_of(&sandbox.id, &all);
            }
        }
        sandboxes
    }

    /// The records of the agent's own namespaces that the sandboxes are in.
    fn bound(&self, sandboxes: &[Sandbox]) -> Vec<NamespaceRecord> {
        let own = sandboxes.iter().filter(|sandbox| {
            let path = sandbox.netns.as_path();
            sandbox.parent.is_none() && is_own_path(path) && !self.recorded_namespaces.contains(path)
        });
        own.map(|sandbox| NamespaceRecord {
            path: sandbox.netns.clone(),
            identity: Some(sandbox.netns_identity),
            used_by: NamespaceUse::Bound {
                sandbox: sandbox.id.clone(),
            },
            warm: None,
        })
        .collect()
    }
}
