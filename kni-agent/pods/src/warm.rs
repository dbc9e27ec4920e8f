//! Background work: keeps sandboxes ready ahead of `CreateNetwork`, removes devices, collects what nobody claimed.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kni_model::{NetnsIdentity, Phase, PodRef, SandboxId, selection::PRIMARY_IFNAME};
use kni_netlink as netlink;
use kni_store::{Change, NamespaceRecord, NamespaceUse, Removal, WarmInterface};

use super::{
    AttachError, Inner,
    error::{Subject, chain},
    interface::{self, Made, Pair, WARM_MTU},
    namespace,
};

/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(1);
/// How long no client has been served before work for later ones begins. The kubelet attaches within some
/// milliseconds after it created; pods of a burst follow each other faster than this.
const QUIET: Duration = Duration::from_millis(150);
/// A namespace that was given out, is not attached for this long and is used by no process, is removed.
const UNCLAIMED_FOR: Duration = Duration::from_mins(15);
const GARBAGE_INTERVAL: Duration = Duration::from_mins(1);

impl Inner {
    /// Works for later pods: gives TCX links to interfaces that were made in haste, and fills the pool. Only when
    /// nobody has asked for anything for a while: the costs lie under the kernel's rtnl lock, which attaches need too.
    pub(super) async fn keep_warm(self: Arc<Self>) {
        while !self.is_stopping() {
            if !self.has_background_work() {
                self.warm_wanted.notified().await;
                continue;
            }
            self.wait_for_quiet().await;
            let hasty = self.state().hasty.pop_front();
            let done = match hasty {
                Some(sandbox) => self.upgrade(&sandbox).await,
                None => self.make_warm().await,
            };
            if let Err(error) = done {
                tracing::warn!(%error, "cannot prepare for later pods");
                tokio::time::sleep(RETRY).await;
            }
        }
    }

    fn has_background_work(&self) -> bool {
        let wanted = usize::try_from(self.options.warm_sandboxes).unwrap_or(usize::MAX);
        let state = self.state();
        !state.hasty.is_empty() || state.warm_count() < wanted
    }

    /// Notes that a client is being served.
    pub(super) fn touch(&self) {
        self.state().last_call = Instant::now();
    }

    async fn wait_for_quiet(&self) {
        loop {
            let idle = self.state().last_call.elapsed();
            if idle >= QUIET {
                return;
            }
            tokio::time::sleep(QUIET.saturating_sub(idle)).await;
        }
    }

    /// Under the sandbox's lock, so that it is not detached meanwhile. An interface for which this fails keeps working
    /// as it is.
    async fn upgrade(&self, id: &SandboxId) -> Result<(), AttachError> {
        let _one_at_a_time = self.locks.lock(id.as_str()).await;
        let found = self.state().sandboxes.get(id).map(Arc::clone);
        let Some(sandbox) = found.filter(|sandbox| sandbox.phase == Phase::Ready) else {
            return Ok(());
        };
        let subject = Subject {
            pod: sandbox.pod.clone(),
            sandbox: sandbox.id.to_string(),
        };
        for attachment in &sandbox.attachments {
            if !self.dataplane.is_provisional(attachment.endpoint) {
                continue;
            }
            let dataplane = Arc::clone(&self.dataplane);
            let (ifname, endpoint) = (attachment.host_ifname.clone(), attachment.endpoint);
            tokio::task::spawn_blocking(move || dataplane.upgrade(ifname.as_str(), endpoint))
                .await
                .map_err(|ended| super::error::ended(&ended))?
                .map_err(subject.failed("replacing clsact filters by TCX links"))?;
        }
        Ok(())
    }

    async fn make_warm(&self) -> Result<(), AttachError> {
        let subject = Subject {
            pod: PodRef::default(),
            sandbox: "prepared ahead".to_owned(),
        };
        let Some(making) = self.record_warm()? else {
            // All endpoints are in use: an attach needs them more than the pool.
            tokio::time::sleep(RETRY).await;
            return Ok(());
        };
        let made = self.build_warm(&making, &subject).await;
        match made {
            Ok(record) => self.record(&record),
            Err(error) => {
                self.remove_namespace(&making).await?;
                Err(error)
            }
        }
    }

    /// Names everything that is about to be made (I5).
    fn record_warm(&self) -> Result<Option<NamespaceRecord>, AttachError> {
        let path = self.fresh_path();
        let mut state = self.state();
        let Some(endpoint) = state.slots.take() else {
            return Ok(None);
        };
        let names = (PRIMARY_IFNAME.parse().ok(), interface::host_ifname(endpoint));
        let (Some(ifname), Some(host_ifname)) = names else {
            return Ok(None);
        };
        let warm = WarmInterface {
            endpoint,
            ifname,
            ifindex: 0,
            host_ifname,
            host_ifindex: kni_common::IFINDEX_BASE + endpoint.0,
            mac: interface::random_mac(),
            host_mac: interface::random_mac(),
        };
        let record = NamespaceRecord {
            path,
            identity: None,
            used_by: NamespaceUse::Making,
            warm: Some(warm),
        };
        if let Err(error) = self.commit(Change::new().namespace(&record)) {
            state.slots.free(endpoint);
            return Err(error);
        }
        state.namespaces.insert(record.path.clone(), record.clone());
        Ok(Some(record))
    }

    async fn build_warm(&self, making: &NamespaceRecord, subject: &Subject) -> Result<NamespaceRecord, AttachError> {
        let identity = netlink::netns::create(&making.path)
            .await
            .map_err(subject.failed("creating the network namespace"))?;
        let netns = netlink::netns::open(&making.path).map_err(subject.failed("opening the network namespace"))?;
        let warm = match &making.warm {
            Some(warm) => {
                let pair = Pair {
                    endpoint: warm.endpoint,
                    host_ifname: warm.host_ifname.clone(),
                    host_mac: warm.host_mac,
                    ifname: warm.ifname.clone(),
                    mac: warm.mac,
                    mtu: WARM_MTU,
                    alias: format!("{}prepared ahead", netlink::own::IFALIAS_PREFIX),
                };
                let ifindex = self.make_pair(&pair, &netns, Made::Ahead, subject).await?;
                Some(WarmInterface {
                    ifindex,
                    ..warm.clone()
                })
            }
            None => None,
        };
        Ok(NamespaceRecord {
            identity: Some(identity),
            used_by: NamespaceUse::Warm,
            warm,
            path: making.path.clone(),
        })
    }

    /// Deletes queued devices, many in one stroke: each stroke waits for the same grace periods.
    pub(super) async fn reap(self: Arc<Self>) {
        loop {
            let queued: Vec<Removal> = self.state().removals.values().cloned().collect();
            if queued.is_empty() {
                self.reaper_wanted.notified().await;
                continue;
            }
            if let Err(error) = self.remove_devices(&queued).await {
                tracing::warn!(%error, "cannot remove interfaces, will try again");
                tokio::time::sleep(RETRY).await;
            }
        }
    }

    async fn remove_devices(&self, queued: &[Removal]) -> Result<(), AttachError> {
        let links: Vec<(u32, &str)> = queued
            .iter()
            .map(|removal| (removal.host_ifindex, removal.host_ifname.as_str()))
            .collect();
        self.teardown_netlink
            .delete_links(&links)
            .await
            .map_err(|error| super::error::kernel_of_node("deleting interfaces", &error))?;
        let mut gone = Vec::new();
        for removal in queued {
            match self
                .dataplane
                .withdraw(removal.endpoint)
                .and_then(|()| self.dataplane.unpin(removal.endpoint))
            {
                Ok(()) => gone.push(removal),
                Err(error) => {
                    tracing::warn!(ifname = %removal.host_ifname, error = chain(&error), "cannot unpin it yet");
                }
            }
        }
        let left = gone.len() < queued.len();
        self.forget_removals(&gone)?;
        if left {
            tokio::time::sleep(RETRY).await;
        }
        self.removed.notify_waiters();
        self.warm_wanted.notify_one();
        Ok(())
    }

    /// Their endpoint numbers are free now.
    fn forget_removals(&self, gone: &[&Removal]) -> Result<(), AttachError> {
        let mut state = self.state();
        self.commit(gone.iter().copied().fold(Change::new(), Change::remove_removal))?;
        for removal in gone {
            state.removals.remove(&removal.endpoint);
            state.slots.free(removal.endpoint);
        }
        Ok(())
    }

    /// Removes namespaces that a client asked for and never used.
    pub(super) async fn collect_garbage(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(GARBAGE_INTERVAL);
        ticks.tick().await;
        loop {
            ticks.tick().await;
            for record in self.unclaimed_for_long() {
                let Some(identity) = record.identity else { continue };
                if in_use(identity).await {
                    continue;
                }
                match self.remove_namespace(&record).await {
                    Ok(()) => tracing::info!(path = %record.path.display(), "removed a namespace that nobody claimed"),
                    Err(error) => tracing::warn!(%error, "cannot remove a namespace that nobody claimed"),
                }
            }
        }
    }

    fn unclaimed_for_long(&self) -> Vec<NamespaceRecord> {
        let now = namespace::now();
        let old = |record: &&NamespaceRecord| {
            matches!(&record.used_by, NamespaceUse::Given { since, .. }
                if now.saturating_sub(*since) > UNCLAIMED_FOR.as_secs())
        };
        self.state().namespaces.values().filter(old).cloned().collect()
    }
}

/// Whether a process lives in the namespace. When that cannot be told, it is in use.
pub(super) async fn in_use(identity: NetnsIdentity) -> bool {
    let looked = tokio::task::spawn_blocking(move || {
        let processes = std::fs::read_dir("/proc")?;
        let lives_there = |entry: std::fs::DirEntry| {
            netlink::netns::identity(&entry.path().join("ns/net")).is_ok_and(|found| found == identity)
        };
        Ok::<bool, std::io::Error>(processes.filter_map(Result::ok).any(lives_there))
    });
    match looked.await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => {
            tracing::debug!(error = chain(&error), "cannot look at processes");
            true
        }
        Err(_ended) => true,
    }
}
