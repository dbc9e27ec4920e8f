//! Decides which lists of backends may be written now, so that the changes of one namespace take no room from those of
//! others.
//!
//! A list that is replaced stays for some seconds, so a Service that changes all the time holds many. Each namespace
//! always has room for the lists that its rows name and for those that they shall name; of the room that is left over,
//! it may hold an eighth. What exceeds that waits until old lists are removed, and the row keeps its list until then.

use std::collections::{BTreeMap, BTreeSet};

use kni_common::service::ServiceKey;

use super::{frontend::Frontend, map_state::MapState, quota::ServiceQuota};

/// The parts of the left-over room, of which one namespace may hold one.
const PARTS: usize = 8;

/// The frontends whose new lists have to wait.
pub(super) fn postponed(
    quota: ServiceQuota,
    maps: &MapState,
    frontends: &BTreeMap<ServiceKey, Frontend>,
) -> BTreeSet<ServiceKey> {
    let rows = |frontend: &Frontend| frontend.choice.backends.len();
    let mut used = maps.tables().backends.len();
    let most: usize = frontends.values().map(rows).sum();
    if used.saturating_add(most) <= quota.backends / 2 {
        return BTreeSet::new();
    }
    let is_new = |(key, frontend): &(&ServiceKey, &Frontend)| !maps.has_list(key, &frontend.choice.backends);
    let new: Vec<(&ServiceKey, &Frontend)> = frontends.iter().filter(is_new).collect();
    let mut namespaces: BTreeMap<&str, Account> = BTreeMap::new();
    for frontend in frontends.values() {
        let account = namespaces.entry(&frontend.service.namespace).or_default();
        account.assured += rows(frontend);
    }
    for (namespace, rows, is_named) in maps.held() {
        let account = namespaces.entry(namespace).or_default();
        account.held += rows;
        if is_named {
            account.assured += rows;
        }
    }
    let assured: usize = namespaces.values().map(|account| account.assured).sum();
    let extra = quota.backends.saturating_sub(assured) / PARTS;
    let mut reserved: usize = namespaces.values().map(Account::reserved).sum();
    let mut waiting = BTreeSet::new();
    for (key, frontend) in new {
        let account = namespaces.entry(&frontend.service.namespace).or_default();
        let (before, held) = (account.reserved(), account.held + rows(frontend));
        let room = quota.backends.saturating_sub(used);
        let fits = held <= account.assured && rows(frontend) <= room
            || held <= account.assured + extra && rows(frontend) <= room.saturating_sub(reserved - before);
        if fits {
            account.held = held;
            used += rows(frontend);
            reserved = reserved - before + account.reserved();
        } else {
            waiting.insert(*key);
        }
    }
    waiting
}

/// Rows of a namespace.
#[derive(Debug, Default)]
struct Account {
    /// Rows of its lists, old ones included.
    held: usize,
    /// Rows that it may hold in any case.
    assured: usize,
}

impl Account {
    fn reserved(&self) -> usize {
        self.assured.saturating_sub(self.held)
    }
}
