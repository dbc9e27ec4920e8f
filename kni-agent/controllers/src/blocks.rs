//! Manages the address blocks of the node: claims a block before it is needed, and releases empty ones.
//!
//! The agent leases from the blocks that it holds ([`kni_cluster::BlockDemand`]). A block is held from the reply that
//! confirms the claim until the first request to release it; whatever happens to that request, only another confirmed
//! claim brings it back. Each minute, at the start and when the watch shows a loss, [`checks`] compares held blocks,
//! objects and leases.

mod checks;
mod desired;
mod inputs;
mod search;
mod used;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt as _, stream};
use ipnet::IpNet;
use kni_claims::{ClaimError, Claims, NetworkRef, NodeRef};
use kni_model::NetworkName;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

pub(super) use self::desired::GRACE;
use self::{
    desired::Step,
    search::{Found, Search},
    used::Used,
};
use super::{
    ObjectControllers,
    retry::{Retries, Retry},
};

/// Interval of the periodic round.
const ROUND: Duration = Duration::from_secs(1);
/// Changes that arrive within this time are processed together.
const GATHER: Duration = Duration::from_millis(20);
/// Interval of the checks.
const CHECK: Duration = Duration::from_mins(1);
/// The same while another node, or an earlier object of this one, has a block with addresses of this node's pods.
const CONFLICT_CHECK: Duration = Duration::from_secs(5);
/// Maximum duration of a claim or a release; one that takes longer is repeated.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of attempts to confirm the blocks before the networks are applied.
const LOADS: u32 = 5;
/// How long a unit of another node is not tried again.
const FOREIGN: Duration = Duration::from_secs(10);
/// Maximum number of units that are claimed for a network and family before other networks get their turn.
const MOST_AT_ONCE: usize = 64;
/// Maximum number of networks for which blocks are claimed concurrently.
const AT_ONCE: usize = 8;

/// A block of a network.
type Block = (NetworkName, IpNet);

/// The state between rounds.
#[derive(Default)]
struct Memory {
    /// The claims of this node, once its object is known.
    claims: Option<Claims>,
    /// The networks of the held blocks.
    networks: BTreeMap<NetworkName, NetworkRef>,
    /// Blocks that are being released: nothing is leased from them.
    leaving: BTreeSet<Block>,
    /// Since when a held block has no lease.
    empty: BTreeMap<Block, Instant>,
    /// Units of other nodes, and when they were tried.
    foreign: BTreeMap<Block, Instant>,
    /// Claims whose outcome is not known, by network and family.
    unsettled: BTreeMap<(NetworkName, bool), BTreeSet<IpNet>>,
    /// Networks whose last claim failed.
    failed: Retries<NetworkName>,
    /// The last complete check, and the failures since then.
    checked: Option<Instant>,
    checks: Retry,
    /// The last attempt to release blocks, and the failures.
    released: Option<Instant>,
    releases: Retry,
    /// Whether a check is due because a block may have been lost.
    lost: bool,
    /// Whether an object of an earlier node or network of the same name is left, in the way of a claim.
    unsettled_own: bool,
    /// Objects of held blocks that the watch has shown, and the version of its table.
    seen: BTreeSet<String>,
    seen_version: Option<u64>,
    /// The last failure, which is logged once.
    failure: String,
}

impl ObjectControllers {
    /// Claims and releases blocks for as long as the agent runs.
    pub(super) async fn reconcile_blocks(self: Arc<Self>) {
        let mut ticks = interval(ROUND);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut known = self.cache.changes();
        let mut attached = self.state.changes.clone();
        let mut memory = Memory::new(self.longest_pause);
        let mut seen = None;
        loop {
            kni_tasks::waiting(async {
                tokio::select! {
                    _ = ticks.tick() => {}
                    () = self.cache.blocks().demanded() => {}
                    () = self.other_inputs(&mut known, seen.as_ref()) => tokio::time::sleep(GATHER).await,
                    _ = attached.changed() => {}
                }
            })
            .await;
            seen = Some(self.block_inputs());
            match self.round(&mut memory).await {
                Err(error) => memory.report(&error.to_string()),
                Ok(()) if memory.claims.is_none() => memory.report("the cluster has no Node object of this node"),
                Ok(()) => memory.failure.clear(),
            }
        }
    }

    /// Claims the blocks that the node has according to its earlier processes and releases, before the networks are
    /// applied for the first time. Ends without all of them if the API server replies, but accepts no claim: policies
    /// and networks must not wait for that, only leases do. `reconcile_blocks` continues.
    pub async fn load_blocks(&self) {
        let mut memory = Memory::default();
        for _attempt in 0..LOADS {
            self.find_node(&mut memory);
            // The caller applies the networks.
            match self.check(&mut memory).await {
                (_, Ok(())) => return,
                (_, Err(error)) => {
                    memory.report(&error.to_string());
                    // Attached pods must not wait for permissions.
                    if error.is_refusal() {
                        return;
                    }
                }
            }
            kni_tasks::waiting(tokio::time::sleep(ROUND)).await;
        }
    }

    async fn round(&self, memory: &mut Memory) -> Result<(), ClaimError> {
        self.find_node(memory);
        memory.foreign.retain(|_, tried| tried.elapsed() < FOREIGN);
        memory.failed.retain(|name| self.network_ref(name).is_some());
        let lost = self.lost_one(memory);
        memory.lost |= lost;
        let pause = if self.cache.blocks().conflicts().is_empty() && !memory.unsettled_own {
            CHECK
        } else {
            CONFLICT_CHECK
        };
        let is_due = memory.lost || memory.checked.is_none_or(|last| last.elapsed() >= pause);
        let checked = if is_due && memory.claims.is_some() && memory.checks.is_due() {
            let begun = Instant::now();
            let (changed, checked) = self.check(memory).await;
            memory.checks.ended(memory.checked.is_some_and(|at| at >= begun));
            if changed {
                self.apply_networks().await;
            }
            checked
        } else {
            Ok(())
        };
        let Some(claims) = memory.claims.clone() else {
            return checked;
        };
        let mut searches = Vec::new();
        let mut idle = Vec::new();
        for (network, step) in self.steps(memory) {
            match step {
                Step::Take { ipv4, ipv6 } => {
                    let families = [(ipv4, true), (ipv6, false)].into_iter();
                    let families = families.filter(|(count, _)| *count > 0);
                    searches
                        .extend(families.filter_map(|(count, family)| self.search(memory, &network, family, count)));
                }
                Step::GiveBack(blocks) => idle.extend(blocks.into_iter().map(|block| (network.name.clone(), block))),
            }
        }
        let claimed = self.take(&claims, memory, searches).await;
        self.stop_leasing(memory, idle).await;
        let released = self.release(&claims, memory).await;
        checked.and(claimed).and(released)
    }

    /// The claims belong to the node's object; another object of the name takes its blocks over.
    fn find_node(&self, memory: &mut Memory) {
        let uid = {
            let tables = self.cache.tables();
            tables.own_node.get("", &self.node).map(|row| row.uid.clone())
        };
        let Some(uid) = uid.filter(|uid| !uid.is_empty()) else {
            return;
        };
        if memory.claims.as_ref().is_none_or(|claims| claims.node().uid != uid) {
            let node = NodeRef {
                name: self.node.clone(),
                uid,
            };
            memory.claims = Some(Claims::new(self.client.clone(), node));
            (memory.checked, memory.checks) = (None, Retry::up_to(self.longest_pause));
        }
    }

    fn search(&self, memory: &Memory, network: &NetworkRef, ipv4: bool, count: usize) -> Option<Search> {
        Some(Search {
            network: network.clone(),
            ipv4,
            count,
            first: memory
                .unsettled
                .get(&(network.name.clone(), ipv4))
                .cloned()
                .unwrap_or_default(),
            units: self.units(memory, &network.name)?,
        })
    }

    /// Claims blocks for these networks and families.
    async fn take(&self, claims: &Claims, memory: &mut Memory, searches: Vec<Search>) -> Result<(), ClaimError> {
        let searches: Vec<_> = searches.into_iter().map(|search| self.claim(claims, search)).collect();
        let outcomes: Vec<Found> = stream::iter(searches).buffer_unordered(AT_ONCE).collect().await;
        let mut failed = Ok(());
        let mut changed = false;
        let mut none_left: BTreeMap<NetworkName, bool> = BTreeMap::new();
        let mut settled: BTreeMap<NetworkName, bool> = BTreeMap::new();
        for found in outcomes {
            let name = found.network.name.clone();
            let now = Instant::now();
            *none_left.entry(name.clone()).or_default() |= found.none_left;
            let foreign = found.foreign.into_iter().map(|unit| ((name.clone(), unit), now));
            memory.foreign.extend(foreign);
            memory.unsettled.remove(&(name.clone(), found.ipv4));
            *settled.entry(name.clone()).or_insert(true) &= found.done.is_ok() && found.unsettled.is_empty();
            if !found.unsettled.is_empty() {
                memory.unsettled.insert((name.clone(), found.ipv4), found.unsettled);
            }
            for unit in found.held {
                tracing::info!(network = %name, block = %unit, "claimed an address block");
                self.hold(memory, found.network.clone(), unit);
                changed = true;
            }
            if let Err(error) = found.done {
                failed = Err(error);
            }
        }
        for (name, settled) in settled {
            memory.failed.ended(name, settled);
        }
        if changed {
            self.apply_networks().await;
        }
        // Attaches that wait find the addresses first.
        for (name, none_left) in none_left {
            self.cache.blocks().set_exhausted(&name, none_left);
        }
        failed
    }

    fn hold(&self, memory: &mut Memory, network: NetworkRef, unit: IpNet) {
        memory.leaving.remove(&(network.name.clone(), unit));
        self.cache.blocks().hold(&network.name, unit);
        memory.networks.insert(network.name.clone(), network);
    }

    /// Stops leasing from empty blocks; a block of which an address was leased meanwhile stays.
    async fn stop_leasing(&self, memory: &mut Memory, idle: Vec<Block>) {
        if idle.is_empty() {
            return;
        }
        for (network, block) in &idle {
            self.cache.blocks().unhold(network, block);
        }
        self.apply_networks().await;
        let used = Used::of(self);
        let mut returned = false;
        for (network, block) in idle {
            memory.empty.remove(&(network.clone(), block));
            if used.has(&network, &block) {
                // No request was sent yet, so it is still the node's.
                self.cache.blocks().hold(&network, block);
                returned = true;
            } else {
                memory.leaving.insert((network, block));
                memory.released = None;
            }
        }
        if returned {
            self.apply_networks().await;
        }
    }

    /// Releases the blocks that are not leased from and have neither a lease nor a resting address left: another node
    /// may claim them from then on.
    async fn release(&self, claims: &Claims, memory: &mut Memory) -> Result<(), ClaimError> {
        let just_tried = memory.released.is_some_and(|last| last.elapsed() < ROUND);
        if memory.leaving.is_empty() || just_tried || !memory.releases.is_due() {
            return Ok(());
        }
        memory.released = Some(Instant::now());
        let used = Used::of(self);
        let mut empty: BTreeMap<NetworkName, Vec<IpNet>> = BTreeMap::new();
        for (network, block) in memory
            .leaving
            .iter()
            .filter(|(network, block)| !used.has(network, block))
        {
            empty.entry(network.clone()).or_default().push(*block);
        }
        let (mut failed, mut complete) = (Ok(()), true);
        for (network, mut blocks) in empty {
            blocks.truncate(MOST_AT_ONCE);
            kni_tasks::progress();
            match within(claims.release_all(&network, &blocks)).await {
                Ok(Some(())) => {
                    for block in blocks {
                        tracing::info!(%network, %block, "released an address block");
                        memory.leaving.remove(&(network.clone(), block));
                    }
                }
                // A later round continues.
                Ok(None) => complete = false,
                Err(error) => (failed, complete) = (Err(error), false),
            }
        }
        memory.releases.ended(complete);
        failed
    }
}

impl Memory {
    fn new(longest_pause: Duration) -> Self {
        Self {
            failed: Retries::up_to(longest_pause),
            checks: Retry::up_to(longest_pause),
            releases: Retry::up_to(longest_pause),
            ..Self::default()
        }
    }

    /// Logs each failure once: later rounds repeat what failed.
    fn report(&mut self, error: &str) {
        if self.failure != error {
            tracing::warn!(error, "cannot change the node's address blocks; trying again");
            error.clone_into(&mut self.failure);
        }
    }
}

/// `None` if it takes too long.
async fn within<T>(request: impl Future<Output = Result<T, ClaimError>>) -> Result<Option<T>, ClaimError> {
    match timeout(PATIENCE, request).await {
        Ok(done) => done.map(Some),
        Err(_elapsed) => Ok(None),
    }
}
