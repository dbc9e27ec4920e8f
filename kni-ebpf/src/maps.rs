//! Declares every pinned map. Names, kinds and sizes are those of `kni_common::layout::ALL_MAPS`; the agent compares
//! them.

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, PerCpuHashMap, RingBuf},
    macros::btf_map,
};
use kni_common::{
    address::{AddressKey, AddressValue},
    config::{Config, FlowShare},
    counter::{COUNTERS_PER_ENDPOINT, Counter, DropKey, EventGate, HitKey},
    endpoint::{EndpointPolicy, EndpointRow},
    event::{Explanation, FlowEvent},
    flow::{FlowKey4, FlowKey6, FlowValue, FragmentKey, FragmentValue, NodeRow},
    layout::{
        DEFAULT_MAX_ENDPOINTS, DEFAULT_MAX_FLOWS, DEFAULT_MAX_POLICY_ROWS, DEFAULT_MAX_SERVICES, MAX_FRAGMENTS,
        MAX_NAT, MAX_NETWORKS, MAX_NODE_PEERS, MAX_NODES, MAX_ROUTES, MAX_SHARES, RING_BYTES,
    },
    overlay::Overlay,
    policy::{IdentityData, IdentityValue, PolicyKey, PolicyValue, PortData, PortValue},
    route::{RouteData, RouteValue},
    service::{AffinityKey, AffinityValue, BackendKey, BackendValue, ServiceKey, ServiceValue},
    uplink::{
        EgressShareData, EgressShareValue, HostPortKey, HostPortValue, Masquerade, NodePeerKey, NodePeerValue,
        SourceData, SourceValue,
    },
};

const ENDPOINTS_MAX: usize = DEFAULT_MAX_ENDPOINTS as usize;
const FLOWS_MAX: usize = DEFAULT_MAX_FLOWS as usize;
const NAT_MAX: usize = MAX_NAT as usize;
const POLICY_MAX: usize = DEFAULT_MAX_POLICY_ROWS as usize;
const SERVICES_MAX: usize = DEFAULT_MAX_SERVICES as usize;
const FRAGMENTS_MAX: usize = MAX_FRAGMENTS as usize;
const RING: usize = RING_BYTES as usize;
/// A ring of events.
pub type Ring = RingBuf<FlowEvent, RING>;
const COUNTERS_MAX: usize = (DEFAULT_MAX_ENDPOINTS * COUNTERS_PER_ENDPOINT) as usize;
/// Rows come and go with pods and reasons: memory is allocated when a row is written.
const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

/// The values of such an array begin at a page: each row of 64 bytes is exactly one cache line.
const MMAPABLE: usize = BPF_F_MMAPABLE as usize;

/// Endpoints by id.
#[btf_map]
pub static ENDPOINTS: Array<EndpointRow, ENDPOINTS_MAX, MMAPABLE> = Array::new();

/// Policy words of endpoints by id.
#[btf_map]
pub static ENDPOINT_POLICIES: Array<EndpointPolicy, ENDPOINTS_MAX> = Array::new();

/// Endpoints by the index of their host interface, where a CNI plugin created it.
#[btf_map]
pub static INTERFACES: HashMap<u32, u32, ENDPOINTS_MAX, NO_PREALLOC> = HashMap::new();

/// Local endpoints and services by network and address.
#[btf_map]
pub static ADDRESSES: HashMap<AddressKey, AddressValue, { 2 * ENDPOINTS_MAX + SERVICES_MAX }, NO_PREALLOC> =
    HashMap::new();

/// Actions for destinations that are not local endpoints, by network and prefix.
#[btf_map]
pub static ROUTES: LpmTrie<RouteData, RouteValue, { MAX_ROUTES as usize }> = LpmTrie::new();

/// IPv4 flows.
#[btf_map]
pub static FLOWS4: LruHashMap<FlowKey4, FlowValue, FLOWS_MAX> = LruHashMap::new();

/// IPv6 flows.
#[btf_map]
pub static FLOWS6: LruHashMap<FlowKey6, FlowValue, FLOWS_MAX> = LruHashMap::new();

/// IPv4 flows across the uplink, as packets from outside find them. Preallocated, so that a claim does not fail for
/// lack of memory.
#[btf_map]
pub static NAT4: HashMap<FlowKey4, FlowValue, NAT_MAX> = HashMap::new();

/// IPv6 flows across the uplink.
#[btf_map]
pub static NAT6: HashMap<FlowKey6, FlowValue, NAT_MAX> = HashMap::new();

/// First fragments that pods sent.
#[btf_map]
pub static FRAGMENTS: LruHashMap<FragmentKey, FragmentValue, FRAGMENTS_MAX> = LruHashMap::new();

/// First fragments that came to pods from the stack or from outside: no host there displaces those of pods.
#[btf_map]
pub static FRAGMENTS_OUTSIDE: LruHashMap<FragmentKey, FragmentValue, FRAGMENTS_MAX> = LruHashMap::new();

/// Forwarded packets and bytes.
#[btf_map]
pub static COUNTERS: PerCpuArray<Counter, COUNTERS_MAX> = PerCpuArray::new();

/// Dropped packets and bytes.
#[btf_map]
pub static DROPS: PerCpuHashMap<DropKey, Counter, { 16 * ENDPOINTS_MAX }, NO_PREALLOC> = PerCpuHashMap::new();

/// Rate limit of events.
#[btf_map]
pub static EVENT_GATES: PerCpuArray<EventGate, ENDPOINTS_MAX> = PerCpuArray::new();

/// Node configuration.
#[btf_map]
pub static CONFIG: Array<Config, 1> = Array::new();

/// Open flows per endpoint.
#[btf_map]
pub static FLOW_SHARES: Array<FlowShare, ENDPOINTS_MAX> = Array::new();

/// Rows of policy sets.
#[btf_map]
pub static POLICY: HashMap<PolicyKey, PolicyValue, POLICY_MAX, NO_PREALLOC> = HashMap::new();

/// Port sets.
#[btf_map]
pub static PORTS: LpmTrie<PortData, PortValue, POLICY_MAX> = LpmTrie::new();

/// Identities of addresses that belong to no local endpoint.
#[btf_map]
pub static IDENTITIES: LpmTrie<IdentityData, IdentityValue, POLICY_MAX> = LpmTrie::new();

/// Flows that a rule allowed or a set denied.
#[btf_map]
pub static HITS: PerCpuHashMap<HitKey, u64, 16_384, NO_PREALLOC> = PerCpuHashMap::new();

/// Services by virtual address and port.
#[btf_map]
pub static SERVICES: HashMap<ServiceKey, ServiceValue, SERVICES_MAX, NO_PREALLOC> = HashMap::new();

/// Backends by list and position.
#[btf_map]
pub static BACKENDS: HashMap<BackendKey, BackendValue, { 4 * SERVICES_MAX }, NO_PREALLOC> = HashMap::new();

/// The last backend of each client.
#[btf_map]
pub static AFFINITY: LruHashMap<AffinityKey, AffinityValue, SERVICES_MAX> = LruHashMap::new();

/// Masquerade addresses and port ranges by endpoint.
#[btf_map]
pub static MASQUERADE: Array<Masquerade, ENDPOINTS_MAX> = Array::new();

/// Ports of the node that are forwarded to endpoints.
#[btf_map]
pub static HOST_PORTS: HashMap<HostPortKey, HostPortValue, 4096, NO_PREALLOC> = HashMap::new();

/// Ports of the node that its own sockets reach endpoints by.
#[btf_map]
pub static NODE_PORTS: HashMap<HostPortKey, HostPortValue, 8192, NO_PREALLOC> = HashMap::new();

/// Where sockets of the node sent the datagrams that endpoints got.
#[btf_map]
pub static NODE_PEERS: LruHashMap<NodePeerKey, NodePeerValue, { MAX_NODE_PEERS as usize }> = LruHashMap::new();

/// Source prefixes that are denied from outside.
#[btf_map]
pub static SOURCES: LpmTrie<SourceData, SourceValue, 16_384> = LpmTrie::new();

/// Families in which endpoints leave with an address that several nodes share.
#[btf_map]
pub static SHARED_EGRESS: Array<u32, ENDPOINTS_MAX> = Array::new();

/// Nodes that share an egress address, by address and unit of ports. A trie, whose rows are freed only after all
/// programs that may have found them.
#[btf_map]
pub static EGRESS_SHARES: LpmTrie<EgressShareData, EgressShareValue, { MAX_SHARES as usize }> = LpmTrie::new();

/// Other nodes of the cluster.
#[btf_map]
pub static NODES: Array<NodeRow, { MAX_NODES as usize }> = Array::new();

/// Numbers of networks in the cluster, by network.
#[btf_map]
pub static NUMBERS: HashMap<u32, u32, { MAX_NETWORKS as usize }, NO_PREALLOC> = HashMap::new();

/// Networks by their numbers in the cluster.
#[btf_map]
pub static NETWORKS: HashMap<u32, u32, { MAX_NETWORKS as usize }, NO_PREALLOC> = HashMap::new();

/// The tunnel between nodes.
#[btf_map]
pub static OVERLAY: Array<Overlay, 1> = Array::new();

/// Outcome of the last dry run.
#[btf_map]
pub static EXPLANATION: Array<Explanation, 1> = Array::new();

/// Drop events for the agent.
#[btf_map]
pub static DROP_EVENTS: Ring = RingBuf::new();

/// Events of new flows for the agent: a flood of drops does not displace them, nor the reverse.
#[btf_map]
pub static FLOW_EVENTS: Ring = RingBuf::new();
