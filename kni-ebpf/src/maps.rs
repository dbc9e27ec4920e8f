//! Every map of the dataplane. Names, kinds and sizes are those of `kni_common::layout::ALL_MAPS`; the agent compares.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, PerCpuHashMap, RingBuf},
    macros::btf_map,
};
use kni_common::{
    address::{AddressKey, AddressValue},
    counter::{COUNTERS_PER_ENDPOINT, Counter, DropKey, EventGate},
    endpoint::EndpointRow,
    event::DropEvent,
    flow::{FlowKey4, FlowKey6, FlowValue, FragmentKey, FragmentValue},
    layout::{DEFAULT_MAX_ENDPOINTS, DEFAULT_MAX_FLOWS},
    route::{RouteData, RouteValue},
};

const ENDPOINTS_MAX: usize = DEFAULT_MAX_ENDPOINTS as usize;
const FLOWS_MAX: usize = DEFAULT_MAX_FLOWS as usize;
const COUNTERS_MAX: usize = (DEFAULT_MAX_ENDPOINTS * COUNTERS_PER_ENDPOINT) as usize;
/// Rows come and go with pods and reasons: memory is taken when one is written.
const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

/// Endpoints by id.
#[btf_map]
pub static ENDPOINTS: Array<EndpointRow, ENDPOINTS_MAX> = Array::new();

/// Local endpoints by network and address.
#[btf_map]
pub static ADDRESSES: HashMap<AddressKey, AddressValue, { 2 * ENDPOINTS_MAX }, NO_PREALLOC> = HashMap::new();

/// What is not a local endpoint, by network and prefix.
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

/// Packets and bytes that went on.
#[btf_map]
pub static COUNTERS: PerCpuArray<Counter, COUNTERS_MAX> = PerCpuArray::new();

/// Packets and bytes that were dropped.
#[btf_map]
pub static DROPS: PerCpuHashMap<DropKey, Counter, { 16 * ENDPOINTS_MAX }, NO_PREALLOC> = PerCpuHashMap::new();

/// Rate limit of events.
#[btf_map]
pub static EVENT_GATES: PerCpuArray<EventGate, ENDPOINTS_MAX> = PerCpuArray::new();

/// Drop events on their way to the agent.
#[btf_map]
pub static EVENTS: RingBuf<DropEvent, { 1 << 18 }> = RingBuf::new();
