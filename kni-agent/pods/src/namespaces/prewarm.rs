//! Prewarms namespaces for later pods, each with a veth pair and its programs.

use std::time::Duration;

use kni_model::{IfName, InterfaceKind};
use kni_netlink as netlink;
use kni_store::{Change, NamespaceRecord, NamespaceUse, WarmInterface};

use super::NamespacePool;
use crate::{
    error::{AttachError, Subject},
    interfaces::{Ends, Made, PREWARMED_MTU, Pair, make_pair},
};

/// Pause while all endpoints are in use.
const PAUSE: Duration = Duration::from_secs(1);

impl NamespacePool {
    /// Whether the pool is smaller than it should be.
    pub(crate) fn needs_prewarming(&self) -> bool {
        self.registry.lock().warm_count() < self.size
    }

    /// Adds one namespace to the pool.
    pub(crate) async fn prewarm(&self) -> Result<(), AttachError> {
        let Some((making, warm)) = self.record_prewarming()? else {
            // All endpoints are in use: attaches take precedence over the pool.
            tokio::time::sleep(PAUSE).await;
            return Ok(());
        };
        match self.build(&making, warm).await {
            Ok(record) => self.record_deferred(record),
            Err(error) => {
                self.remove(&making).await?;
                Err(error)
            }
        }
    }

    /// Records everything that is about to be made (I5).
    fn record_prewarming(&self) -> Result<Option<(NamespaceRecord, WarmInterface)>, AttachError> {
        let path = self.fresh_path();
        let mut state = self.registry.lock();
        let Some(endpoint) = state.slots.take() else {
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
        let ifindex = make_pair(&self.kernel, &pair, &netns, Made::Prewarmed, &subject).await?;
        Ok(NamespaceRecord {
            identity: Some(identity),
            used_by: NamespaceUse::Warm,
            warm: Some(WarmInterface { ifindex, ..warm }),
            path: making.path.clone(),
        })
    }
}
