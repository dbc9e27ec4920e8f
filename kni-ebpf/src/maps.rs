//! Declares every pinned map. Names, kinds and sizes are those of `kni_common::layout::ALL_MAPS`; the agent compares
//! them.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, PerCpuHashMap, RingBuf},
    macros::btf_map,
};
use kni_common::{
    address::{AddressKey, AddressValue},
    config::{Config, FlowShare},
    counter::{COUNTERS_PER_ENDPOINT, Counter, DropKey, EventGate, HitKey},
    endpoint::EndpointRow,
    event::{Explanation, FlowEvent},
    flow::{FlowKey4, FlowKey6, FlowValue, FragmentKey, FragmentValue},
    layout::{DEFAULT_MAX_ENDPOINTS, DEFAULT_MAX_FLOWS, DEFAULT_MAX_POLICY_ROWS, DEFAULT_MAX_SERVICES},
    policy::{IdentityData, IdentityValue, PolicyKey, PolicyValue, PortData, PortValue},
    route::{RouteData, RouteValue},
    service::{AffinityKey, AffinityValue, BackendKey, BackendValue, ServiceKey, ServiceValue},
    uplink::{HostPortKey, HostPortValue, Masquerade, SourceData, SourceValue},
};

const ENDPOINTS_MAX: usize = DEFAULT_MAX_ENDPOINTS as usize;
const FLOWS_MAX: usize = DEFAULT_MAX_FLOWS as usize;
const POLICY_MAX: usize = DEFAULT_MAX_POLICY_ROWS as usize;
const SERVICES_MAX: usize = DEFAULT_MAX_SERVICES as usize;
const COUNTERS_MAX: usize = (DEFAULT_MAX_ENDPOINTS * COUNTERS_PER_ENDPOINT) as usize;
/// Rows come and go with pods and reasons: memory is allocated when a row is written.
const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

/// Endpoints by id.
#[btf_map]
pub static ENDPOINTS: Array<EndpointRow, ENDPOINTS_MAX> = Array::new();

/// Endpoints by the index of their host interface, where a CNI plugin created it.
#[btf_map]
pub static INTERFACES: HashMap<u32, u32, ENDPOINTS_MAX, NO_PREALLOC> = HashMap::new();

/// Local endpoints and services by network and address.
#[btf_map]
pub static ADDRESSES: HashMap<AddressKey, AddressValue, { 2 * ENDPOINTS_MAX + SERVICES_MAX }, NO_PREALLOC> =
    HashMap::new();

/// Actions for destinations that are not local endpoints, by network and prefix.
#[btf_map]
pub static ROUTES: LpmTrie<RouteData, RouteValue, 16_384> = LpmTrie::new();

/// IPv4 flows.
#[btf_map]
pub static FLOWS4: LruHashMap<FlowKey4, FlowValue, FLOWS_MAX> = LruHashMap::new();

/// IPv6 flows.
#[btf_map]
pub static FLOWS6: LruHashMap<FlowKey6, FlowValue, FLOWS_MAX> = LruHashMap::new();

/// Ports of fragmented datagrams.
#[btf_map]
pub static FRAGMENTS: LruHashMap<FragmentKey, FragmentValue, 8192> = LruHashMap::new();

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

/// Source prefixes that are denied from outside.
#[btf_map]
pub static SOURCES: LpmTrie<SourceData, SourceValue, 16_384> = LpmTrie::new();

/// Outcome of the last dry run.
#[btf_map]
pub static EXPLANATION: Array<Explanation, 1> = Array::new();

/// Flow and drop events for the agent.
#[btf_map]
pub static EVENTS: RingBuf<FlowEvent, { 1 << 20 }> = RingBuf::new();
