//! Defines `PodNetwork`: an isolated address space that pods join.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Condition, PodNetworkSummary,
    access::Access,
    provider::ProviderSpec,
    rules,
    schema::{self, Cidr, HostAddress, Selector, Subnet},
};

/// Default MTU, in bytes of IP packet.
pub const DEFAULT_MTU: u32 = 1500;

/// The desired network. Every field takes effect; unknown fields are refused.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a switch of its own for who writes the object"
)]
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kni.dev",
    version = "v1alpha1",
    kind = "PodNetwork",
    plural = "podnetworks",
    singular = "podnetwork",
    shortname = "pnw",
    category = "kni",
    status = "PodNetworkStatus",
    validation = rules::pod_network::name(),
    printcolumn(name = "Subnets", type_ = "string", json_path = r#".status.summary.subnets"#, description = "Ranges that pods get their addresses from."),
    printcolumn(name = "Ready", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].status"#, description = "Whether pods can join."),
    printcolumn(name = "Programmed", type_ = "string", json_path = r#".status.conditions[?(@.type=="Programmed")].status"#, description = "Whether it is applied on every node."),
    printcolumn(name = "Used", type_ = "integer", json_path = r#".status.addresses.used"#, description = "Addresses that pods have."),
    printcolumn(name = "Total", type_ = "string", json_path = r#".status.summary.total"#, description = "Addresses that pods can have."),
    printcolumn(name = "Age", type_ = "date", json_path = r#".metadata.creationTimestamp"#, description = "When the object was made."),
    printcolumn(name = "Default", type_ = "boolean", json_path = r#".spec.default"#, description = "Whether it is the default network.", priority = 1),
    printcolumn(name = "Provider", type_ = "string", json_path = r#".spec.provider.type"#, description = "Who makes the interfaces; empty: Ebpf.", priority = 1),
    printcolumn(name = "Egress", type_ = "string", json_path = r#".spec.egress.mode"#, description = "How packets leave the node; empty: Route in the default network, None in others.", priority = 1),
    printcolumn(name = "Fabric", type_ = "string", json_path = r#".status.fabric"#, description = "How packets cross from node to node.", priority = 1),
    printcolumn(name = "MTU", type_ = "integer", json_path = r#".spec.mtu"#, description = "MTU of the pod interfaces.", priority = 1),
    printcolumn(name = "Nodes", type_ = "integer", json_path = r#".status.nodes.ready"#, description = "Nodes where pods can join.", priority = 1),
    printcolumn(name = "Interfaces", type_ = "integer", json_path = r#".status.interfaces"#, description = "Interfaces of pods.", priority = 1),
    printcolumn(name = "Namespaces", type_ = "string", json_path = r#".status.summary.namespaces"#, description = "Namespaces whose pods get their primary interface here.", priority = 1),
    printcolumn(name = "Number", type_ = "integer", json_path = r#".status.number"#, description = "Number of the network in the whole cluster.", priority = 1),
    derive = "PartialEq",
    doc = "A network that pods join: an isolated address space of its own."
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = rules::pod_network::spec()), transform = schema::plain)]
pub struct PodNetworkSpec {
    /// Whether pods get their primary interface in this network. Exactly one network is the default; its pods, and no
    /// others, reach the node and are reached by it.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-validations" = rules::pod_network::constant("default")))]
    pub default: bool,
    /// Whether pods may join. A disabled network keeps the pods it has and takes no new ones.
    #[serde(default = "enabled_by_default")]
    pub enabled: bool,
    /// How the network forwards between its pods.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-validations" = rules::pod_network::constant("topology")))]
    pub topology: Topology,
    /// Address ranges in CIDR notation, IPv4 or IPv6, not overlapping each other. Pods get one address of each family
    /// that is present. Other networks may use the same ranges. Needed where the provider is Ebpf; where CNI plugins
    /// assign the addresses, the ranges are informational.
    #[serde(default)]
    #[schemars(
        with = "Vec<Subnet>",
        length(max = 16),
        extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = rules::pod_network::subnets())
    )]
    pub subnets: Vec<String>,
    /// Ranges in CIDR notation, inside the subnets, that are never handed out.
    #[serde(default)]
    #[schemars(with = "Vec<Cidr>", length(max = 256), extend("x-kubernetes-list-type" = "set"))]
    pub exclude_subnets: Vec<String>,
    /// MTU of the pod interfaces, in bytes of IP packet.
    #[serde(default = "default_mtu")]
    #[schemars(range(min = 1280, max = 65535))]
    pub mtu: u32,
    /// How packets of the pods leave the node. Absent: routed in the default network, not at all in others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
    /// Ranges in CIDR notation, outside the subnets, in which the virtual addresses of the network's Services lie. A
    /// packet to an address of them that belongs to no Service is dropped.
    #[serde(default)]
    #[schemars(
        with = "Vec<Subnet>",
        length(max = 16),
        extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = vec![rules::no_overlap()])
    )]
    pub service_subnets: Vec<String>,
    /// Whether the host ends of pod interfaces run an XDP program. For pods that process frames in XDP themselves: they
    /// exchange some 500 000 per second and CPU, and none without it. What uses sockets loses by it: UDP some 15 %, TCP
    /// transactions 10 %, a TCP stream three quarters, as the kernel gives up segmentation offload. Holds for pods
    /// attached from then on.
    #[serde(default)]
    pub xdp: bool,
    /// Who makes the pod interfaces. Absent: Ebpf.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<ProviderSpec>,
    /// Namespaces whose pods get their primary interface in this network, without an annotation. Holds for
    /// pods that start from then on. Where two networks select a namespace, the older one has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Selector>")]
    pub namespace_selector: Option<LabelSelector>,
    /// Size of the address blocks that nodes take from the subnets; a node takes additional ones as it needs them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_node_prefix: Option<PerNodePrefix>,
    /// Whether nodes offer their addresses of this network as an extended resource `kni.dev/network-NAME`, so that pods
    /// that ask for one are scheduled where there are some.
    #[serde(default)]
    pub extended_resource: bool,
    /// Who may join, and what pods that join may choose. Absent: the pods of the namespaces that `namespaceSelector`
    /// selects, in the default network those of all namespaces, and no others; they choose neither addresses nor MAC
    /// addresses nor default routes. Networks of a provider other than Ebpf hand out devices of the node and have to
    /// name their namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
    /// How pods of the network on different nodes reach each other. Absent: as in `status.fabric`, which kni-controller
    /// sets once, to Overlay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Fabric>,
}

/// Prefix lengths of the address blocks of nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PerNodePrefix {
    /// For IPv4 subnets. Absent: 26, or two more than the subnet's where that is longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 8, max = 32))]
    pub ipv4: Option<u8>,
    /// For IPv6 subnets. Absent: 122, or two more than the subnet's where that is longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 16, max = 128))]
    pub ipv6: Option<u8>,
}

/// The status of a network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = schema::plain)]
pub struct PodNetworkStatus {
    /// Accepted: the spec is valid. Ready: pods can join. Programmed: it is applied on every node. `AddressesAvailable`: there are addresses left. `InUse`: what keeps it, once it is to be deleted. `BlocksExceeded`: True while nodes hold more empty address blocks than their pods can need.
    #[serde(default)]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// Nodes that have applied the network. These and the following figures are written at most every 30 seconds, in
    /// clusters of many networks less often, but whether there are interfaces at once.
    #[serde(default)]
    pub nodes: NodeCounts,
    /// Addresses, both families together.
    #[serde(default)]
    pub addresses: AddressCounts,
    /// Interfaces of pods in the network.
    #[serde(default)]
    pub interfaces: i64,
    /// Namespaces whose pods get their primary interface here; the first 100 by name.
    #[serde(default)]
    #[schemars(length(max = 100), extend("x-kubernetes-list-type" = "set"))]
    pub namespaces: Vec<String>,
    /// With `access.requireJoin`: service accounts, as namespace/name, of pods in admitted namespaces that have the verb
    /// join on the network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "set"))]
    pub join_accounts: Vec<String>,
    /// The number of the network in the whole cluster, for people: nodes read it from its `NetworkNumber`. Absent while it
    /// has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_215))]
    pub number: Option<u32>,
    /// How pods of the network on different nodes reach each other. All nodes use this value, and none reads that of the
    /// spec. Absent: kni-controller has not decided it yet, and packets do not leave their node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Fabric>,
    /// Features of the network by its provider: those of every network first, then extended ones. Of a network of CNI
    /// plugins it is what their configuration may declare.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "set"))]
    pub features: Vec<String>,
    /// Texts for the columns of `kubectl get`.
    #[serde(default)]
    pub summary: PodNetworkSummary,
}

/// How many nodes have applied a network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeCounts {
    /// Nodes where pods can join.
    #[serde(default)]
    pub ready: i64,
    /// Nodes with an agent.
    #[serde(default)]
    pub total: i64,
}

/// How full a network is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AddressCounts {
    /// Addresses that pods can have, saturating.
    #[serde(default)]
    pub total: i64,
    /// Addresses that pods have.
    #[serde(default)]
    pub used: i64,
    /// Addresses in the `AddressBlock`s of nodes.
    #[serde(default)]
    pub allocated: i64,
}

/// How packets of a network's pods leave the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = rules::pod_network::egress_addresses()))]
pub struct Egress {
    /// The mode; absent: as without `egress`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<EgressChoice>,
    /// Source addresses for mode Masquerade, at most one of each family, instead of the node's own.
    #[serde(default)]
    #[schemars(
        with = "Vec<HostAddress>",
        length(max = 2),
        extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = vec![rules::one_per_family()])
    )]
    pub addresses: Vec<String>,
}

/// How packets leave the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum EgressChoice {
    /// There is none.
    None,
    /// Through the node's routing, with the pod's own address. For the default network only.
    Route,
    /// With an address of the node, or one of `addresses`, in place of the pod's.
    Masquerade,
}

/// How packets between pods of one network cross from node to node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Fabric {
    /// In UDP packets between the nodes (VXLAN), with the number of the network. Networks may have the same addresses.
    Overlay,
    /// Without a tunnel, by routes to the address blocks of the nodes. For networks whose addresses no other one has.
    Native,
    /// They do not: pods reach those of their own node.
    None,
}

/// How a network forwards between its pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Topology {
    /// Every pod has a host route and a link-local gateway; packets are routed, there is no broadcast.
    #[default]
    Layer3,
}

fn enabled_by_default() -> bool {
    true
}

fn default_mtu() -> u32 {
    DEFAULT_MTU
}

impl PodNetworkSummary {
    /// The texts for a network.
    pub fn new(spec: &PodNetworkSpec, status: &PodNetworkStatus) -> Self {
        Self {
            subnets: spec.subnets.join(","),
            total: crate::summary::count(status.addresses.total),
            namespaces: status.namespaces.join(","),
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::{CustomResourceExt as _, Resource as _};

    use super::*;

    #[test]
    fn the_definition_says_what_kubectl_needs() {
        let crd = PodNetwork::crd();
        assert_eq!(crd.metadata.name.as_deref(), Some("podnetworks.kni.dev"));
        assert_eq!(crd.spec.scope, "Cluster");
        assert_eq!(crd.spec.names.short_names, Some(vec!["pnw".to_owned()]));
        assert_eq!(crd.spec.names.categories, Some(vec!["kni".to_owned()]));
        assert_eq!(PodNetwork::api_version(&()), "kni.dev/v1alpha1");
    }

    #[test]
    fn every_field_is_described() {
        let crd = serde_json::to_value(PodNetwork::crd()).unwrap();
        let spec = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
        let fields = spec.as_object().unwrap();
        let names: Vec<_> = fields.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            [
                "access",
                "default",
                "egress",
                "enabled",
                "excludeSubnets",
                "extendedResource",
                "fabric",
                "mtu",
                "namespaceSelector",
                "perNodePrefix",
                "provider",
                "serviceSubnets",
                "subnets",
                "topology",
                "xdp"
            ]
        );
        for (name, field) in fields {
            assert!(
                field["description"].as_str().is_some_and(|d| d.len() > 10),
                "{name}: {field}"
            );
        }
        assert_eq!(fields["mtu"]["minimum"].as_f64(), Some(1280.0));
    }

    #[test]
    fn defaults_apply_and_unknown_fields_are_refused() {
        let spec: PodNetworkSpec = serde_json::from_str(r#"{"subnets":["10.0.0.0/16"]}"#).unwrap();
        assert_eq!(
            (spec.default, spec.enabled, spec.mtu, spec.topology),
            (false, true, 1500, Topology::Layer3)
        );
        assert_eq!((spec.egress, spec.service_subnets, spec.xdp), (None, vec![], false));
        assert!(serde_json::from_str::<PodNetworkSpec>(r#"{"subnets":[],"provider":"x"}"#).is_err());
        assert!(serde_json::from_str::<PodNetworkSpec>(r#"{"subnets":[],"vlan":7}"#).is_err());
        assert!(serde_json::from_str::<PodNetworkSpec>(r#"{"subnets":[],"topology":"Layer2"}"#).is_err());
        let egress = |text: &str| serde_json::from_str::<Egress>(text);
        assert_eq!(
            egress(r#"{"mode":"Masquerade"}"#).unwrap().mode,
            Some(EgressChoice::Masquerade)
        );
        assert!(egress(r#"{"mode":"masquerade"}"#).is_err());
        assert!(egress(r#"{"address":[]}"#).is_err());
    }

    #[test]
    fn lists_are_joined_and_saturated_counts_are_marked() {
        let spec = serde_json::json!({ "subnets": ["10.10.0.0/16", "fd10::/64"] });
        let spec: PodNetworkSpec = serde_json::from_value(spec).unwrap();
        let mut status = PodNetworkStatus::default();
        status.addresses.total = i64::MAX;
        let summary = PodNetworkSummary::new(&spec, &status);
        assert_eq!(
            (summary.subnets.as_str(), summary.total.as_str()),
            ("10.10.0.0/16,fd10::/64", ">9e18")
        );
        status.addresses.total = 65_533;
        assert_eq!(PodNetworkSummary::new(&spec, &status).total, "65533");
    }
}
