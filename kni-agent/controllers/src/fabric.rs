//! Has what this node knows of others applied as the cluster's objects change.
//!
//! A node is known by the addresses of its `NodeEndpoint` that kni-controller has confirmed, and has the addresses of
//! its `AddressBlock`s. Both are written by that node alone, with its token.

mod derived;
mod underlay;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use self::derived::{Derived, Updated};
use super::{ObjectControllers, retry::Retry};

/// Changes that arrive within this time are applied together.
const GATHER: Duration = Duration::from_millis(10);
/// The same in large clusters, as a multiple of the time in which a change is derived: changes that follow each other
/// take at most a twentieth of a CPU.
const SHARE: u32 = 20;
/// The same, as a multiple of the time in which a change is applied, of which a part is waiting.
const SHARE_OF_APPLYING: u32 = 4;
const LONGEST_GATHER: Duration = Duration::from_millis(250);
/// Interval at which the desired state is applied again, because other programs may have changed the node.
const ROUND: Duration = Duration::from_mins(1);
/// The same once links or addresses of the node have changed: the tunnel device may be gone, or the route to a node.
const LINKS_CHANGED: Duration = Duration::from_secs(1);

/// How old the applied state is.
#[derive(Debug, Default)]
struct Age {
    applied: Option<Instant>,
    links_changed: bool,
}

impl Age {
    fn applied(&mut self) {
        *self = Self {
            applied: Some(Instant::now()),
            links_changed: false,
        };
    }

    /// The time until it is applied again; `None` if it never was.
    fn left(&self) -> Option<Duration> {
        let most = if self.links_changed { LINKS_CHANGED } else { ROUND };
        self.applied.map(|at| most.saturating_sub(at.elapsed()))
    }

    fn is_over(&self) -> bool {
        self.left() == Some(Duration::ZERO)
    }

    async fn wait(&self) {
        match self.left() {
            Some(left) => tokio::time::sleep(left).await,
            None => std::future::pending().await,
        }
    }
}

impl ObjectControllers {
    /// Applies changes of nodes and their blocks for as long as the agent runs, and repeats what fails.
    pub(super) async fn reconcile_fabric(self: Arc<Self>) {
        let mut changes = self.cache.changes();
        let mut attached = self.state.changes.clone();
        let mut seen = None;
        let mut derived = Derived::default();
        let mut is_applied = None;
        let mut links = self.state.link_changes.clone();
        let mut age = Age::default();
        let mut retry = Retry::default();
        let mut gather = GATHER;
        loop {
            let versions = (self.fabric_versions(), *attached.borrow_and_update());
            let is_repeated = retry.is_over() || age.is_over();
            if seen != Some(versions) || is_repeated {
                seen = Some(versions);
                let begun = Instant::now();
                let covered = self.covered(|tables, network| tables.other_blocks.covers(network));
                let updated = self.update_fabric(&mut derived);
                let deriving = begun.elapsed();
                let is_due = match updated {
                    None => false,
                    Some(Updated::Nothing) => is_repeated,
                    Some(Updated::Inputs) => is_repeated || is_applied != Some(true),
                    Some(Updated::Desired) => true,
                };
                if is_due {
                    let done = (self.state.apply_fabric)(Arc::clone(derived.desired())).await;
                    retry.ended(done);
                    age.applied();
                    // The status of the node has whether it succeeds.
                    if is_applied.replace(done) != Some(done) || !done {
                        self.node_changed.notify_one();
                    }
                }
                if updated.is_some() {
                    // Also after a failure: nothing more happens before it is tried again.
                    self.cache.others().set_blocks_applied(covered);
                }
                let applying = begun.elapsed().saturating_sub(deriving);
                let share = deriving.saturating_mul(SHARE);
                gather = share
                    .max(applying.saturating_mul(SHARE_OF_APPLYING))
                    .clamp(GATHER, LONGEST_GATHER);
            }
            let next = async {
                tokio::select! {
                    sent = changes.changed() => sent.is_ok(),
                    sent = attached.changed() => sent.is_ok(),
                    sent = links.changed() => {
                        age.links_changed = true;
                        sent.is_ok()
                    }
                    () = retry.wait() => true,
                    () = age.wait() => true,
                }
            };
            if !kni_tasks::waiting(next).await {
                return;
            }
            self.gather(gather).await;
        }
    }

    /// Gathers changes, for a short time only while the first pod of a network is attached.
    async fn gather(&self, longest: Duration) {
        let others = self.cache.others();
        let demanded = async {
            while !others.is_awaited() {
                others.demanded().await;
            }
            tokio::time::sleep(GATHER).await;
        };
        tokio::select! {
            () = tokio::time::sleep(longest) => {}
            () = demanded => {}
        }
    }

    fn fabric_versions(&self) -> [u64; 6] {
        let tables = self.cache.tables();
        [
            tables.node_endpoints.version(),
            tables.other_blocks.version(),
            tables.networks.version(),
            tables.numbers.version(),
            tables.egress_claims.version(),
            tables.own_node.version(),
        ]
    }

    /// `None` until the nodes and their blocks are known: what an earlier agent made stays.
    fn update_fabric(&self, derived: &mut Derived) -> Option<Updated> {
        let views = (self.state.networks)().into_iter();
        let networks = views.map(|view| (view.network, view.number));
        let tables = self.cache.tables();
        let known = tables.node_endpoints.is_synced() && tables.other_blocks.is_synced() && tables.networks.is_synced();
        known.then(|| derived.update(&tables, networks, &self.node))
    }
}
