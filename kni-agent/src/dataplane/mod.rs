//! Drives the eBPF dataplane: loads the programs, attaches them, keeps the pinned maps; the only user of bpf(2).
//! Layer: driver.

mod counters;
mod error;
mod events;
mod hook;
mod inspect;
mod maps;
mod object;
mod pin;
mod trace;

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use aya::{Ebpf, programs::TestRun as _};
pub use counters::DropCount;
pub use error::DataplaneError;
pub use events::{DropRecord, EventStream};
pub use hook::{Hook, HookChoice};
use kni_common::{Direction, Verdict};
pub use maps::EndpointConfig;
pub use object::embedded;

use self::{maps::Maps, pin::Pins};
use crate::model::{
    EndpointId, NetworkId,
    view::{Count, EndpointCounts, MapView, ProgramView},
};

/// How the dataplane is opened.
#[derive(Debug, Clone)]
pub struct DataplaneOptions {
    /// The ELF; see [`embedded`].
    pub object: Vec<u8>,
    /// Folder on bpffs that holds everything of ours. bpffs is mounted where it is missing.
    pub root: PathBuf,
    /// Endpoints that fit, the unused row 0 included.
    pub max_endpoints: u32,
    /// Flow rows per address family.
    pub max_flows: u32,
    /// Which hook to use.
    pub hook: HookChoice,
}

/// The loaded programs and their maps.
///
/// # Guarantees
/// - Programs and maps are pinned: traffic goes on while no agent runs.
/// - A second `open` uses the first one's maps, after comparing their layout, and `adopt` moves interfaces to the new
///   programs without a gap.
/// - One writer: all map writes go through one lock.
pub struct Dataplane {
    programs: Mutex<Ebpf>,
    maps: Mutex<Maps>,
    pins: Pins,
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
        let specs = maps::specs(options.max_endpoints, options.max_flows);
        pins.check_maps(&specs)?;
        let mut ebpf = object::load(&options.object, &pins, &specs)?;
        trace::follow(&mut ebpf);
        let (maps, events) = Maps::take(&mut ebpf)?;
        let hook = Hook::choose(options.hook)?;
        let dataplane = Self {
            programs: Mutex::new(ebpf),
            maps: Mutex::new(maps),
            pins,
            hook,
            provisional: Mutex::default(),
            may_be_provisional: hook == Hook::Tcx && options.hook == HookChoice::Auto,
            max_endpoints: options.max_endpoints,
        };
        Ok((dataplane, EventStream::new(events)?))
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
        for direction in [Direction::FromPod, Direction::ToPod] {
            hook::attach(&mut programs, self.hook, &self.pins, ifname, endpoint, direction)?;
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
        for direction in [Direction::FromPod, Direction::ToPod] {
            hook::attach(&mut programs, Hook::Clsact, &self.pins, ifname, endpoint, direction)?;
        }
        lock(&self.provisional).insert(endpoint);
        Ok(())
    }

    /// Whether the endpoint still runs on clsact filters and should not.
    pub fn is_provisional(&self, endpoint: EndpointId) -> bool {
        lock(&self.provisional).contains(&endpoint)
    }

    /// Puts TCX links in the place of clsact filters. The links work before the filters go, so that no packet passes
    /// without a program; one that goes to the stack in between is counted twice. Blocking, as [`Self::attach`].
    pub fn upgrade(&self, ifname: &str, endpoint: EndpointId) -> Result<(), DataplaneError> {
        self.adopt(ifname, endpoint)?;
        lock(&self.provisional).remove(&endpoint);
        Ok(())
    }

    /// Moves a host interface that an earlier agent attached to this agent's programs (`bpf_link_update`, atomic,
    /// about 1 us); attaches what is missing.
    pub fn adopt(&self, ifname: &str, endpoint: EndpointId) -> Result<(), DataplaneError> {
        let mut programs = lock(&self.programs);
        for direction in [Direction::FromPod, Direction::ToPod] {
            hook::adopt(&mut programs, self.hook, &self.pins, ifname, endpoint, direction)?;
        }
        Ok(())
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

    /// Makes an endpoint ready: its row, its addresses, in the order that never lets a packet meet half of it (I1, I2).
    pub fn publish(&self, endpoint: &EndpointConfig) -> Result<(), DataplaneError> {
        lock(&self.maps).publish(endpoint)
    }

    /// Brings an endpoint that has been published by an earlier agent up to date without interrupting its traffic.
    pub fn republish(&self, endpoint: &EndpointConfig) -> Result<(), DataplaneError> {
        lock(&self.maps).republish(endpoint)
    }

    /// Stops an endpoint's traffic and forgets its addresses and counters. Succeeds when there is nothing left to do.
    pub fn withdraw(&self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        lock(&self.maps).withdraw(endpoint)
    }

    /// Forgets addresses whose endpoint does not have them: an agent that is killed inside [`Self::withdraw`] leaves
    /// them without a row that tells of them. For the start, after [`Self::republish`] of what is kept.
    pub fn forget_stale_addresses(&self) -> Result<(), DataplaneError> {
        lock(&self.maps).forget_stale_addresses()
    }

    /// Endpoints whose rows or addresses are set, whoever set them.
    pub fn published_endpoints(&self) -> Result<Vec<EndpointId>, DataplaneError> {
        lock(&self.maps).published(self.max_endpoints)
    }

    /// Says what becomes of a network's packets to addresses of no endpoint: inside `subnets` they are dropped;
    /// elsewhere they go to the node's stack if `host_access`, else they are dropped.
    pub fn set_routes(
        &self,
        network: NetworkId,
        subnets: &[ipnet::IpNet],
        host_access: bool,
    ) -> Result<(), DataplaneError> {
        lock(&self.maps).set_routes(network, subnets, host_access)
    }

    /// Forgets the routes of all networks but these.
    pub fn retain_routes(&self, networks: &[NetworkId]) -> Result<(), DataplaneError> {
        lock(&self.maps).retain_routes(networks)
    }

    /// What passed an endpoint.
    pub fn counts(&self, endpoint: EndpointId) -> Result<EndpointCounts, DataplaneError> {
        lock(&self.maps).counts(endpoint)
    }

    /// All drops that were counted, by endpoint, direction and reason.
    pub fn drops(&self) -> Result<Vec<DropCount>, DataplaneError> {
        lock(&self.maps).drops()
    }

    /// What passed an endpoint, by verdict; zero rows left out. With [`Self::drops`] it accounts for every packet.
    pub fn forwarded(&self, endpoint: EndpointId) -> Result<Vec<(Direction, Verdict, Count)>, DataplaneError> {
        lock(&self.maps).forwarded(endpoint)
    }

    /// Runs a program on one packet without any interface taking part (`BPF_PROG_TEST_RUN`), for tests and benchmarks.
    pub fn test_run(
        &self,
        program: &'static str,
        options: aya::TestRunOptions<'_>,
    ) -> Result<aya::TestRunResult, DataplaneError> {
        let mut programs = lock(&self.programs);
        let classifier = object::classifier(&mut programs, program)?;
        classifier.test_run(options).map_err(|error| DataplaneError::Load {
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
        hook::inspect(&lock(&self.programs), hook, &self.pins, ifname, endpoint)
    }

    /// Whether the endpoint's row says what it should.
    pub fn verify(&self, endpoint: &EndpointConfig) -> Vec<String> {
        lock(&self.maps).verify(endpoint)
    }

    /// The pinned maps. Counts rows, which takes milliseconds for a full flow table.
    pub fn maps(&self) -> Result<Vec<MapView>, DataplaneError> {
        inspect::maps(&lock(&self.maps), &self.pins, self.max_endpoints)
    }
}

/// Removes every pin below the folder, and the folder. Programs of interfaces that still exist are detached.
pub fn remove_pins(root: &std::path::Path) -> Result<(), DataplaneError> {
    pin::remove_all(root)
}
