//! Drives the eBPF dataplane: loads and attaches the programs, owns the pinned maps. The only user of bpf(2).
//! Layer: driver.

mod attach;
mod bpf;
mod cgroup;
mod clock;
mod counters;
mod dry_run;
mod egress;
mod endpoint_row;
mod endpoints;
mod enforce;
mod error;
mod events;
mod exposed;
mod fabric;
mod flow_list;
mod flows;
mod generation;
mod held;
mod hook;
mod inspect;
mod interface_name;
mod membarrier;
mod node_sockets;
mod object;
mod overlay;
mod pin;
mod policy;
mod preemption;
mod program;
mod program_log;
mod published;
mod records;
mod remote;
mod repair;
mod route_change;
mod routes;
mod services;
mod settings;
mod specs;
mod stats;
mod table;
mod tuple;
mod uplink;
mod way;
mod xdp;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aya::Ebpf;
pub use counters::DropCount;
pub use dry_run::{Probe, SupposedTunnel};
pub use egress::{Answering, EgressShares};
pub use endpoint_row::EndpointConfig;
pub use error::DataplaneError;
pub use events::{EventStream, FlowRecord};
pub use fabric::{FabricRows, Hop, NetworkFabric, OtherNode, TunnelEnds};
pub use flow_list::{FlowRecordView, FlowTuple};
pub use flows::{FlowCensus, FlowUse};
pub use hook::{FILTER_PRIORITY, Hook, HookChoice};
pub use interface_name::interface_name;
use kni_common::{
    Direction, Verdict, address::from_ip, counter::HitKey, event::Explanation, flow::Ports, layout::MapSpec,
};
use kni_model::{
    EndpointId, NetworkId, PolicyStep, PolicyTables,
    view::{Count, EndpointCounts, MapView},
};
pub use records::{CopiedRecord, RecordMap};
pub use routes::{NetworkRoutes, NodeRoutes, RouteEgress};
pub use settings::{FlowLifetimes, NodeConfig};
pub use stats::{CountingRuns, ProgramStats};
pub use uplink::{EgressRow, EgressSource, HostPort, host_port_key, remove_uplink_filters};
pub use way::Way;
pub use xdp::{NotAttached, XdpChoice, XdpMode};

use self::{
    clock::{Clock, Ticks},
    dry_run::DryRun,
    endpoints::EndpointMaps,
    fabric::FabricMaps,
    flows::FlowTables,
    held::HeldPins,
    pin::Pins,
    policy::PolicyMaps,
    services::ServiceMaps,
    tuple::Tuple,
    uplink::UplinkMaps,
};

/// How the dataplane is opened.
#[derive(Debug, Clone)]
pub struct DataplaneOptions {
    /// The ELF of the programs.
    pub object: Vec<u8>,
    /// Folder on bpffs for all pins. bpffs is mounted where it is missing.
    pub root: PathBuf,
    /// Endpoints that fit, the unused row 0 included.
    pub max_endpoints: u32,
    /// Flow rows per address family.
    pub max_flows: u32,
    /// Rows of policy sets, of port sets and of identities each.
    pub max_policy_rows: u32,
    /// Service ports by virtual address; four times as many backends fit.
    pub max_services: u32,
    /// Which hook to use.
    pub hook: HookChoice,
}

/// The loaded programs and their maps.
///
/// # Guarantees
/// - Programs and maps are pinned: traffic continues while no agent runs.
/// - A second `open` uses the maps of the first one, after comparing their layout, and `adopt` moves interfaces to the
///   new programs without a gap.
/// - One writer: each map is written under one lock. Those of policy, services and the uplink have locks of their own,
///   so that thousands of their rows delay no attachment; a holder of one of these may take the endpoints' lock, never
///   the other way round. The flow tables have none: the programs write them too.
pub struct Dataplane {
    programs: Mutex<Ebpf>,
    program_ids: object::ProgramIds,
    endpoints: Mutex<EndpointMaps>,
    policy: Mutex<PolicyMaps>,
    services: Mutex<ServiceMaps>,
    uplink: Mutex<UplinkMaps>,
    /// Locked before `endpoints`.
    fabric: Mutex<FabricMaps>,
    flows: FlowTables,
    dry_run: Mutex<DryRun>,
    clock: Clock,
    /// Result of the last sweep.
    census: Mutex<Option<FlowCensus>>,
    ticks: Ticks,
    root: PathBuf,
    pins: Pins,
    held: HeldPins,
    records: Arc<RecordMap>,
    specs: Vec<MapSpec>,
    hook: Hook,
    /// Endpoints on clsact filters that wait for TCX links.
    provisional: Mutex<BTreeSet<EndpointId>>,
    may_be_provisional: bool,
    max_endpoints: u32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in another thread leaves the kernel's state unchanged; the memory holds no invariant about the maps.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Dataplane {
    /// Loads every program through the verifier and opens or creates every map.
    pub fn open(options: &DataplaneOptions) -> Result<(Self, EventStream), DataplaneError> {
        preemption::check()?;
        let pins = Pins::prepare(&options.root)?;
        let specs = specs::specs(options);
        pins.check_maps(&specs)?;
        let mut ebpf = object::load(&options.object, &pins, &specs, object::Purpose::Traffic)?;
        program_log::forward(&mut ebpf);
        let events = EventStream::new(&mut ebpf)?;
        let hook = Hook::choose(options.hook)?;
        let records = Arc::new(RecordMap::open(&options.root, options.max_endpoints)?);
        let held = HeldPins::new();
        for spec in &specs {
            held.hold(&pins.map(spec.name));
        }
        held.hold(&RecordMap::pin(&options.root));
        let clock = Clock::load(&mut ebpf)?;
        let dry_run = DryRun::new(options.object.clone(), specs.clone(), &pins)?;
        let dataplane = Self {
            program_ids: object::ids(&ebpf),
            programs: Mutex::new(ebpf),
            endpoints: Mutex::new(EndpointMaps::open(&pins)?),
            policy: Mutex::new(PolicyMaps::open(&pins)?),
            services: Mutex::new(ServiceMaps::open(&pins)?),
            uplink: Mutex::new(UplinkMaps::open(&pins)?),
            fabric: Mutex::new(FabricMaps::open(&pins)?),
            flows: FlowTables::open(&pins)?,
            dry_run: Mutex::new(dry_run),
            clock,
            census: Mutex::default(),
            ticks: Ticks::of_kernel()?,
            root: options.root.clone(),
            pins,
            held,
            records,
            specs,
            hook,
            provisional: Mutex::default(),
            may_be_provisional: hook == Hook::Tcx && options.hook == HookChoice::Auto,
            max_endpoints: options.max_endpoints,
        };
        Ok((dataplane, events))
    }

    /// The copy of the agent's records.
    pub fn records(&self) -> &Arc<RecordMap> {
        &self.records
    }

    /// Folder of the pinned maps.
    pub fn pin_path(&self) -> PathBuf {
        self.pins.maps_dir()
    }

    /// Sets the route action of a network's packets to addresses without endpoint. Where the network's egress changes,
    /// its flows that used the old one are evaluated again.
    pub fn set_routes(&self, network: NetworkId, routes: &NetworkRoutes) -> Result<(), DataplaneError> {
        if lock(&self.endpoints).set_routes(network, routes)? {
            let endpoints = lock(&self.endpoints).rows()?;
            self.flows.remove_external(network, &endpoints)?;
        }
        lock(&self.endpoints).renew_moved()
    }

    /// Removes the routes of all other networks.
    pub fn retain_routes(&self, networks: &[NetworkId]) -> Result<(), DataplaneError> {
        lock(&self.endpoints).routes.retain(networks)
    }

    /// Sets the node's own addresses and the subnets it is connected to: networks that masquerade send no packet for
    /// one of them out of the node.
    pub fn set_node_routes(&self, node: NodeRoutes) -> Result<(), DataplaneError> {
        let mut endpoints = lock(&self.endpoints);
        let written = endpoints.routes.set_node(node);
        written.and(endpoints.renew_moved())
    }

    /// Sets the virtual addresses of services that another proxy serves: the node's stack gets their packets, even
    /// within a network's ranges of virtual addresses. Only endpoints with host access reach them.
    pub fn set_foreign_services(
        &self,
        addresses: &BTreeMap<NetworkId, BTreeSet<IpAddr>>,
    ) -> Result<(), DataplaneError> {
        let mut endpoints = lock(&self.endpoints);
        let written = endpoints.routes.set_foreign(addresses);
        written.and(endpoints.renew_moved())
    }

    /// Packet and byte counts of an endpoint.
    pub fn counts(&self, endpoint: EndpointId) -> Result<EndpointCounts, DataplaneError> {
        lock(&self.endpoints).counts(endpoint)
    }

    /// All counted drops, by endpoint, direction and reason.
    pub fn drops(&self) -> Result<Vec<DropCount>, DataplaneError> {
        lock(&self.endpoints).drops()
    }

    /// Forwarded packets of an endpoint by verdict, without zero rows. With [`Self::drops`] it accounts for every
    /// packet.
    pub fn forwarded(&self, endpoint: EndpointId) -> Result<Vec<(Direction, Verdict, Count)>, DataplaneError> {
        lock(&self.endpoints).forwarded(endpoint)
    }

    /// The pinned maps. Counts rows, which takes milliseconds for a full flow table.
    pub fn maps(&self) -> Result<Vec<MapView>, DataplaneError> {
        inspect::maps(&self.pins, &self.specs, self.published_count()?)
    }

    /// Fill level of each map with keys: name, rows, rows that fit. Walks the maps, 0.3 us per row; swept flow tables
    /// are not walked again.
    pub fn map_pressure(&self) -> Result<Vec<(String, u32, u32)>, DataplaneError> {
        let census = lock(&self.census).clone();
        inspect::pressure(&self.pins, &self.specs, self.published_count()?, census.as_ref())
    }

    /// The rows of policy. Endpoints are the published ones.
    pub fn policy_tables(&self) -> Result<PolicyTables, DataplaneError> {
        lock(&self.policy).tables(&self.endpoints)
    }

    /// Applies steps in order and stops at the first failure: the state then is safe, and another attempt may start
    /// from [`Self::policy_tables`].
    pub fn apply_policy(&self, steps: &[PolicyStep]) -> Result<(), DataplaneError> {
        lock(&self.policy).apply(&self.endpoints, steps)
    }

    /// How often a rule of a policy set allowed a flow, or the set denied one.
    pub fn hits(&self) -> Result<BTreeMap<HitKey, u64>, DataplaneError> {
        lock(&self.policy).hits()
    }

    /// Removes the hits of deleted policy sets.
    pub fn remove_hits(&self, sets: &[u32]) -> Result<(), DataplaneError> {
        lock(&self.policy).remove_hits(sets)
    }

    /// Writes the node's settings. Until then the programs have the row of an earlier agent, or zeros.
    pub fn configure(&self, config: &NodeConfig) -> Result<(), DataplaneError> {
        let endpoints = lock(&self.endpoints);
        let current = endpoints.config.get(&0)?.unwrap_or_default();
        endpoints.config.put(&0, &config.row(self.ticks, current))
    }

    /// Timer ticks (jiffies) per second of this kernel.
    pub fn hz(&self) -> u32 {
        self.ticks.hz()
    }

    /// Removes expired flow rows, counts the others by endpoint and publishes the counts to the programs. Must be
    /// called every second: after two windows of 2^13 ticks without a call, the programs limit rates instead of
    /// numbers. Blocking, 0.3 us per row and 0.6 us more for each removed one.
    pub fn sweep_flows(&self) -> Result<FlowCensus, DataplaneError> {
        let now = self.clock.jiffies()?;
        let moved = lock(&self.endpoints).move_generations_near()?;
        lock(&self.uplink).set_incarnations(&moved)?;
        let endpoints = lock(&self.endpoints).rows()?;
        let egress = lock(&self.uplink).egress()?;
        let census = self.flows.sweep(now, &endpoints, &egress)?;
        *lock(&self.census) = Some(census.clone());
        Ok(census)
    }

    /// Ports that masquerading used at the last sweep, by family (whether it is IPv4) and protocol number.
    pub fn masquerade_ports(&self) -> BTreeMap<(bool, u8), u32> {
        let census = lock(&self.census);
        census
            .as_ref()
            .map(|census| census.masquerade.clone())
            .unwrap_or_default()
    }

    /// Every row of the flow tables.
    pub fn flows(&self) -> Result<Vec<FlowRecordView>, DataplaneError> {
        let now = self.clock.jiffies()?;
        self.flows.views(now, self.ticks)
    }

    /// Whether a flow of packets between these addresses and ports has a row; ICMP echo: the identifier is the source
    /// port, and the destination port is 0.
    pub fn has_flow(
        &self,
        network: NetworkId,
        source: SocketAddr,
        destination: SocketAddr,
        protocol: u8,
    ) -> Result<bool, DataplaneError> {
        self.flows.contains(&Tuple {
            network: network.get(),
            source: from_ip(source.ip()),
            destination: from_ip(destination.ip()),
            ports: Ports {
                source: source.port().to_be_bytes(),
                destination: destination.port().to_be_bytes(),
            },
            protocol,
        })
    }

    /// Events that were not sent because an endpoint had too many, or because the ring was full.
    pub fn lost_events(&self) -> Result<u64, DataplaneError> {
        lock(&self.endpoints).lost_events()
    }

    /// Explains the current decision of the programs about a packet. Nothing is sent, counted or recorded.
    pub fn explain(&self, probe: &Probe) -> Result<Explanation, DataplaneError> {
        let ifindex = match probe.tunnel {
            Some(_) => 0,
            None => lock(&self.endpoints).host_ifindex(probe.endpoint)?,
        };
        lock(&self.dry_run).explain(&self.pins, probe, ifindex)
    }

    /// Runs and run time of each program, counted while [`Self::count_program_runs`] was held.
    pub fn program_stats(&self) -> Result<Vec<ProgramStats>, DataplaneError> {
        stats::of_programs(&lock(&self.programs))
    }

    /// Makes the kernel count runs of programs for as long as the result is held (`BPF_ENABLE_STATS`).
    pub fn count_program_runs(&self) -> Result<CountingRuns, DataplaneError> {
        stats::count_runs()
    }
}

/// Removes every pin below the folder, and the folder. Programs of interfaces that still exist are detached.
pub fn remove_pins(root: &std::path::Path) -> Result<(), DataplaneError> {
    pin::remove_all(root)
}
