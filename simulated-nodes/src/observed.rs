//! Records when the nodes learn what, for the latencies of a simulation.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use kni_model::policy::Labels;
use serde::Serialize;

/// The label whose value differs between the states of one pod. Pods without it are not recorded.
const STAMP: &str = "simulation/stamp";

/// What happened until now. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Observed {
    log: Arc<Mutex<Log>>,
}

/// Times are seconds since 1970, by the clock of the machine, which the driver of the simulation has, too.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Log {
    /// The nodes that know a state of a pod as that of a peer, and since when: by UID and stamp.
    peers: BTreeMap<String, Vec<(String, f64)>>,
    /// When a pod's own node had attached it: by UID.
    attached: BTreeMap<String, f64>,
    /// When a node held its first block of a network: by network.
    blocks: BTreeMap<String, Vec<(String, f64)>>,
    /// Changes of peers that the nodes have received.
    peer_changes: u64,
    /// Changes of what nodes know of the fabric.
    fabric_changes: u64,
}

impl Observed {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn peer(&self, node: &str, uid: &str, labels: &Labels) {
        let mut log = self.log();
        log.peer_changes += 1;
        if let Some(stamp) = labels.get(STAMP) {
            let seen = log.peers.entry(format!("{uid} {stamp}")).or_default();
            seen.push((node.to_owned(), now()));
        }
    }

    pub(crate) fn attached(&self, uid: &str, labels: &Labels) {
        if labels.contains_key(STAMP) {
            self.log().attached.insert(uid.to_owned(), now());
        }
    }

    pub(crate) fn block(&self, node: &str, network: &str) {
        let mut log = self.log();
        log.blocks
            .entry(network.to_owned())
            .or_default()
            .push((node.to_owned(), now()));
    }

    pub(crate) fn fabric(&self) {
        self.log().fabric_changes += 1;
    }

    /// Everything since the last call.
    pub(crate) fn take(&self) -> Log {
        std::mem::take(&mut *self.log())
    }
}

fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_secs_f64()
}
