//! Lists every map of the dataplane with its kind, sizes and default capacity.

use core::mem::size_of;

use crate::{
    address::{AddressKey, AddressValue},
    config::{Config, FlowShare},
    counter::{Counter, DropKey, EventGate, HitKey},
    endpoint::{EndpointPolicy, EndpointRow},
    event::Explanation,
    flow::{FlowKey4, FlowKey6, FlowValue, FragmentKey, FragmentValue, NodeRow},
    overlay::Overlay,
    policy::{IdentityKey, IdentityValue, PolicyKey, PolicyValue, PortKey, PortValue},
    route::{RouteKey, RouteValue},
    service::{AffinityKey, AffinityValue, BackendKey, BackendValue, ServiceKey, ServiceValue},
    uplink::{
        EgressShareKey, EgressShareValue, HostPortKey, HostPortValue, Masquerade, NodePeerKey, NodePeerValue,
        SourceKey, SourceValue,
    },
};

/// Version of everything that is pinned. Part of the pin path, so that programs of two layouts never share a map. Must
/// increase whenever a size, an offset or a meaning in this crate changes.
pub const LAYOUT_VERSION: u32 = 3;

/// The kind of a map, by the kernel's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapKind {
    /// `BPF_MAP_TYPE_ARRAY`.
    Array,
    /// `BPF_MAP_TYPE_PERCPU_ARRAY`.
    PerCpuArray,
    /// `BPF_MAP_TYPE_HASH`.
    Hash,
    /// `BPF_MAP_TYPE_PERCPU_HASH`.
    PerCpuHash,
    /// `BPF_MAP_TYPE_LRU_HASH`.
    LruHash,
    /// `BPF_MAP_TYPE_LPM_TRIE`.
    LpmTrie,
    /// `BPF_MAP_TYPE_RINGBUF`.
    RingBuf,
}

/// Required properties of a pinned map. aya opens an existing pin without comparing them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSpec {
    /// Name of the map and of its pin.
    pub name: &'static str,
    /// Kind.
    pub kind: MapKind,
    /// Bytes of a key, 0 for a ring buffer.
    pub key_size: u32,
    /// Bytes of a value (on one CPU), 0 for a ring buffer.
    pub value_size: u32,
    /// Entries unless configured otherwise; bytes for a ring buffer.
    pub max_entries: u32,
    /// Content, for operators.
    pub purpose: &'static str,
}

/// Endpoints, row 0 (no endpoint) included, unless configured otherwise.
pub const DEFAULT_MAX_ENDPOINTS: u32 = 1024;

/// Flow table rows per address family, unless configured otherwise. A connection takes one, a translated one two.
pub const DEFAULT_MAX_FLOWS: u32 = 131_072;

/// Rows of `NAT4` and `NAT6` each: flows across the uplink.
pub const MAX_NAT: u32 = 65_536;

/// Rows of `POLICY` and of `PORTS` each, unless configured otherwise.
pub const DEFAULT_MAX_POLICY_ROWS: u32 = 65_536;

/// Rows of `SERVICES`, unless configured otherwise; `BACKENDS` has four times as many.
pub const DEFAULT_MAX_SERVICES: u32 = 16_384;

/// Rows of `NODES`, row 0 (no node) included.
pub const MAX_NODES: u32 = 8192;

/// Rows of `NUMBERS` and of `NETWORKS`: networks of a node that have a number.
pub const MAX_NETWORKS: u32 = 16_384;

/// Rows of `EGRESS_SHARES`: on a node that is responsible for an address, one for each node that shares it.
pub const MAX_SHARES: u32 = 16_384;

/// Rows of `ROUTES`: in each network with pods here, one for each block of another node.
pub const MAX_ROUTES: u32 = 131_072;

/// Rows of `FRAGMENTS` and of `FRAGMENTS_OUTSIDE`: twice as many as the lists of free rows of 64 CPUs, 128 each, take.
pub const MAX_FRAGMENTS: u32 = 16_384;

/// Rows of `NODE_PEERS`: pairs of a socket of the node and a pod that it sends datagrams to through a host port.
pub const MAX_NODE_PEERS: u32 = 8192;

/// Bytes of a ring of events: more than 5000 of them.
pub const RING_BYTES: u32 = 1 << 20;

#[expect(clippy::cast_possible_truncation, reason = "sizes of the small types in this crate")]
const fn spec<K, V>(name: &'static str, kind: MapKind, max_entries: u32, purpose: &'static str) -> MapSpec {
    MapSpec {
        name,
        kind,
        key_size: size_of::<K>() as u32,
        value_size: size_of::<V>() as u32,
        max_entries,
        purpose,
    }
}

const fn ring(name: &'static str, purpose: &'static str) -> MapSpec {
    MapSpec {
        name,
        kind: MapKind::RingBuf,
        key_size: 0,
        value_size: 0,
        max_entries: RING_BYTES,
        purpose,
    }
}

/// Every map of the dataplane, by name.
pub const ALL_MAPS: &[MapSpec] = &[
    spec::<u32, EndpointRow>(
        "ENDPOINTS",
        MapKind::Array,
        DEFAULT_MAX_ENDPOINTS,
        "endpoint id -> network, addresses, MACs, readiness",
    ),
    spec::<u32, EndpointPolicy>(
        "ENDPOINT_POLICIES",
        MapKind::Array,
        DEFAULT_MAX_ENDPOINTS,
        "endpoint id -> policy set, identities, interface",
    ),
    spec::<u32, u32>(
        "INTERFACES",
        MapKind::Hash,
        DEFAULT_MAX_ENDPOINTS,
        "index of a host interface created by a CNI plugin -> endpoint id",
    ),
    spec::<AddressKey, AddressValue>(
        "ADDRESSES",
        MapKind::Hash,
        2 * DEFAULT_MAX_ENDPOINTS + DEFAULT_MAX_SERVICES,
        "(network, address) -> local endpoint or service",
    ),
    spec::<RouteKey, RouteValue>(
        "ROUTES",
        MapKind::LpmTrie,
        MAX_ROUTES,
        "(network, prefix) -> action for other destinations",
    ),
    spec::<FlowKey4, FlowValue>("FLOWS4", MapKind::LruHash, DEFAULT_MAX_FLOWS, "IPv4 flows"),
    spec::<FlowKey6, FlowValue>("FLOWS6", MapKind::LruHash, DEFAULT_MAX_FLOWS, "IPv6 flows"),
    spec::<FlowKey4, FlowValue>(
        "NAT4",
        MapKind::Hash,
        MAX_NAT,
        "IPv4 flows across the uplink, as seen from outside",
    ),
    spec::<FlowKey6, FlowValue>(
        "NAT6",
        MapKind::Hash,
        MAX_NAT,
        "IPv6 flows across the uplink, as seen from outside",
    ),
    spec::<FragmentKey, FragmentValue>(
        "FRAGMENTS",
        MapKind::LruHash,
        MAX_FRAGMENTS,
        "first fragments that pods sent",
    ),
    spec::<FragmentKey, FragmentValue>(
        "FRAGMENTS_OUTSIDE",
        MapKind::LruHash,
        MAX_FRAGMENTS,
        "first fragments that came to pods from the stack or from outside",
    ),
    spec::<u32, Counter>(
        "COUNTERS",
        MapKind::PerCpuArray,
        DEFAULT_MAX_ENDPOINTS * crate::counter::COUNTERS_PER_ENDPOINT,
        "packets and bytes by endpoint, direction and verdict",
    ),
    spec::<DropKey, Counter>(
        "DROPS",
        MapKind::PerCpuHash,
        16 * DEFAULT_MAX_ENDPOINTS,
        "dropped packets and bytes by endpoint, direction and reason",
    ),
    spec::<u32, EventGate>(
        "EVENT_GATES",
        MapKind::PerCpuArray,
        DEFAULT_MAX_ENDPOINTS,
        "rate limit of events by endpoint",
    ),
    spec::<u32, Config>("CONFIG", MapKind::Array, 1, "node configuration"),
    spec::<u32, FlowShare>(
        "FLOW_SHARES",
        MapKind::Array,
        DEFAULT_MAX_ENDPOINTS,
        "open flows per endpoint",
    ),
    spec::<PolicyKey, PolicyValue>(
        "POLICY",
        MapKind::Hash,
        DEFAULT_MAX_POLICY_ROWS,
        "(policy set, identity, direction) -> ports and rule",
    ),
    spec::<PortKey, PortValue>(
        "PORTS",
        MapKind::LpmTrie,
        DEFAULT_MAX_POLICY_ROWS,
        "(port set, protocol, port prefix) -> allowed or not",
    ),
    spec::<IdentityKey, IdentityValue>(
        "IDENTITIES",
        MapKind::LpmTrie,
        DEFAULT_MAX_POLICY_ROWS,
        "(network, prefix) -> identity of addresses that are no local endpoint's",
    ),
    spec::<HitKey, u64>(
        "HITS",
        MapKind::PerCpuHash,
        16_384,
        "flows that a rule allowed or a policy set denied",
    ),
    spec::<ServiceKey, ServiceValue>(
        "SERVICES",
        MapKind::Hash,
        DEFAULT_MAX_SERVICES,
        "(network, virtual address, port, protocol) -> list of backends",
    ),
    spec::<BackendKey, BackendValue>(
        "BACKENDS",
        MapKind::Hash,
        4 * DEFAULT_MAX_SERVICES,
        "(list, slot) -> backend",
    ),
    spec::<AffinityKey, AffinityValue>(
        "AFFINITY",
        MapKind::LruHash,
        DEFAULT_MAX_SERVICES,
        "(service port, client) -> backend of the last flow",
    ),
    spec::<u32, Masquerade>(
        "MASQUERADE",
        MapKind::Array,
        DEFAULT_MAX_ENDPOINTS,
        "endpoint id -> masquerade address and port range",
    ),
    spec::<HostPortKey, HostPortValue>(
        "HOST_PORTS",
        MapKind::Hash,
        4096,
        "(node address, port, protocol) -> endpoint and port",
    ),
    spec::<HostPortKey, HostPortValue>(
        "NODE_PORTS",
        MapKind::Hash,
        8192,
        "(node or loopback address, port, protocol) -> endpoint and port, for the node's own sockets",
    ),
    spec::<NodePeerKey, NodePeerValue>(
        "NODE_PEERS",
        MapKind::LruHash,
        MAX_NODE_PEERS,
        "(socket of the node, pod, port) -> host port that the socket sends datagrams to",
    ),
    spec::<SourceKey, SourceValue>(
        "SOURCES",
        MapKind::LpmTrie,
        16_384,
        "source prefix -> verdict on packets from outside",
    ),
    spec::<u32, u32>(
        "SHARED_EGRESS",
        MapKind::Array,
        DEFAULT_MAX_ENDPOINTS,
        "endpoint id -> families in which it leaves with an address that several nodes share",
    ),
    spec::<EgressShareKey, EgressShareValue>(
        "EGRESS_SHARES",
        MapKind::LpmTrie,
        MAX_SHARES,
        "(egress address, unit of its ports) -> the node that has the unit, or answers for the address",
    ),
    spec::<u32, NodeRow>(
        "NODES",
        MapKind::Array,
        MAX_NODES,
        "number of a node -> address, interface, MTU",
    ),
    spec::<u32, u32>(
        "NUMBERS",
        MapKind::Hash,
        MAX_NETWORKS,
        "network id -> number of the network in the cluster",
    ),
    spec::<u32, u32>(
        "NETWORKS",
        MapKind::Hash,
        MAX_NETWORKS,
        "number of a network in the cluster -> network id",
    ),
    spec::<u32, Overlay>(
        "OVERLAY",
        MapKind::Array,
        1,
        "ends and port of the tunnel between nodes",
    ),
    spec::<u32, Explanation>("EXPLANATION", MapKind::Array, 1, "outcome of the last dry run"),
    ring("DROP_EVENTS", "drop events for the agent"),
    ring("FLOW_EVENTS", "events of new flows for the agent"),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// A changed size requires a new `LAYOUT_VERSION`: a change of this table is a change of that constant.
    #[test]
    fn sizes_belong_to_the_layout_version() {
        let sizes: Vec<(&str, u32, u32)> = ALL_MAPS.iter().map(|m| (m.name, m.key_size, m.value_size)).collect();
        assert_eq!(LAYOUT_VERSION, 3);
        assert_eq!(
            sizes,
            [
                ("ENDPOINTS", 4, 64),
                ("ENDPOINT_POLICIES", 4, 16),
                ("INTERFACES", 4, 4),
                ("ADDRESSES", 20, 8),
                ("ROUTES", 24, 8),
                ("FLOWS4", 16, 64),
                ("FLOWS6", 40, 64),
                ("NAT4", 16, 64),
                ("NAT6", 40, 64),
                ("FRAGMENTS", 44, 16),
                ("FRAGMENTS_OUTSIDE", 44, 16),
                ("COUNTERS", 4, 16),
                ("DROPS", 8, 16),
                ("EVENT_GATES", 4, 24),
                ("CONFIG", 4, 52),
                ("FLOW_SHARES", 4, 32),
                ("POLICY", 12, 8),
                ("PORTS", 12, 4),
                ("IDENTITIES", 24, 4),
                ("HITS", 12, 8),
                ("SERVICES", 24, 24),
                ("BACKENDS", 8, 24),
                ("AFFINITY", 24, 32),
                ("MASQUERADE", 4, 24),
                ("HOST_PORTS", 20, 12),
                ("NODE_PORTS", 20, 12),
                ("NODE_PEERS", 28, 28),
                ("SOURCES", 20, 4),
                ("SHARED_EGRESS", 4, 4),
                ("EGRESS_SHARES", 24, 12),
                ("NODES", 4, 32),
                ("NUMBERS", 4, 4),
                ("NETWORKS", 4, 4),
                ("OVERLAY", 4, 28),
                ("EXPLANATION", 4, 176),
                ("DROP_EVENTS", 0, 0),
                ("FLOW_EVENTS", 0, 0),
            ]
        );
    }
}
