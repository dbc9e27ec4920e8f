//! Drives the eBPF dataplane: loads the programs, attaches them, keeps the pinned maps; the only user of bpf(2).
//! Layer: driver.

mod batch;
mod clock;
mod counters;
mod dry_run;
mod endpoint;
mod enforce;
mod error;
mod events;
mod flow_list;
mod flows;
mod hook;
mod inspect;
mod link_info;
mod maps;
mod object;
mod pin;
mod policy;
mod routes;
mod services;
mod settings;
mod specs;
mod stats;
mod syscall;
mod tables;
mod trace;
mod tuple;
mod uplink;
mod xdp;

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use aya::{Ebpf, programs::TestRun as _};
pub use counters::DropCount;
pub use dry_run::Probe;
pub use endpoint::EndpointConfig;
pub use error::DataplaneError;
pub use events::{EventStream, FlowRecord};
pub use flow_list::{FlowRecordView, FlowTuple};
pub use flows::FlowCensus;
pub use hook::{Hook, HookChoice};
use kni_common::layout::MapSpec;
use kni_model::{EndpointId, view::ProgramView};
pub use routes::{NetworkRoutes, NodeRoutes, RouteEgress};
pub use settings::{FlowLifetimes, NodeConfig};
pub use stats::{CountingRuns, ProgramStats};
pub use uplink::{EgressSource, HostPort, host_port_key, remove_uplink_filters};
pub use xdp::{XdpChoice, XdpMode};

use self::{
    clock::Ticks, dry_run::DryRun, flows::FlowTables, hook::Seat, maps::Maps, pin::Pins, policy::PolicyMaps,
    services::ServiceMaps, uplink::UplinkMaps,
};

/// How the dataplane is opened.
#[derive(Debug, Clone)]
pub struct DataplaneOptions {
    /// The ELF of the programs.
    pub object: Vec<u8>,
    /// Folder on bpffs that holds everything of ours. bpffs is mounted where it is missing.
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
/// - Programs and maps are pinned: traffic goes on while no agent runs.
/// - A second `open` uses the first one's maps, after comparing their layout, and `adopt` moves interfaces to the new
///   programs without a gap.
/// - One writer: each map is written under one lock. Those of policy, services and the uplink have locks of their own, so that
///   thousands of their rows keep no attachment waiting; whoever holds one of these may take that of the endpoints, never
///   the other way round. The flow tables have none: the programs write them too.
pub struct Dataplane {
    programs: Mutex<Ebpf>,
    program_ids: object::ProgramIds,
    maps: Mutex<Maps>,
    policy: Mutex<PolicyMaps>,
    services: Mutex<ServiceMaps>,
    uplink: Mutex<UplinkMaps>,
    flows: FlowTables,
    dry_run: Mutex<DryRun>,
    /// What the last sweep found.
    census: Mutex<Option<FlowCensus>>,
    ticks: Ticks,
    pins: Pins,
    specs: Vec<MapSpec>,
    hook: Hook,
    /// Endpoints that run on clsact filters until there is time for TCX links.
    provisional: Mutex<BTreeSet<EndpointId>>,
    may_be_provisional: bool,
    max_endpoints: u32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere leaves the kernel's state as it is; the maps hold no invariant of ours in memory.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Dataplane {
    /// Loads every program through the verifier and opens or creates every map.
    pub fn open(options: &DataplaneOptions) -> Result<(Self, EventStream), DataplaneError> {
        let pins = Pins::prepare(&options.root)?;
        let specs = specs::specs(options);
        pins.check_maps(&specs)?;
        let mut ebpf = object::load(&options.object, &pins, &specs, object::Purpose::Traffic)?;
        trace::follow(&mut ebpf);
        let events = EventStream::new(&mut ebpf)?;
        let hook = Hook::choose(options.hook)?;
        let dataplane = Self {
            program_ids: object::ids(&ebpf),
            programs: Mutex::new(ebpf),
            maps: Mutex::new(Maps::open(&pins)?),
            policy: Mutex::new(PolicyMaps::open(&pins)?),
            services: Mutex::new(ServiceMaps::open(&pins)?),
            uplink: Mutex::new(UplinkMaps::open(&pins)?),
            flows: FlowTables::open(&pins)?,
            dry_run: Mutex::new(DryRun::new(options.object.clone(), specs.clone(), &pins)?),
            census: Mutex::default(),
            ticks: Ticks::of_kernel()?,
            pins,
            specs,
            hook,
            provisional: Mutex::default(),
            may_be_provisional: hook == Hook::Tcx && options.hook == HookChoice::Auto,
            max_endpoints: options.max_endpoints,
        };
        Ok((dataplane, events))
    }

    /// The hook in use.
    pub fn hook(&self) -> Hook {
        self.hook
    }

    /// Endpoints that fit (row 0 is none).
    pub fn capacity(&self) -> u32 {
        self.max_endpoints.saturating_sub(1)
    }

    /// Folder of the pinned maps.
    pub fn pin_path(&self) -> PathBuf {
        self.pins.maps_dir()
    }

    /// Attaches both programs to a host interface, pinned where the hook has links. TCX: about 16 ms per direction
    /// under rtnl (an RCU grace period), so blocking; clsact: about 40 us.
    pub fn attach(&self, ifname: &str, endpoint: EndpointId) -> Result<(), DataplaneError> {
        let mut programs = lock(&self.programs);
        for seat in Seat::of_endpoint(&self.pins, ifname, endpoint) {
            hook::attach(&mut programs, self.hook, &seat)?;
        }
        Ok(())
    }

    /// As [`Self::attach`], but with what is fastest now: clsact filters instead of TCX links, unless TCX was asked
    /// for by name. [`Self::upgrade`] replaces them when nobody waits.
    pub fn attach_provisionally(&self, ifname: &str, endpoint: EndpointId) -> Result<(), DataplaneError> {
        if !self.may_be_provisional {
            return self.attach(ifname, endpoint);
        }
        let mut programs = lock(&self.programs);
        for seat in Seat::of_endpoint(&self.pins, ifname, endpoint) {
            hook::attach(&mut programs, Hook::Clsact, &seat)?;
        }
        lock(&self.provisional).insert(endpoint);
        Ok(())
    }

    /// Whether the endpoint still runs on clsact filters and should not.
    pub fn is_provisional(&self, endpoint: EndpointId) -> bool {
        lock(&self.provisional).contains(&endpoint)
    }

    /// How many endpoints still run on clsact filters and should not.
    pub fn provisional_count(&self) -> usize {
        lock(&self.provisional).len()
    }

    /// Puts TCX links in the place of clsact filters. The links work before the filters go, so that no packet passes
    /// without a program, and each passes one. Blocking, as [`Self::attach`].
    pub fn upgrade(&self, ifname: &str, endpoint: EndpointId) -> Result<(), DataplaneError> {
        self.adopt(ifname, endpoint)?;
        lock(&self.provisional).remove(&endpoint);
        Ok(())
    }

    /// Moves a host interface that an earlier agent attached to this agent's programs (`bpf_link_update`, atomic,
    /// about 1 us); attaches what is missing.
    pub fn adopt(&self, ifname: &str, endpoint: EndpointId) -> Result<(), DataplaneError> {
        let mut programs = lock(&self.programs);
        lock(&self.maps).hand_over(endpoint, true)?;
        let mut seats = Seat::of_endpoint(&self.pins, ifname, endpoint).into_iter();
        let adopted = seats.try_for_each(|seat| hook::adopt(&mut programs, self.hook, &seat));
        lock(&self.maps).hand_over(endpoint, false)?;
        adopted
    }

    /// Brings `xdp_pod` to a host interface, in the driver and before the other programs; a link of an earlier agent is
    /// taken over in place. Before, make the pod end fit for it: what it sends must have finished checksums, and it must
    /// take frames that are no `sk_buff`s. About 20 us for a new link. Idempotent.
    pub fn attach_xdp(&self, ifname: &str, ifindex: u32, endpoint: EndpointId) -> Result<(), DataplaneError> {
        xdp::set_pod(&mut lock(&self.programs), &self.pins, ifname, ifindex, endpoint)
    }

    /// Forgets the pins of an endpoint. Call it after the interface is gone: while it exists, this detaches, which
    /// costs as much as attaching.
    pub fn unpin(&self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        lock(&self.provisional).remove(&endpoint);
        self.pins.remove_links(endpoint)
    }

    /// Forgets pins of other layout versions. Call it once every interface has been adopted: until then their programs
    /// use those maps.
    pub fn forget_other_layouts(&self) -> Result<(), DataplaneError> {
        self.pins.remove_other_layouts()
    }

    /// Endpoints that have pinned links, whoever made them.
    pub fn pinned_endpoints(&self) -> Result<Vec<EndpointId>, DataplaneError> {
        self.pins.linked_endpoints()
    }

    /// Runs a program on one packet without any interface taking part (`BPF_PROG_TEST_RUN`), for tests and benchmarks.
    pub fn test_run(
        &self,
        program: &'static str,
        options: aya::TestRunOptions<'_>,
    ) -> Result<aya::TestRunResult, DataplaneError> {
        let mut programs = lock(&self.programs);
        let ran = if program == object::XDP_POD {
            object::xdp(&mut programs, program)?.test_run(options)
        } else {
            object::classifier(&mut programs, program)?.test_run(options)
        };
        ran.map_err(|error| DataplaneError::Load {
            program,
            reason: format!("test run: {error}"),
        })
    }

    /// The programs at a host interface, as the kernel tells it, and what is wrong with them.
    pub fn programs(&self, ifname: &str, endpoint: EndpointId) -> (Vec<ProgramView>, Vec<String>) {
        let hook = if self.is_provisional(endpoint) {
            Hook::Clsact
        } else {
            self.hook
        };
        let seats = Seat::of_endpoint(&self.pins, ifname, endpoint);
        hook::inspect(&self.program_ids, hook, &seats)
    }

    /// `xdp_pod` at a host interface that should have it, or what is wrong.
    pub fn xdp_program(&self, ifname: &str, ifindex: u32, endpoint: EndpointId) -> Result<ProgramView, String> {
        xdp::inspect_pod(&self.program_ids, &self.pins, ifname, ifindex, endpoint)
    }
}

/// Removes every pin below the folder, and the folder. Programs of interfaces that still exist are detached.
pub fn remove_pins(root: &std::path::Path) -> Result<(), DataplaneError> {
    pin::remove_all(root)
}
