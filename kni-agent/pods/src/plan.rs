//! Plans the interfaces of a request. Pure.

use std::{collections::BTreeMap, net::IpAddr};

use crate::{
    error::{AttachError, ErrorKind, Subject},
    registry::KnownNetwork,
};
use kni_model::{
    AttachRequest, CniAttachment, IfName, MacAddr, Network, NetworkName, NetworkSelection, Provider,
    selection::assign_interface_names,
};

/// One planned interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedInterface {
    pub(crate) ifname: IfName,
    pub(crate) network: Network,
    /// The definition of another tool by which the pod named the network.
    pub(crate) definition: Option<String>,
    pub(crate) ips: Vec<IpAddr>,
    /// Where the pod asks for `ips`, for errors.
    pub(crate) ips_field: &'static str,
    pub(crate) mac: Option<MacAddr>,
    pub(crate) default_route: bool,
}

impl PlannedInterface {
    /// Whether a prewarmed veth pair can become the interface. A requested MAC address needs a new one.
    pub(crate) fn fits_prewarmed(&self) -> bool {
        self.network.spec.provider.is_ebpf() && self.mac.is_none()
    }
}

/// The interfaces of a request, the primary one first.
pub(crate) fn plan(
    request: &AttachRequest,
    networks: &BTreeMap<NetworkName, KnownNetwork>,
) -> Result<Vec<PlannedInterface>, AttachError> {
    let names = assign_interface_names(&request.networks)
        .map_err(|invalid| Subject::from(request).error(ErrorKind::InvalidSelection(Box::new(invalid))))?;
    let extra_takes_default = request.networks.iter().any(|selection| selection.default_route);
    let mut planned = Vec::new();
    if !request.primary.none {
        planned.push(PlannedInterface {
            ifname: request.ifname.clone().unwrap_or_else(IfName::primary),
            network: primary_network(request, networks)?,
            definition: request
                .primary
                .selection
                .as_ref()
                .and_then(|named| named.definition.clone()),
            ips: request.primary.ips.clone(),
            ips_field: primary_ips_field(request),
            mac: request.primary.mac,
            default_route: wants_default_route(request) && !extra_takes_default,
        });
    }
    let mut default_taken = false;
    for (selection, ifname) in request.networks.iter().zip(names) {
        let NetworkSelection {
            network,
            namespace: _,
            definition,
            ifname: _,
            ips,
            mac,
            default_route,
        } = selection;
        if *default_route && default_taken {
            let reason = "more than one network asks for the default route";
            return Err(Subject::from(request).invalid("default-route", reason));
        }
        default_taken |= *default_route;
        let network = usable(request, networks, network)?;
        if *default_route {
            refuse_no_gateway(request, &network)?;
        }
        planned.push(PlannedInterface {
            ifname,
            network,
            definition: definition.clone(),
            ips: ips.clone(),
            ips_field: "ips in k8s.v1.cni.cncf.io/networks",
            mac: *mac,
            default_route: *default_route,
        });
    }
    Ok(planned)
}

/// Where the addresses of the first interface come from.
fn primary_ips_field(request: &AttachRequest) -> &'static str {
    let primary = &request.primary;
    let selected = primary.selection.as_ref().map(|selection| &selection.ips);
    if request.parent.is_some() {
        "spec.addresses of the PodNetworkAttachment"
    } else if selected == Some(&primary.ips) {
        "ips in v1.multus-cni.io/default-network"
    } else if request.cni.is_some() {
        "kni.dev/ips, or ips of the runtime"
    } else {
        "kni.dev/ips"
    }
}

/// An interface that a CNI plugin adds beside the pod's primary one does not take over the default routes.
fn wants_default_route(request: &AttachRequest) -> bool {
    let additional = request.cni.as_ref().is_some_and(CniAttachment::is_additional);
    request.primary.default_route.unwrap_or(!additional)
}

/// A requested default route needs a gateway.
fn refuse_no_gateway(request: &AttachRequest, network: &Network) -> Result<(), AttachError> {
    let provider = &network.spec.provider;
    let leads_nowhere = match provider {
        Provider::Ebpf | Provider::Cni(_) => false,
        Provider::Macvlan(_) | Provider::HostDevice(_) | Provider::Tap(_) => provider.gateways().is_empty(),
    };
    if !leads_nowhere {
        return Ok(());
    }
    let reason = format!("network {} has no gateway (spec.provider.gateways)", network.spec.name);
    Err(Subject::from(request).invalid("default-route", reason))
}

fn primary_network(
    request: &AttachRequest,
    networks: &BTreeMap<NetworkName, KnownNetwork>,
) -> Result<Network, AttachError> {
    if let Some(name) = &request.primary.network {
        return usable(request, networks, name);
    }
    let default = networks
        .values()
        .find(|known| known.network.spec.default && !known.orphaned);
    let name = &default
        .ok_or_else(|| Subject::from(request).error(ErrorKind::NoDefaultNetwork))?
        .network
        .spec
        .name;
    usable(request, networks, name)
}

fn usable(
    request: &AttachRequest,
    networks: &BTreeMap<NetworkName, KnownNetwork>,
    name: &NetworkName,
) -> Result<Network, AttachError> {
    let refused = |kind: fn(NetworkName) -> ErrorKind| Subject::from(request).error(kind(name.clone()));
    let known = networks.get(name).filter(|known| !known.orphaned);
    let known = known.ok_or_else(|| refused(ErrorKind::UnknownNetwork))?;
    if known.network.spec.enabled {
        Ok(known.network.clone())
    } else {
        Err(refused(ErrorKind::NetworkDisabled))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use kni_model::{
        Attachment, Bandwidth, EndpointId, InterfaceKind, MacAddr, NetworkId, NetworkSpec, PodRef,
        request::PrimarySelection,
    };

    /// Interface net1 of a pod in network blue, with an address of each family.
    pub(crate) fn attachment(kind: InterfaceKind) -> Attachment {
        Attachment {
            endpoint: EndpointId(1),
            network: "blue".parse().unwrap(),
            definition: None,
            network_id: NetworkId::try_from(2).unwrap(),
            ifname: "net1".parse().unwrap(),
            ifindex: 3,
            host_ifname: "kni1".parse().unwrap(),
            host_ifindex: 4,
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            host_mac: MacAddr([2, 0, 0, 0, 0, 2]),
            ipv4: Some([10, 9, 0, 5].into()),
            ipv6: Some("fd09::5".parse().unwrap()),
            mtu: 1500,
            default_route: false,
            host_access: false,
            routes: vec!["10.9.0.0/16".parse().unwrap()],
            xdp: false,
            kind,
            bandwidth: Bandwidth::default(),
        }
    }

    pub(crate) fn known(name: &str, id: u32, default: bool, enabled: bool) -> (NetworkName, KnownNetwork) {
        let name: NetworkName = name.parse().unwrap();
        let spec = NetworkSpec {
            name: name.clone(),
            default,
            enabled,
            subnets: vec!["10.0.0.0/24".parse().unwrap()],
            exclude_subnets: Vec::new(),
            mtu: 1500,
            egress: kni_model::network::EgressMode::implied(default),
            egress_addresses: Vec::new(),
            service_subnets: Vec::new(),
            xdp: false,
            provider: kni_model::Provider::Ebpf,
            blocks: None,
            access: kni_model::Access::default(),
            number: None,
            fabric: kni_model::Fabric::None,
        };
        let network = Network {
            id: id.try_into().unwrap(),
            spec,
        };
        (
            name,
            KnownNetwork {
                network,
                origin: String::new(),
                orphaned: false,
                rank: 0,
                number_problem: None,
            },
        )
    }

    fn networks() -> BTreeMap<NetworkName, KnownNetwork> {
        [
            known("main", 1, true, true),
            known("blue", 2, false, true),
            known("off", 3, false, false),
        ]
        .into()
    }

    pub(crate) fn request(primary: Option<&str>, extra: &[(&str, bool)]) -> AttachRequest {
        AttachRequest {
            sandbox: "s".parse().unwrap(),
            pod: PodRef::default(),
            netns: "/run/netns/x".into(),
            labels: BTreeMap::new(),
            annotated_labels: BTreeMap::new(),
            primary: PrimarySelection {
                network: primary.map(|n| n.parse().unwrap()),
                ..Default::default()
            },
            networks: extra
                .iter()
                .map(|(name, default_route)| NetworkSelection {
                    network: name.parse().unwrap(),
                    namespace: None,
                    definition: None,
                    ifname: None,
                    ips: Vec::new(),
                    mac: None,
                    default_route: *default_route,
                })
                .collect(),
            port_mappings: Vec::new(),
            container_ports: Vec::new(),
            ifname: None,
            cni: None,
            bandwidth: kni_model::Bandwidth::default(),
            hints: kni_model::PluginHints::default(),
            parent: None,
        }
    }

    fn shape(request: &AttachRequest) -> Vec<(String, u32, bool)> {
        let planned = plan(request, &networks()).unwrap();
        planned
            .into_iter()
            .map(|p| (p.ifname.to_string(), p.network.id.get(), p.default_route))
            .collect()
    }

    #[test]
    fn the_default_network_is_eth0_unless_another_is_asked_for() {
        assert_eq!(shape(&request(None, &[])), [("eth0".to_owned(), 1, true)]);
        assert_eq!(shape(&request(Some("blue"), &[])), [("eth0".to_owned(), 2, true)]);
    }

    #[test]
    fn one_interface_has_the_default_route() {
        let planned = shape(&request(None, &[("blue", true), ("blue", false)]));
        assert_eq!(
            planned,
            [
                ("eth0".to_owned(), 1, false),
                ("net1".to_owned(), 2, true),
                ("net2".to_owned(), 2, false)
            ]
        );
        let twice = plan(&request(None, &[("blue", true), ("blue", true)]), &networks());
        assert!(matches!(twice.unwrap_err().kind(), ErrorKind::InvalidField { .. }));
    }

    #[test]
    fn missing_and_disabled_networks_are_named() {
        let missing = plan(&request(Some("nope"), &[]), &networks()).unwrap_err();
        assert!(matches!(missing.kind(), ErrorKind::UnknownNetwork(network) if network.as_str() == "nope"));
        let off = plan(&request(None, &[("off", false)]), &networks()).unwrap_err();
        assert!(matches!(off.kind(), ErrorKind::NetworkDisabled(network) if network.as_str() == "off"));
        let mut none = networks();
        none.remove(&"main".parse().unwrap());
        let none = plan(&request(None, &[]), &none).unwrap_err();
        assert!(matches!(none.kind(), ErrorKind::NoDefaultNetwork));
    }

    #[test]
    fn each_interface_knows_where_its_addresses_are_asked_for() {
        let address = vec![IpAddr::from([10, 0, 0, 9])];
        let fields = |request: &AttachRequest| -> Vec<&str> {
            let planned = plan(request, &networks()).unwrap();
            planned.iter().map(|interface| interface.ips_field).collect()
        };
        let mut asking = request(Some("blue"), &[("main", false)]);
        asking.primary.ips.clone_from(&address);
        assert_eq!(fields(&asking), ["kni.dev/ips", "ips in k8s.v1.cni.cncf.io/networks"]);
        let mut selection = asking.networks.remove(0);
        selection.ips = address;
        asking.primary.selection = Some(selection);
        assert_eq!(fields(&asking), ["ips in v1.multus-cni.io/default-network"]);
        asking.parent = Some("p".parse().unwrap());
        assert_eq!(fields(&asking), ["spec.addresses of the PodNetworkAttachment"]);
    }
}
