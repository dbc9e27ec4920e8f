//! `PodNetwork.spec.provider`: who makes the interfaces of a network, with that provider's parameters.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    rules,
    schema::{CniFile, CniName, HostAddress, InterfaceName},
};

/// Who makes the interfaces of a network. Each parameter has a meaning with the types named in its description only.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = rules::provider::spec()))]
pub struct ProviderSpec {
    /// The kind of provider.
    #[serde(rename = "type")]
    pub kind: ProviderType,
    /// Macvlan: the interface of the node that the pods share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<InterfaceName>")]
    pub parent: Option<String>,
    /// Macvlan: whether the parent may be an interface that the node itself uses, with a default route or an address of
    /// the node. Frames of the pods pass none of the node's programs there: they can be forged packets between nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_uplink: Option<bool>,
    /// Macvlan: who reaches whom. Absent: Bridge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<MacvlanModeSpec>,
    /// `HostDevice`: the interfaces of the node, each for one pod at a time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<InterfaceName>", length(max = 256), extend("x-kubernetes-list-type" = "set"))]
    pub devices: Vec<String>,
    /// Macvlan and `HostDevice`: gateways of the link for pods whose default route leads here, at most one of each family,
    /// inside the subnets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        with = "Vec<HostAddress>",
        length(max = 2),
        extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = vec![rules::one_per_family()])
    )]
    pub gateways: Vec<String>,
    /// Tap: number of the user that may open the device. Absent: root alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 4_294_967_294_u32))]
    pub owner: Option<u32>,
    /// Tap: number of the group that may open the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 4_294_967_294_u32))]
    pub group: Option<u32>,
    /// Tap: whether the device has several queues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multi_queue: Option<bool>,
    /// CNI: the `name` inside the configuration to use. Either this or `file`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<CniName>")]
    pub conf_name: Option<String>,
    /// CNI: the file of the agent's CNI configuration folder to use. Either this or `confName`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<CniFile>")]
    pub file: Option<String>,
}

/// A kind of provider.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ProviderType {
    /// The agent's own dataplane: veth pairs with programs.
    #[default]
    Ebpf,
    /// Macvlan interfaces on an interface of the node. Pods reach the link behind it; no policy is enforced there.
    Macvlan,
    /// Interfaces of the node that move into the pods.
    HostDevice,
    /// Tap devices for virtual machines. Addresses are leased and reported, not configured.
    Tap,
    /// CNI plugins, run by the agent.
    #[serde(rename = "CNI")]
    Cni,
}

impl ProviderType {
    /// As it is written.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ebpf => "Ebpf",
            Self::Macvlan => "Macvlan",
            Self::HostDevice => "HostDevice",
            Self::Tap => "Tap",
            Self::Cni => "CNI",
        }
    }
}

/// Who reaches whom over one parent of macvlan interfaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MacvlanModeSpec {
    /// Pods reach each other directly, and the link behind the parent.
    Bridge,
    /// Pods reach only the link behind the parent.
    Private,
    /// Pods reach each other through a switch behind the parent that sends frames back.
    Vepa,
    /// One pod has the parent's link for itself.
    Passthru,
}
