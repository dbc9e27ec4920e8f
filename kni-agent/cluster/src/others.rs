//! Tracks in which networks the node has to know the pods of other nodes, in which it does, and the attaches that wait
//! for it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use kni_model::NetworkName;
use tokio::sync::{Notify, watch};

use super::tables::Tables;

/// What the node knows of other nodes in its networks.
///
/// A network is followed while the node has pods in it, and from the moment on in which the attach of its first pod
/// begins. It is known when the blocks and members of other nodes were read, and what follows from them was applied.
#[derive(Debug)]
pub struct Others {
    state: Mutex<State>,
    /// The networks whose members the node follows; `None` before the first call of [`Self::join`].
    joined: watch::Sender<Option<BTreeSet<NetworkName>>>,
    /// Those whose blocks it follows.
    counted: watch::Sender<Option<BTreeSet<NetworkName>>>,
    /// Something was applied, or cannot be read.
    changes: watch::Sender<()>,
    demand: Notify,
}

#[derive(Debug, Default)]
struct State {
    joined: Option<BTreeSet<NetworkName>>,
    counting: BTreeSet<NetworkName>,
    /// How many attaches wait for a network.
    awaited: BTreeMap<NetworkName, usize>,
    applied: Applied,
    /// Whether the API server did not answer last.
    is_away: bool,
    /// Attaches that did not wait until the network was known.
    early: u64,
}

/// The networks in which everything that was read of other nodes is applied.
#[derive(Debug, Default)]
struct Applied {
    blocks: BTreeSet<NetworkName>,
    members: BTreeSet<NetworkName>,
}

impl Default for Others {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            joined: watch::Sender::new(None),
            counted: watch::Sender::new(None),
            changes: watch::Sender::new(()),
            demand: Notify::new(),
        }
    }
}

impl Others {
    fn state(&self) -> MutexGuard<'_, State> {
        // Each entry is complete.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the networks whose members and blocks the node has to know: those that it has pods in. Of those in
    /// `counting` it has to know the blocks only.
    pub(crate) fn join(&self, networks: BTreeSet<NetworkName>, counting: impl IntoIterator<Item = NetworkName>) {
        let mut state = self.state();
        state.joined = Some(networks);
        state.counting = counting.into_iter().collect();
        self.publish(&state);
    }

    /// Called with the state's lock, so that the last state is the one that is published last.
    fn publish(&self, state: &State) {
        let Some(joined) = &state.joined else { return };
        let networks: BTreeSet<NetworkName> = joined.iter().chain(state.awaited.keys()).cloned().collect();
        let counted = networks.union(&state.counting).cloned().collect();
        for (sender, networks) in [(&self.joined, networks), (&self.counted, counted)] {
            sender.send_if_modified(|known| {
                let differs = known.as_ref() != Some(&networks);
                *known = Some(networks);
                differs
            });
        }
    }

    pub(crate) fn counted(&self) -> watch::Receiver<Option<BTreeSet<NetworkName>>> {
        self.counted.subscribe()
    }

    pub(crate) fn joined(&self) -> watch::Receiver<Option<BTreeSet<NetworkName>>> {
        self.joined.subscribe()
    }

    /// Follows these networks until the result is dropped.
    pub fn follow(&self, networks: BTreeSet<NetworkName>) -> Following<'_> {
        let mut state = self.state();
        for network in &networks {
            *state.awaited.entry(network.clone()).or_default() += 1;
        }
        self.publish(&state);
        drop(state);
        self.demand.notify_one();
        Following { others: self, networks }
    }

    /// Waits for [`Self::follow`].
    pub async fn demanded(&self) {
        self.demand.notified().await;
    }

    /// Whether attaches wait.
    pub fn is_awaited(&self) -> bool {
        !self.state().awaited.is_empty()
    }

    /// Sets the networks in which the blocks of other nodes are applied as far as possible.
    pub fn set_blocks_applied(&self, networks: BTreeSet<NetworkName>) {
        self.set(|state| {
            let differs = state.applied.blocks != networks;
            state.applied.blocks = networks;
            differs
        });
    }

    /// Sets the networks in which the members of other nodes are applied.
    pub fn set_members_applied(&self, networks: BTreeSet<NetworkName>) {
        self.set(|state| {
            let differs = state.applied.members != networks;
            state.applied.members = networks;
            differs
        });
    }

    /// Notes whether the API server answers.
    pub fn set_away(&self, is_away: bool) {
        self.set(|state| std::mem::replace(&mut state.is_away, is_away) != is_away);
    }

    fn set(&self, change: impl FnOnce(&mut State) -> bool) {
        let changed = change(&mut self.state());
        if changed {
            self.changes.send_replace(());
        }
    }

    /// Notifies of everything that [`Self::is_applied`] depends on, but for `tables`: these change before it is
    /// applied.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Whether the API server did not answer last.
    pub fn is_away(&self) -> bool {
        self.state().is_away
    }

    /// Whether what other nodes have in a network is known and applied, or will not be: the API server may not serve
    /// it.
    pub fn is_applied(&self, tables: &Tables, network: &NetworkName) -> bool {
        let state = self.state();
        let blocks = tables.other_blocks.covers(network) && state.applied.blocks.contains(network);
        let members = tables.members.covers(network) && state.applied.members.contains(network);
        (blocks || tables.other_blocks.is_absent()) && (members || tables.members.is_absent())
    }

    /// Counts an attach that did not wait any longer.
    pub fn count_early(&self) {
        self.state().early += 1;
    }

    /// How many attaches did not wait until their networks were known.
    pub fn early(&self) -> u64 {
        self.state().early
    }
}

/// An attach for which networks are followed.
#[derive(Debug)]
pub struct Following<'a> {
    others: &'a Others,
    networks: BTreeSet<NetworkName>,
}

impl Following<'_> {
    /// The networks.
    pub fn networks(&self) -> &BTreeSet<NetworkName> {
        &self.networks
    }
}

impl Drop for Following<'_> {
    fn drop(&mut self) {
        let mut state = self.others.state();
        for network in &self.networks {
            if let Some(count) = state.awaited.get_mut(network) {
                *count = count.saturating_sub(1);
            }
        }
        state.awaited.retain(|_, count| *count > 0);
        self.others.publish(&state);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ClusterCache;

    fn networks(names: &[&str]) -> BTreeSet<NetworkName> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    #[test]
    fn a_network_is_followed_from_the_first_attach_on() {
        let others = Others::default();
        let early = others.follow(networks(&["red"]));
        assert_eq!(*others.joined().borrow(), None, "nothing is known of the node yet");
        others.join(networks(&["default"]), networks(&["counted"]));
        assert_eq!(*others.joined().borrow(), Some(networks(&["default", "red"])));
        assert_eq!(
            *others.counted().borrow(),
            Some(networks(&["default", "red", "counted"]))
        );
        let again = others.follow(networks(&["red", "blue"]));
        drop(early);
        assert!(others.is_awaited());
        assert_eq!(*others.joined().borrow(), Some(networks(&["default", "red", "blue"])));
        // The pod is attached by now.
        others.join(networks(&["default", "red"]), []);
        drop(again);
        assert!(!others.is_awaited());
        let seen = others.joined();
        assert_eq!(*seen.borrow(), Some(networks(&["default", "red"])));
        others.join(networks(&["default", "red"]), []);
        assert!(!seen.has_changed().unwrap(), "the same networks");
    }

    #[test]
    fn a_network_is_known_when_what_was_read_is_applied() {
        let (others, red) = (Others::default(), "red".parse().unwrap());
        let mut tables = Tables::default();
        let changes = others.changes();
        others.set_blocks_applied(networks(&["red"]));
        others.set_members_applied(networks(&["red"]));
        assert!(changes.has_changed().unwrap());
        assert!(
            !others.is_applied(&tables, &red),
            "what was applied is of a list of before"
        );
        tables.other_blocks.cover(&networks(&["red"]));
        assert!(!others.is_applied(&tables, &red), "members");
        tables.members.cover(&networks(&["red", "blue"]));
        assert!(others.is_applied(&tables, &red));
        assert!(!others.is_applied(&tables, &"blue".parse().unwrap()));
        others.set_blocks_applied(BTreeSet::new());
        assert!(!others.is_applied(&tables, &red));
        tables.other_blocks.absent(std::time::Instant::now());
        assert!(others.is_applied(&tables, &red), "there will be none");
    }

    #[tokio::test]
    async fn an_attach_waits_for_a_limited_time_and_not_while_the_api_server_is_away() {
        let (short, long) = (Duration::from_millis(20), Duration::from_mins(1));
        let cluster = ClusterCache::new();
        let following = cluster.others().follow(networks(&["red"]));
        assert!(!cluster.wait_for_others(&following, short).await, "nothing is read");
        let waiting = cluster.wait_for_others(&following, long);
        let read = async {
            tokio::task::yield_now().await;
            cluster.change(|tables| {
                tables.other_blocks.cover(&networks(&["red"]));
                tables.members.cover(&networks(&["red"]));
            });
            cluster.others().set_members_applied(networks(&["red"]));
            cluster.others().set_blocks_applied(networks(&["red"]));
        };
        assert!(tokio::join!(waiting, read).0);

        let following = cluster.others().follow(networks(&["blue"]));
        let waiting = cluster.wait_for_others(&following, long);
        let lost = async {
            tokio::task::yield_now().await;
            cluster.others().set_away(true);
        };
        assert!(!tokio::join!(waiting, lost).0);
        assert!(
            !cluster.wait_for_others(&following, long).await,
            "it is known to be away"
        );
    }
}
