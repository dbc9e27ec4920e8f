//! Network namespaces that the agent makes for clients: given out, bound to a sandbox, removed.

use std::{
    path::{Component, Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use kni_model::{PodRef, SandboxId};
use kni_netlink as netlink;
use kni_store::{Change, NamespaceRecord, NamespaceUse, Removal};

use super::{AttachError, Inner, error::Subject};

/// What is known of a namespace that is to be deleted. The kubelet sends either the sandbox or the pod's name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeleteRequest {
    /// The sandbox.
    pub sandbox: Option<SandboxId>,
    /// The pod.
    pub pod: PodRef,
    /// The namespace.
    pub netns: Option<PathBuf>,
}

impl Inner {
    pub(super) async fn create_namespace(&self, pod: PodRef, prefix: &str) -> Result<PathBuf, AttachError> {
        self.touch();
        let subject = Subject {
            pod: pod.clone(),
            sandbox: String::new(),
        };
        let location = self.location(&pod, prefix)?;
        if location.is_none()
            && let Some(path) = self.take_warm(&pod)?
        {
            self.warm_wanted.notify_one();
            return Ok(path);
        }
        let path = location.unwrap_or_else(|| self.fresh_path());
        let making = NamespaceRecord {
            path: path.clone(),
            identity: None,
            used_by: NamespaceUse::Making,
            warm: None,
        };
        self.record(&making)?;
        match netlink::netns::create(&path).await {
            Ok(identity) => {
                let used_by = NamespaceUse::Given { pod, since: now() };
                self.record(&NamespaceRecord {
                    identity: Some(identity),
                    used_by,
                    ..making
                })?;
                Ok(path)
            }
            Err(error) => {
                self.forget_namespace(&path)?;
                Err(subject.failed("creating the network namespace")(error))
            }
        }
    }

    /// A path that nobody has used: names of pods are not part of it, so no two pods can collide in it.
    pub(super) fn fresh_path(&self) -> PathBuf {
        self.options.netns_dir.join(format!("kni-{:016x}", fastrand::u64(..)))
    }

    /// The path for a prefix that leads elsewhere than the usual folder.
    fn location(&self, pod: &PodRef, prefix: &str) -> Result<Option<PathBuf>, AttachError> {
        if prefix.is_empty() {
            return Ok(None);
        }
        let invalid = |reason: &str| AttachError::InvalidField {
            pod: pod.clone(),
            sandbox: String::new(),
            field: "netns_path_prefix",
            reason: format!("{reason}: {:?}", prefix.chars().take(256).collect::<String>()),
        };
        let plain = Path::new(prefix)
            .components()
            .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        if !prefix.starts_with('/') || !plain || prefix.contains("//") || prefix.chars().any(char::is_control) {
            return Err(invalid("must be an absolute path without '.' and '..'"));
        }
        let path = PathBuf::from(format!("{prefix}kni-{:016x}", fastrand::u64(..)));
        let dir = path.parent().ok_or_else(|| invalid("names no folder"))?;
        let usual = |dir: &Path| dir == self.options.netns_dir || dir == Path::new("/var/run/netns");
        if usual(dir) && prefix.ends_with('/') {
            return Ok(None);
        }
        if dir.is_dir() {
            Ok(Some(path))
        } else {
            Err(invalid("its folder does not exist"))
        }
    }

    fn take_warm(&self, pod: &PodRef) -> Result<Option<PathBuf>, AttachError> {
        let mut state = self.state();
        let Some(warm) = state
            .namespaces
            .values()
            .find(|record| record.used_by == NamespaceUse::Warm)
        else {
            return Ok(None);
        };
        let used_by = NamespaceUse::Given {
            pod: pod.clone(),
            since: now(),
        };
        let given = NamespaceRecord {
            used_by,
            ..warm.clone()
        };
        self.commit(Change::new().namespace(&given))?;
        let path = given.path.clone();
        state.namespaces.insert(path.clone(), given);
        Ok(Some(path))
    }

    pub(super) async fn delete(&self, request: DeleteRequest) -> Result<(), AttachError> {
        self.touch();
        let DeleteRequest { sandbox, pod, netns } = request;
        if let Some(id) = &sandbox {
            let _one_at_a_time = self.locks.lock(id.as_str()).await;
            self.detach_if_known(id).await?;
            let bound = self.state().namespaces_of(id);
            for record in bound {
                self.remove_namespace(&record).await?;
            }
        }
        for record in self.unclaimed(sandbox.as_ref(), &pod, netns.as_deref()) {
            self.remove_namespace(&record).await?;
        }
        if let (None, Some(path)) = (&sandbox, &netns) {
            return self.delete_by_path(path).await;
        }
        Ok(())
    }

    /// Namespaces that were given out and never attached. By path, whoever asks; by the pod's name alone only if no
    /// sandbox is named, so that deleting an old sandbox never touches what was made for a newer one.
    fn unclaimed(&self, sandbox: Option<&SandboxId>, pod: &PodRef, netns: Option<&Path>) -> Vec<NamespaceRecord> {
        let state = self.state();
        let by_name = sandbox.is_none() && netns.is_none() && !pod.name.is_empty();
        let wanted = |record: &&NamespaceRecord| match &record.used_by {
            NamespaceUse::Given { pod: given, .. } => {
                netns == Some(record.path.as_path())
                    || (by_name && given.name == pod.name && given.namespace == pod.namespace)
            }
            NamespaceUse::Making | NamespaceUse::Warm | NamespaceUse::Bound { .. } => false,
        };
        state.namespaces.values().filter(wanted).cloned().collect()
    }

    /// The path names one namespace, so its sandbox is meant even though its id was not said.
    async fn delete_by_path(&self, path: &Path) -> Result<(), AttachError> {
        let record = self.state().namespace_at(path);
        let Some(NamespaceRecord {
            used_by: NamespaceUse::Bound { sandbox },
            identity,
            ..
        }) = &record
        else {
            return Ok(());
        };
        let _one_at_a_time = self.locks.lock(sandbox.as_str()).await;
        let attached = self.state().sandboxes.get(sandbox).map(|found| found.netns_identity);
        // A refused attach has tied the namespace to a sandbox that lives in another one.
        if attached.is_some() && attached == *identity {
            self.detach_if_known(sandbox).await?;
        }
        let record = self.state().namespace_at(path);
        match record {
            Some(record) => self.remove_namespace(&record).await,
            None => Ok(()),
        }
    }

    /// Unmounts a namespace of ours and queues what was made ahead in it. Idempotent. Does nothing if the namespace is
    /// no longer what `record` says: then an attach has claimed it, or another call removes it.
    pub(super) async fn remove_namespace(&self, record: &NamespaceRecord) -> Result<(), AttachError> {
        if !self.withhold(record) {
            return Ok(());
        }
        if let Err(error) = netlink::netns::remove(&record.path).await {
            self.state().namespaces.insert(record.path.clone(), record.clone());
            return Err(super::error::kernel_of_node("removing the network namespace", &error));
        }
        let mut state = self.state();
        let mut change = Change::new().remove_namespace(&record.path);
        let removal = record.warm.as_ref().map(|warm| Removal {
            endpoint: warm.endpoint,
            host_ifname: warm.host_ifname.clone(),
            host_ifindex: warm.host_ifindex,
            netns: record.identity,
        });
        if let Some(removal) = &removal {
            change = change.removal(removal);
        }
        self.commit(change)?;
        state.namespaces.remove(&record.path);
        state
            .removals
            .extend(removal.map(|removal| (removal.endpoint, removal)));
        drop(state);
        self.reaper_wanted.notify_one();
        Ok(())
    }

    /// From here on no attach finds the namespace. In memory only: a restarted agent reads the record as it was, and
    /// finds that the namespace is gone or hears the client's call again.
    fn withhold(&self, record: &NamespaceRecord) -> bool {
        let mut state = self.state();
        if state.namespaces.get(&record.path) != Some(record) {
            return false;
        }
        let going = NamespaceRecord {
            identity: None,
            used_by: NamespaceUse::Making,
            ..record.clone()
        };
        state.namespaces.insert(record.path.clone(), going);
        true
    }

    pub(super) fn record(&self, record: &NamespaceRecord) -> Result<(), AttachError> {
        let mut state = self.state();
        self.commit(Change::new().namespace(record))?;
        state.namespaces.insert(record.path.clone(), record.clone());
        Ok(())
    }

    fn forget_namespace(&self, path: &Path) -> Result<(), AttachError> {
        let mut state = self.state();
        self.commit(Change::new().remove_namespace(path))?;
        state.namespaces.remove(path);
        Ok(())
    }
}

/// Seconds since the Unix epoch.
pub(super) fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
