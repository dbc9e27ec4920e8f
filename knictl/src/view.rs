//! Defines the contents of JSON and YAML documents: the agent's messages under the same names, in camelCase.

use kni_proto::runtime as proto;
use serde::Serialize;

use crate::packet;

/// Defines document types by the fields of the agent's messages. A new field of a message causes a compile error here
/// until it is listed. `lists` holds repeated messages, `optional` messages that may be absent.
macro_rules! views {
    ($($(#[$doc:meta])* $name:ident from $message:ident {
        $($field:ident: $type:ty,)*
    } lists { $($list:ident: $item:ty,)* } $(, optional { $($option:ident: $inner:ty,)* })?)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, Serialize)]
        #[serde(rename_all = "camelCase")]
        pub(crate) struct $name {
            $(pub(crate) $field: $type,)*
            $(pub(crate) $list: Vec<$item>,)*
            $($(pub(crate) $option: Option<$inner>,)*)?
        }

        impl From<proto::$message> for $name {
            fn from(message: proto::$message) -> Self {
                let proto::$message { $($field,)* $($list,)* $($($option,)*)? } = message;
                Self {
                    $($field: $field.into(),)*
                    $($list: $list.into_iter().map(Into::into).collect(),)*
                    $($($option: $option.map(Into::into),)*)?
                }
            }
        }
    )*};
}

pub(crate) mod flow;

views! {
    /// The agent's status and its components.
    Status from GetStatusResponse {
        version: String,
        pid: u32,
        uptime_seconds: u64,
        ready: bool,
        reasons: Vec<String>,
        kernel_release: String,
        hook: String,
        layout_version: u32,
        pin_path: String,
        sockets: Vec<String>,
        sandboxes: u32,
        attachments: u32,
        endpoints_capacity: u32,
        warm_sandboxes: u32,
        pending_removals: u32,
        pending_links: u32,
    } lists {}, optional { uplink: Uplink, }

    /// The uplink of the node.
    Uplink from Uplink {
        ifname: String,
        ifindex: u32,
        sources: Vec<String>,
        dedicated: Vec<String>,
        xdp: String,
        host_ports: u32,
    } lists { programs: Program, }

    /// The node's networks.
    Networks from ListNetworksResponse {} lists { networks: Network, refused: Refused, }

    /// One network.
    Network from NetworkStatus {
        name: String,
        id: u32,
        default: bool,
        ready: bool,
        reason: String,
        subnets: Vec<String>,
        mtu: u32,
        attachments: u32,
        total_addresses: String,
        used_addresses: String,
        origin: String,
        provider: String,
        features: Vec<String>,
    } lists {}

    /// A refused manifest.
    Refused from RefusedManifest { file: String, line: u32, field: String, reason: String, } lists {}

    /// The interfaces of pods.
    Interfaces from ListInterfacesResponse {} lists { interfaces: Interface, }

    /// One interface of one pod.
    Interface from Interface {
        pod_namespace: String,
        pod_name: String,
        pod_uid: String,
        sandbox_id: String,
        network: String,
        network_id: u32,
        endpoint_id: u32,
        ifname: String,
        ifindex: u32,
        host_ifname: String,
        host_ifindex: u32,
        netns_path: String,
        netns_inode: u64,
        mac: String,
        host_mac: String,
        mtu: u32,
        from_pod: Counter,
        to_pod: Counter,
        dropped: Counter,
        healthy: bool,
        problems: Vec<String>,
        default_route: bool,
        host_access: bool,
        kind: String,
        policy_enforced: bool,
    } lists { addresses: Address, programs: Program, }

    /// One address of an interface.
    Address from Address { family: String, ip: String, } lists {}

    /// One program on an interface.
    Program from Program { name: String, id: u32, hook: String, link_id: u32, } lists {}

    /// Packets and their bytes.
    Counter from Counter { packets: u64, bytes: u64, } lists {}

    /// Counted drops.
    Drops from ListDropsResponse {} lists { drops: DropCount, }

    /// Drops of one interface, direction and reason.
    DropCount from DropCount {
        network: String,
        pod_namespace: String,
        pod_name: String,
        ifname: String,
        direction: String,
        reason: String,
        count: Counter,
        explanation: String,
    } lists {}

    /// One drop.
    DropEvent from DropEvent {
        time_ns: u64,
        network: String,
        pod_namespace: String,
        pod_name: String,
        ifname: String,
        direction: String,
        reason: String,
        source: String,
        destination: String,
        protocol: String,
        source_port: u32,
        destination_port: u32,
        length: u32,
        lost: u64,
        ethertype: u32,
        explanation: String,
    } lists {}

    /// The pinned maps.
    Maps from ListMapsResponse {} lists { maps: Map, }

    /// One pinned map.
    Map from Map {
        name: String,
        id: u32,
        kind: String,
        key_size: u32,
        value_size: u32,
        max_entries: u32,
        entries: u32,
        pin: String,
        purpose: String,
    } lists {}
}

impl From<Option<proto::Counter>> for Counter {
    /// Protobuf omits a counter that the agent did not set: its count is zero.
    fn from(counter: Option<proto::Counter>) -> Self {
        counter.unwrap_or_default().into()
    }
}

/// A drop with its time in a notation for people and log tools.
#[derive(Debug, Serialize)]
pub(crate) struct TimedDropEvent {
    /// RFC 3339, UTC.
    pub(crate) time: String,
    #[serde(flatten)]
    pub(crate) event: DropEvent,
}

impl From<proto::DropEvent> for TimedDropEvent {
    fn from(event: proto::DropEvent) -> Self {
        Self {
            time: packet::time(event.time_ns),
            event: event.into(),
        }
    }
}
