//! Prewarms namespaces for later pods, each with a veth pair and its programs.

use std::{
    sync::{Arc, PoisonError},
    time::Instant,
};

use kni_model::{IfName, InterfaceKind};
use kni_netlink as netlink;
use kni_store::{Change, NamespaceRecord, NamespaceUse, WarmInterface};

use super::{NamespacePool, PoolSize};
use crate::{
    error::{AttachError, Subject},
    interfaces::{Ends, PREWARMED_MTU, Pair, make_pair},
};

/// The pool has at most one of so many endpoints that no pod has.
const SHARE: usize = 4;

impl NamespacePool {
    /// Whether the pool is smaller than it should be.
    pub(crate) fn needs_prewarming(&self) -> bool {
        self.warm_and_desired().is_some_and(|(warm, desired)| warm < desired)
    }

    /// Whether the pool is larger than it should be. One of fixed size never is.
    pub(crate) fn is_too_large(&self) -> bool {
        self.size == PoolSize::ByDemand && self.warm_and_desired().is_some_and(|(warm, desired)| warm > desired)
    }

    fn warm_and_desired(&self) -> Option<(usize, usize)> {
        let state = self.registry.lock();
        let warm = state.warm_count();
        let desired = match self.size {
            PoolSize::Fixed(size) => usize::try_from(size).ok()?,
            PoolSize::ByDemand => {
                let demand = self.demand.lock().unwrap_or_else(PoisonError::into_inner);
                let spare = state.slots.free_count().saturating_add(warm) / SHARE;
                demand.desired(Instant::now()).min(spare)
            }
        };
        Some((warm, desired))
    }

    /// Adds one namespace to the pool; whether there was an endpoint for it. Attaches take precedence over the pool.
    pub(crate) async fn prewarm(&self) -> Result<bool, AttachError> {
        let Some((making, warm)) = self.record_prewarming()? else {
            return Ok(false);
        };
        match self.build(&making, warm).await {
            Ok(record) => self.registry.lock().put_namespace_deferred(record).map(|()| true),
            Err(error) => {
                self.remove(&making)?;
                Err(error)
            }
        }
    }

    /// Removes one namespace from the pool.
    pub(crate) fn shrink(&self) -> Result<(), AttachError> {
        let found = {
            let state = self.registry.lock();
            let mut records = state.namespaces.values();
            records.find(|record| record.used_by == NamespaceUse::Warm).cloned()
        };
        match found {
            Some(record) => self.remove(&record),
            None => Ok(()),
        }
    }

    /// Whether the programs of a prewarmed interface are attached provisionally.
    pub(super) fn is_provisional(&self, record: &NamespaceRecord) -> bool {
        let warm = record.warm.as_ref();
        warm.is_some_and(|warm| self.kernel.dataplane.is_provisional(warm.endpoint))
    }

    /// Whether a prewarmed interface has provisional programs.
    pub(crate) fn has_provisional(&self) -> bool {
        self.provisional().is_some()
    }

    fn provisional(&self) -> Option<NamespaceRecord> {
        let state = self.registry.lock();
        let mut records = state.namespaces.values();
        let found = records.find(|record| record.used_by == NamespaceUse::Warm && self.is_provisional(record));
        found.cloned()
    }

    /// Replaces the provisional programs of one prewarmed interface. No client gets it meanwhile.
    pub(crate) async fn upgrade(&self) -> Result<(), AttachError> {
        let Some(record) = self.provisional() else {
            return Ok(());
        };
        let Some(warm) = record.warm.clone() else { return Ok(()) };
        {
            let mut state = self.registry.lock();
            if state.namespaces.get(&record.path) != Some(&record) {
                return Ok(());
            }
            state.upgrading = Some(record.path.clone());
        }
        let dataplane = Arc::clone(&self.kernel.dataplane);
        let upgraded =
            tokio::task::spawn_blocking(move || dataplane.upgrade(warm.host_ifname.as_str(), warm.endpoint)).await;
        self.registry.lock().upgrading = None;
        let subject = Subject::node();
        let upgraded = upgraded
            .map_err(|ended| subject.ended(&ended))
            .and_then(|done| done.map_err(subject.failed("replacing clsact filters by TCX links")));
        if upgraded.is_err() {
            self.remove(&record)?;
        }
        upgraded
    }

    /// Records everything that is about to be made (I5).
    fn record_prewarming(&self) -> Result<Option<(NamespaceRecord, WarmInterface)>, AttachError> {
        let path = self.fresh_path();
        let mut state = self.registry.lock();
        // The last one is for an attach, which may begin at any moment.
        let spare = state.slots.free_count() > 1;
        let Some(endpoint) = spare.then(|| state.slots.take()).flatten() else {
            return Ok(None);
        };
        let ifname = IfName::primary();
        let ends = Ends::of(&InterfaceKind::Veth, &ifname, endpoint);
        let warm = WarmInterface {
            endpoint,
            ifname,
            ifindex: ends.ifindex,
            host_ifname: ends.host_ifname,
            host_ifindex: ends.host_ifindex,
            mac: ends.mac,
            host_mac: ends.host_mac,
        };
        let record = NamespaceRecord {
            path,
            identity: None,
            used_by: NamespaceUse::Making,
            warm: Some(warm.clone()),
        };
        if let Err(error) = state.commit(Change::new().namespace(&record)) {
            state.slots.free(endpoint);
            return Err(error);
        }
        state.namespaces.insert(record.path.clone(), record.clone());
        Ok(Some((record, warm)))
    }

    async fn build(&self, making: &NamespaceRecord, warm: WarmInterface) -> Result<NamespaceRecord, AttachError> {
        let subject = Subject::node();
        let identity = netlink::netns::create(&making.path)
            .await
            .map_err(subject.failed("creating the network namespace"))?;
        let netns = netlink::netns::open(&making.path).map_err(subject.failed("opening the network namespace"))?;
        let pair = Pair {
            endpoint: warm.endpoint,
            host_ifname: warm.host_ifname.clone(),
            host_mac: warm.host_mac,
            ifname: warm.ifname.clone(),
            mac: warm.mac,
            mtu: PREWARMED_MTU,
            alias: format!("{}prewarmed", netlink::own::IFALIAS_PREFIX),
        };
        // Fast, so that a pool that a burst has emptied is full again soon; the links follow in a quiet moment.
        let (ifindex, inside) = make_pair(&self.kernel, pair, &netns, &subject).await?;
        self.kernel.keep_connected(identity, inside);
        Ok(NamespaceRecord {
            identity: Some(identity),
            used_by: NamespaceUse::Warm,
            warm: Some(WarmInterface { ifindex, ..warm }),
            path: making.path.clone(),
        })
    }
}
