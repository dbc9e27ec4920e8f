//! Collects the metrics of one replica: its election, requests, watches, caches and controllers.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ipnet::IpNet;
use kni_cluster::{ClusterCache, Tables};
use kni_ipam::blocks::unit_prefix;
use kni_metrics::{ControlPlane, ControllerState, ControllerUse, FreeBlocks, RequestUse, WatchUse};
use kni_model::durations::Durations;
use kni_reflectors::{RequestCounts, WatchState};
use kube::ResourceExt as _;

use crate::election::Leadership;

/// The counters of a replica, over all its terms. Clones share them.
#[derive(Clone)]
pub(crate) struct Metrics {
    requests: RequestCounts,
    watches: WatchState,
    leadership: Leadership,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// The objects, during a term.
    cache: Option<ClusterCache>,
    controllers: BTreeMap<&'static str, (Durations, u64)>,
}

impl Metrics {
    pub(crate) fn new(requests: RequestCounts, watches: WatchState, leadership: Leadership) -> Self {
        Self {
            requests,
            watches,
            leadership,
            state: Arc::default(),
        }
    }

    /// The counters of the watches of all terms.
    pub(crate) fn watches(&self) -> &WatchState {
        &self.watches
    }

    /// A term begins, with this cache.
    pub(crate) fn begin_term(&self, cache: &ClusterCache) {
        self.state().cache = Some(cache.clone());
    }

    /// The term has ended: the objects are no longer followed.
    pub(crate) fn end_term(&self) {
        self.state().cache = None;
    }

    /// Reads the objects of the term; `None` without a term.
    pub(crate) fn with_tables<T>(&self, read: impl FnOnce(&Tables) -> T) -> Option<T> {
        let cache = self.state().cache.clone()?;
        let tables = cache.tables();
        Some(read(&tables))
    }

    /// A controller has compared the objects with the desired ones.
    pub(crate) fn reconciled(&self, controller: &'static str, took: Duration) {
        self.state().controllers.entry(controller).or_default().0.observe(took);
    }

    /// A write of a controller has failed.
    pub(crate) fn failed(&self, controller: &'static str) {
        self.state().controllers.entry(controller).or_default().1 += 1;
    }

    /// The page in the `OpenMetrics` text format. Takes milliseconds in a large cluster.
    pub(crate) fn page(&self) -> Result<String, fmt::Error> {
        let (cache, controllers) = {
            let state = self.state();
            (state.cache.clone(), state.controllers.clone())
        };
        let requests = self.requests.view().into_iter().map(|count| RequestUse {
            verb: count.verb,
            resource: count.resource,
            code: count.code,
            count: count.count,
        });
        let watches = self.watches.view().into_iter().map(|view| WatchUse {
            kind: view.kind,
            // Without a term there is no watch that could be late.
            last_event: view.last_event.filter(|_| cache.is_some()),
            restarts: view.restarts,
        });
        let (mut objects, mut free) = (Vec::new(), Vec::new());
        if let Some(cache) = &cache {
            let tables = cache.tables();
            let counts = tables.counts_of_cluster().into_iter();
            objects = counts
                .map(|(kind, count)| (kind, u64::try_from(count).unwrap_or(u64::MAX)))
                .collect();
            free = free_blocks(&tables);
        }
        let controllers = controllers.into_iter();
        let state = ControllerState {
            leads: self.leadership.is_held(),
            control_plane: ControlPlane {
                requests: requests.collect(),
                watches: watches.collect(),
                objects,
                tasks: Vec::new(),
            },
            controllers: controllers
                .map(|(controller, (reconcile, failures))| ControllerUse {
                    controller,
                    reconcile,
                    failures,
                })
                .collect(),
            free_blocks: free,
        };
        state.page()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each entry is complete.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The blocks of each network and family that no `AddressBlock` claims.
fn free_blocks(tables: &Tables) -> Vec<FreeBlocks> {
    let mut used: BTreeMap<(&str, bool), u64> = BTreeMap::new();
    for block in tables.blocks.rows().values() {
        if let Ok(range) = block.spec.cidr.parse::<IpNet>() {
            let key = (block.spec.network_uid.as_str(), range.addr().is_ipv4());
            *used.entry(key).or_default() += 1;
        }
    }
    let mut rows = Vec::new();
    for object in tables.networks.rows().values() {
        let asked = object.spec.per_node_prefix.unwrap_or_default();
        let subnets: Vec<IpNet> = object.spec.subnets.iter().filter_map(|net| net.parse().ok()).collect();
        for (family, ipv4, asked) in [("ipv4", true, asked.ipv4), ("ipv6", false, asked.ipv6)] {
            let of_family = || subnets.iter().filter(|net| net.addr().is_ipv4() == ipv4);
            if of_family().next().is_none() {
                continue;
            }
            let units = of_family().map(|net| {
                let bits = unit_prefix(net, asked).saturating_sub(net.prefix_len());
                1_u64.checked_shl(bits.into()).unwrap_or(u64::MAX)
            });
            let total = units.fold(0, u64::saturating_add);
            let uid = object.metadata.uid.as_deref().unwrap_or_default();
            let used = used.get(&(uid, ipv4)).copied().unwrap_or(0);
            rows.push(FreeBlocks {
                network: object.name_any(),
                family,
                free: total.saturating_sub(used),
            });
        }
    }
    rows
}

#[cfg(test)]
impl Metrics {
    /// The counters of a replica that never acts.
    pub(crate) fn for_tests() -> Self {
        Self::new(RequestCounts::default(), WatchState::default(), Leadership::for_tests())
    }
}

#[cfg(test)]
mod tests {
    use kni_cluster::Key;
    use serde_json::{Value, json};

    use super::*;

    fn put(tables: &mut Tables, network: &str, spec: &Value, blocks: &[&str]) {
        let object = serde_json::from_value(json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": {"name": network, "uid": network},
            "spec": spec,
        }));
        tables
            .networks
            .put(Key::new("", network), Some(Arc::new(object.unwrap())));
        for cidr in blocks {
            let block = serde_json::from_value(json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "AddressBlock", "metadata": {"name": cidr},
                "spec": {"network": network, "networkUID": network, "cidr": cidr, "nodeName": "n", "nodeUID": "u"},
            }));
            tables.blocks.put(Key::new("", cidr), Some(Arc::new(block.unwrap())));
        }
    }

    #[test]
    fn blocks_that_no_node_has_are_counted_by_family() {
        let mut tables = Tables::default();
        let both = json!({"subnets": ["10.0.0.0/24", "fd00::/64"], "perNodePrefix": {"ipv6": 80}});
        put(
            &mut tables,
            "both",
            &both,
            &["10.0.0.0/26", "10.0.0.64/26", "fd00::/80"],
        );
        put(&mut tables, "none", &json!({}), &[]);
        put(&mut tables, "wide", &json!({"subnets": ["fd01::/16"]}), &[]);
        let row = |network: &str, family, free| FreeBlocks {
            network: network.to_owned(),
            family,
            free,
        };
        let expected = [
            row("both", "ipv4", 2),
            row("both", "ipv6", 65_535),
            row("wide", "ipv6", u64::MAX),
        ];
        assert_eq!(free_blocks(&tables), expected);
    }

    #[test]
    fn objects_are_counted_during_a_term_and_controllers_over_all() {
        let metrics = Metrics::for_tests();
        let cache = ClusterCache::new();
        cache.change(|tables| {
            tables
                .nodes
                .put(Key::new("", "n1"), Some(kni_cluster::NodeRow::default()));
        });
        cache.change(|tables| put(tables, "blue", &json!({"subnets": ["10.0.0.0/24"]}), &[]));
        metrics.begin_term(&cache);
        metrics.reconciled("taints", Duration::from_millis(1));
        metrics.failed("taints");
        let page = metrics.page().unwrap();
        for line in [
            "kni_objects{kind=\"podnetworks\"} 1",
            "kni_objects{kind=\"nodes\"} 1",
            "kni_address_blocks_free{network=\"blue\",family=\"ipv4\"} 4",
            "kni_reconcile_failures_total{controller=\"taints\"} 1",
        ] {
            assert!(page.lines().any(|have| have == line), "{line}\n{page}");
        }
        metrics.end_term();
        let page = metrics.page().unwrap();
        assert!(!page.contains("network=\"blue\""), "{page}");
        assert!(
            page.contains("kni_reconcile_seconds_count{controller=\"taints\"} 1\n"),
            "{page}"
        );
    }
}
