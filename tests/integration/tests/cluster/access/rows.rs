//! Lists the rows of the tenancy table: who joins which network by which way in, and the expected answers.

/// A way to name a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Annotation `kni.dev/network`.
    Network,
    /// Annotation `v1.multus-cni.io/default-network`.
    Default,
    /// The same in JSON.
    DefaultJson,
    /// Annotation `k8s.v1.cni.cncf.io/networks`, a comma list.
    Short,
    /// The same in JSON.
    Json,
    /// Annotation `kni.io/multi-network`.
    Multi,
    /// No annotation that names a network.
    Nothing,
    /// A `PodNetworkAttachment` that selects a new pod.
    Attachment,
    /// A `PodNetworkAttachment` that selects a running pod.
    HotAdd,
    /// The configuration of a CNI runtime that names a network for `eth0`.
    Cni,
    /// The same for an interface beside `eth0`, as Multus adds it.
    CniBeside,
    /// A request of KNI for a pod of which the API server has no object.
    Crafted,
    /// The same for an interface beside `eth0`.
    CraftedJson,
}

/// What the pod chooses beside the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Nothing.
    Nothing,
    /// An address.
    Ip(&'static str),
    /// A MAC address.
    Mac,
    /// The default routes.
    Route,
}

/// A row: the namespace, the way in, the network as written, the choice, and the answers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) who: &'static str,
    pub(crate) way: Way,
    pub(crate) network: &'static str,
    pub(crate) choice: Choice,
    /// The network of the interface, or the field that refuses.
    pub(crate) agent: Result<&'static str, &'static str>,
    /// Whether the API server refuses already.
    pub(crate) early: bool,
}

const NAMESPACES: &str = "spec.access.namespaces";
const ADDRESSES: &str = "spec.access.allowAddresses";
const RANGES: &str = "spec.access.addressRanges";
const MAC: &str = "spec.access.allowMac";
const ROUTE: &str = "spec.access.allowDefaultRoute";
const LOCK: &str = "spec.access.lockNamespaces";
const JOIN: &str = "spec.access.requireJoin";
const DEFAULT_NETWORK: &str = "annotation v1.multus-cni.io/default-network";
const NETWORKS: &str = "annotation k8s.v1.cni.cncf.io/networks";

use Choice::{Ip, Mac, Nothing, Route};
use Way::{
    Attachment, Cni, CniBeside, Crafted, CraftedJson, Default, DefaultJson, HotAdd, Json, Multi, Network,
    Nothing as Unnamed, Short,
};

const fn joins(who: &'static str, way: Way, network: &'static str, choice: Choice, joined: &'static str) -> Row {
    Row {
        who,
        way,
        network,
        choice,
        agent: Ok(joined),
        early: false,
    }
}

/// Refused at admission and by the agent.
const fn early(who: &'static str, way: Way, network: &'static str, choice: Choice, field: &'static str) -> Row {
    Row {
        who,
        way,
        network,
        choice,
        agent: Err(field),
        early: true,
    }
}

/// Refused by the agent only: it depends on more than the API server's policies see.
const fn late(who: &'static str, way: Way, network: &'static str, choice: Choice, field: &'static str) -> Row {
    Row {
        early: false,
        ..early(who, way, network, choice, field)
    }
}

/// The table. The networks are those of the scene.
pub(crate) const ROWS: &[Row] = &[
    // Without a request: the network of the namespace.
    joins("red-team", Unnamed, "", Nothing, "red"),
    joins("blue-team", Unnamed, "", Nothing, "blue"),
    joins("plain", Unnamed, "", Nothing, "default"),
    late("red-team", Unnamed, "", Ip("10.10.3.1"), ADDRESSES),
    late("red-team", Unnamed, "", Mac, MAC),
    late("plain", Unnamed, "", Ip("10.244.0.9"), ADDRESSES),
    joins("blue-team", Unnamed, "", Ip("10.10.9.1"), "blue"),
    late("blue-team", Unnamed, "", Ip("10.10.3.2"), RANGES),
    // The network of a tenant is for its namespaces.
    joins("red-team", Network, "red", Nothing, "red"),
    early("blue-team", Network, "red", Nothing, NAMESPACES),
    early("plain", Network, "red", Nothing, NAMESPACES),
    early("partner", Network, "red", Nothing, NAMESPACES),
    early("blue-team", Network, " red ", Nothing, NAMESPACES),
    early("blue-team", Network, "red", Ip("10.10.3.3"), NAMESPACES),
    early("red-team", Network, "red", Ip("10.10.3.4"), ADDRESSES),
    early("red-team", Network, "red", Mac, MAC),
    // A network that names its namespaces.
    joins("partner", Network, "blue", Nothing, "blue"),
    joins("partner", Network, "blue", Ip("10.10.9.2"), "blue"),
    early("partner", Network, "blue", Ip("10.10.3.5"), RANGES),
    early("partner", Network, "blue", Mac, MAC),
    early("red-team", Network, "blue", Nothing, NAMESPACES),
    early("plain", Network, "closed", Nothing, NAMESPACES),
    early("red-team", Network, "nobodys", Nothing, NAMESPACES),
    // A network for all.
    joins("red-team", Network, "open", Nothing, "open"),
    joins("plain", Network, "open", Ip("10.20.3.1"), "open"),
    joins("plain", Network, "open", Mac, "open"),
    joins("red-team", Network, "default", Nothing, "default"),
    early("red-team", Network, "default", Ip("10.244.0.10"), ADDRESSES),
    joins("plain", Network, "shared", Nothing, "shared"),
    early("plain", Network, "shared", Ip("10.21.3.1"), ADDRESSES),
    // A locked namespace.
    joins("vault", Unnamed, "", Nothing, "vault"),
    joins("vault", Network, "vault", Nothing, "vault"),
    late("vault", Network, "open", Nothing, LOCK),
    late("vault", Network, "default", Nothing, LOCK),
    late("vault", Default, "open", Nothing, LOCK),
    joins("vault", Short, "open", Nothing, "open"),
    late("vault", Cni, "open", Nothing, LOCK),
    early("plain", Network, "vault", Nothing, NAMESPACES),
    // Multus' notations, with and without definitions. `plain/to-red` is a definition of the network red.
    late("blue-team", Default, "red", Nothing, NAMESPACES),
    late("plain", Default, "to-red", Nothing, NAMESPACES),
    late("blue-team", Default, "plain/to-red", Nothing, NAMESPACES),
    joins("red-team", Default, "plain/to-red", Nothing, "red"),
    joins("plain", Default, "red", Nothing, "open"),
    joins("blue-team", DefaultJson, "open", Nothing, "open"),
    joins("red-team", DefaultJson, "plain/to-red", Nothing, "red"),
    joins("plain", DefaultJson, "open", Ip("10.20.3.8"), "open"),
    late("plain", DefaultJson, "shared", Mac, MAC),
    late("blue-team", DefaultJson, "red", Nothing, NAMESPACES),
    late("vault", DefaultJson, "open", Nothing, LOCK),
    // What names no network leads nowhere, and not to the network of the namespace or of the cluster.
    late("plain", Default, "Blue Network", Nothing, DEFAULT_NETWORK),
    late("red-team", Default, "a/b/c", Nothing, DEFAULT_NETWORK),
    late("plain", Default, "open,shared", Nothing, DEFAULT_NETWORK),
    late("vault", Default, "[{\"name\":\"vault\"", Nothing, DEFAULT_NETWORK),
    late("plain", DefaultJson, "Blue Network", Nothing, DEFAULT_NETWORK),
    late("plain", Short, "Blue Network", Nothing, NETWORKS),
    late("plain", Short, "a/b/c", Nothing, NETWORKS),
    late("plain", Json, "Blue Network", Nothing, NETWORKS),
    late("blue-team", Short, "red", Nothing, NAMESPACES),
    late("blue-team", Short, "red@net7", Nothing, NAMESPACES),
    late("blue-team", Short, "plain/to-red", Nothing, NAMESPACES),
    late("plain", Short, "to-red", Nothing, NAMESPACES),
    joins("red-team", Short, "plain/to-red", Nothing, "red"),
    late("blue-team", Short, "red-team/red", Nothing, NAMESPACES),
    // In this namespace, red is the name of a definition of the network open.
    joins("plain", Short, "red", Nothing, "open"),
    joins("plain", Json, "red", Nothing, "open"),
    joins("blue-team", Short, "open", Nothing, "open"),
    late("blue-team", Json, "red", Nothing, NAMESPACES),
    late("blue-team", Json, "plain/to-red", Nothing, NAMESPACES),
    joins("blue-team", Json, "open", Ip("10.20.3.2"), "open"),
    joins("blue-team", Json, "open", Mac, "open"),
    joins("blue-team", Json, "open", Route, "open"),
    joins("blue-team", Json, "shared", Nothing, "shared"),
    late("blue-team", Json, "shared", Ip("10.21.3.2"), ADDRESSES),
    late("blue-team", Json, "shared", Mac, MAC),
    late("blue-team", Json, "shared", Route, ROUTE),
    late("partner", Json, "blue", Ip("10.10.3.6"), RANGES),
    late("blue-team", Multi, "red", Nothing, NAMESPACES),
    late("blue-team", Multi, "closed", Nothing, NAMESPACES),
    joins("blue-team", Multi, "shared", Nothing, "shared"),
    // Attachments, for new and for running pods.
    early("blue-team", Attachment, "red", Nothing, NAMESPACES),
    joins("blue-team", Attachment, "open", Ip("10.20.3.3"), "open"),
    early("blue-team", Attachment, "shared", Ip("10.21.3.3"), ADDRESSES),
    early("blue-team", Attachment, "shared", Mac, MAC),
    early("blue-team", Attachment, "shared", Route, ROUTE),
    early("partner", Attachment, "blue", Ip("10.10.3.7"), RANGES),
    early("blue-team", HotAdd, "red", Nothing, NAMESPACES),
    joins("blue-team", HotAdd, "open", Ip("10.20.3.4"), "open"),
    early("blue-team", HotAdd, "shared", Ip("10.21.3.4"), ADDRESSES),
    early("blue-team", HotAdd, "shared", Mac, MAC),
    // Requests of runtimes.
    late("blue-team", Cni, "red", Nothing, NAMESPACES),
    late("blue-team", Cni, "shared", Ip("10.21.3.5"), ADDRESSES),
    late("blue-team", Cni, "shared", Mac, MAC),
    joins("blue-team", Cni, "open", Ip("10.20.3.5"), "open"),
    late("blue-team", CniBeside, "red", Nothing, NAMESPACES),
    late("blue-team", CniBeside, "shared", Route, ROUTE),
    joins("blue-team", CniBeside, "shared", Nothing, "shared"),
    late("blue-team", Crafted, "red", Nothing, NAMESPACES),
    late("blue-team", Crafted, "shared", Mac, MAC),
    joins("blue-team", Crafted, "open", Nothing, "open"),
    late("blue-team", CraftedJson, "red", Nothing, NAMESPACES),
    late("blue-team", CraftedJson, "shared", Route, ROUTE),
    // Providers that hand out devices of the node.
    joins("red-team", Short, "vm", Nothing, "vm"),
    late("blue-team", Short, "vm", Nothing, NAMESPACES),
    early("blue-team", Network, "vm", Nothing, NAMESPACES),
    joins("red-team", Short, "lan", Nothing, "lan"),
    late("blue-team", Json, "lan", Ip("198.51.100.77"), NAMESPACES),
    late("blue-team", Short, "nic", Nothing, NAMESPACES),
    early("blue-team", Attachment, "nic", Nothing, NAMESPACES),
    late("blue-team", Cni, "nic", Nothing, NAMESPACES),
    late("blue-team", Short, "chain", Nothing, NAMESPACES),
    early("blue-team", Network, "chain", Nothing, NAMESPACES),
    // The verb of the service account.
    early("plain", Network, "granted", Nothing, JOIN),
    late("plain", Short, "granted", Nothing, JOIN),
];
