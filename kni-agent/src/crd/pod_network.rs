//! `PodNetwork`: an isolated address space that pods join.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Default MTU, in bytes of IP packet.
pub const DEFAULT_MTU: u32 = 1500;

/// What a network shall be. Every field here takes effect; unknown ones are refused.
#[derive(CustomResource, Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kni.dev",
    version = "v1alpha1",
    kind = "PodNetwork",
    plural = "podnetworks",
    singular = "podnetwork",
    shortname = "pnw",
    category = "kni",
    derive = "PartialEq",
    doc = "A network that pods join: an isolated address space of its own."
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodNetworkSpec {
    /// Whether pods get their primary interface in this network. Exactly one network is the default; its pods, and no
    /// others, reach the node and are reached by it.
    #[serde(default)]
    pub default: bool,
    /// Whether pods may join. A disabled network keeps the pods it has and takes no new ones.
    #[serde(default = "enabled_by_default")]
    pub enabled: bool,
    /// How the network forwards between its pods.
    #[serde(default)]
    pub topology: Topology,
    /// Address ranges in CIDR notation, IPv4 or IPv6, not overlapping each other. Pods get one address of each family
    /// that is present. Other networks may use the same ranges.
    #[schemars(length(min = 1, max = 16))]
    pub subnets: Vec<String>,
    /// Ranges in CIDR notation, inside the subnets, that are never handed out.
    #[serde(default)]
    #[schemars(length(max = 256))]
    pub exclude_subnets: Vec<String>,
    /// MTU of the pod interfaces, in bytes of IP packet.
    #[serde(default = "default_mtu")]
    #[schemars(range(min = 1280, max = 65535))]
    pub mtu: u32,
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
            ["default", "enabled", "excludeSubnets", "mtu", "subnets", "topology"]
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
        assert!(serde_json::from_str::<PodNetworkSpec>(r#"{"subnets":[],"provider":"x"}"#).is_err());
        assert!(serde_json::from_str::<PodNetworkSpec>(r#"{"subnets":[],"topology":"Layer2"}"#).is_err());
    }
}
