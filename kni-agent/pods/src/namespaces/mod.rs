//! Owns the network namespaces that the agent makes: gives them to clients, binds them to sandboxes, removes them.

mod demand;
mod prewarm;
mod unclaimed;

use std::{
    path::{Component, Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use kni_model::{NetnsIdentity, PodRef, SandboxId, error_chain};
use kni_netlink::{self as netlink, Netns};
use kni_store::{Change, NamespaceRecord, NamespaceUse, Removal, WarmInterface};

use self::demand::Demand;
pub use self::demand::PoolSize;
pub(crate) use self::unclaimed::in_use;

/// Beginning of the ids of sandboxes whose own id was lost.
pub(crate) const RECOVERED_PREFIX: &str = "recovered-";
/// Beginning of the names of namespaces.
const NAME_PREFIX: &str = "kni-";
use crate::{
    clock::since_boot,
    error::{AttachError, Subject},
    kernel::Kernel,
    registry::{Registry, State},
};

/// The namespaces, some of them prewarmed for later pods.
pub(crate) struct NamespacePool {
    registry: Arc<Registry>,
    kernel: Arc<Kernel>,
    /// Where namespaces are mounted.
    netns_dir: PathBuf,
    /// How many are prewarmed.
    size: PoolSize,
    demand: Mutex<Demand>,
}

impl NamespacePool {
    pub(crate) fn new(registry: &Arc<Registry>, kernel: &Arc<Kernel>, netns_dir: PathBuf, size: PoolSize) -> Self {
        Self {
            registry: Arc::clone(registry),
            kernel: Arc::clone(kernel),
            netns_dir,
            size,
            demand: Mutex::default(),
        }
    }

    /// Where namespaces are mounted.
    pub(crate) fn dir(&self) -> &Path {
        &self.netns_dir
    }

    /// Gives a namespace to a client: a prewarmed one where there is one and the client has no path of its own.
    pub(crate) async fn create(&self, pod: PodRef, prefix: &str) -> Result<PathBuf, AttachError> {
        self.registry.note_activity();
        let subject = Subject::pod(pod.clone());
        let location = self.location(&subject, prefix)?;
        if location.is_none() {
            self.demand
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .note(Instant::now());
            let taken = self.take_prewarmed(&pod);
            // Now that the pool is smaller.
            self.registry.background.notify_one();
            if let Some(path) = taken? {
                return Ok(path);
            }
        }
        let path = location.unwrap_or_else(|| self.fresh_path());
        let making = NamespaceRecord {
            path: path.clone(),
            identity: None,
            used_by: NamespaceUse::Making,
            warm: None,
        };
        self.registry.lock().put_namespace(making.clone())?;
        match netlink::netns::create(&path).await {
            Ok(identity) => {
                let used_by = NamespaceUse::Given { pod, since: now() };
                // Made already: it must be known, whether the file can be written or not.
                self.registry.lock().put_namespace_deferred(NamespaceRecord {
                    identity: Some(identity),
                    used_by,
                    ..making
                })?;
                Ok(path)
            }
            Err(error) => {
                self.registry.lock().remove_namespace(&path)?;
                Err(subject.kernel("creating the network namespace", &error))
            }
        }
    }

    /// An unused path: it contains no pod name, so paths of two pods never collide.
    fn fresh_path(&self) -> PathBuf {
        self.netns_dir.join(format!("{NAME_PREFIX}{:016x}", fastrand::u64(..)))
    }

    /// The path for a prefix that is outside the usual folder.
    fn location(&self, subject: &Subject, prefix: &str) -> Result<Option<PathBuf>, AttachError> {
        if prefix.is_empty() {
            return Ok(None);
        }
        let invalid = |reason: &str| {
            let shown = prefix.chars().take(256).collect::<String>();
            subject.invalid("netns_path_prefix", format!("{reason}: {shown:?}"))
        };
        let plain = Path::new(prefix)
            .components()
            .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        if !prefix.starts_with('/') || !plain || prefix.contains("//") || prefix.chars().any(char::is_control) {
            return Err(invalid("must be an absolute path without '.' and '..'"));
        }
        let path = PathBuf::from(format!("{prefix}{NAME_PREFIX}{:016x}", fastrand::u64(..)));
        let dir = path.parent().ok_or_else(|| invalid("names no folder"))?;
        let usual = |dir: &Path| dir == self.netns_dir || dir == Path::new("/var/run/netns");
        if usual(dir) && prefix.ends_with('/') {
            return Ok(None);
        }
        if dir.is_dir() {
            Ok(Some(path))
        } else {
            Err(invalid("its folder does not exist"))
        }
    }

    fn take_prewarmed(&self, pod: &PodRef) -> Result<Option<PathBuf>, AttachError> {
        let mut state = self.registry.lock();
        let free = |record: &&NamespaceRecord| {
            record.used_by == NamespaceUse::Warm && state.upgrading.as_ref() != Some(&record.path)
        };
        // Those that need no upgrade later first.
        let upgraded = |record: &&NamespaceRecord| !self.is_provisional(record);
        let mut records = state.namespaces.values().filter(free);
        let found = records.clone().find(upgraded).or_else(|| records.next());
        let Some(prewarmed) = found else {
            return Ok(None);
        };
        let used_by = NamespaceUse::Given {
            pod: pod.clone(),
            since: now(),
        };
        let given = NamespaceRecord {
            used_by,
            ..prewarmed.clone()
        };
        let path = given.path.clone();
        state.put_namespace(given)?;
        Ok(Some(path))
    }

    /// Binds a namespace of the agent to the sandbox of a refused or long attach, so that deleting the sandbox removes
    /// it. One whose sandbox was detached passes to the new one: deleting the old sandbox must not affect it any more.
    pub(crate) fn bind(&self, sandbox: &SandboxId, netns: &Netns) -> Result<(), AttachError> {
        let mut state = self.registry.lock();
        let found = state.namespace_of(netns.id());
        let Some(bound) = found.and_then(|record| bound(&state, sandbox, record)) else {
            return Ok(());
        };
        state.put_namespace(bound)?;
        drop(state);
        self.registry.background.notify_one();
        Ok(())
    }

    /// Whether the agent made the namespace.
    pub(crate) fn is_ours(&self, netns: NetnsIdentity) -> bool {
        self.registry.lock().namespace_of(netns).is_some()
    }

    /// Queues the prewarmed interface of a namespace: another one is about to take its name.
    pub(crate) fn discard_prewarmed(&self, netns: NetnsIdentity) -> Result<(), AttachError> {
        let record = self.registry.lock().namespace_of(netns).cloned();
        match record.as_ref().and_then(|record| Some((record, record.warm.as_ref()?))) {
            Some((record, warm)) => self.discard(record, warm),
            None => Ok(()),
        }
    }

    /// The namespace stays; an attach in it will make a new interface.
    fn discard(&self, record: &NamespaceRecord, warm: &WarmInterface) -> Result<(), AttachError> {
        self.kernel.disconnect(record.identity);
        let kept = NamespaceRecord {
            warm: None,
            ..record.clone()
        };
        let removal = removal_of(record, warm);
        let mut state = self.registry.lock();
        state.commit_deferred(Change::new().namespace(&kept).removal(&removal))?;
        state.namespaces.insert(kept.path.clone(), kept);
        state.queue([removal]);
        drop(state);
        // The attach waits for it only while its host end exists.
        self.registry.reaper.notify_one();
        Ok(())
    }

    /// Unmounts a namespace of ours and queues its prewarmed interface. Idempotent. Does nothing if the namespace
    /// differs from `record`: then an attach has claimed it, or another call removes it.
    pub(crate) fn remove(&self, record: &NamespaceRecord) -> Result<(), AttachError> {
        if !self.withhold(record) {
            return Ok(());
        }
        self.kernel.disconnect(record.identity);
        let subject = Subject::node();
        let removed = kni_tasks::in_place(|| netlink::netns::remove_here(&record.path));
        let removed = removed.map_err(|panicked| subject.ended(&panicked));
        let removed = removed.and_then(|done| done.map_err(subject.failed("removing the network namespace")));
        if let Err(error) = removed {
            let mut state = self.registry.lock();
            state.namespaces.insert(record.path.clone(), record.clone());
            return Err(error);
        }
        let mut state = self.registry.lock();
        let removal = record.warm.as_ref().map(|warm| removal_of(record, warm));
        let change = removal
            .iter()
            .fold(Change::new().remove_namespace(&record.path), Change::removal);
        state.commit_deferred(change)?;
        state.namespaces.remove(&record.path);
        state.queue(removal);
        drop(state);
        self.registry.reaper.notify_one();
        Ok(())
    }

    /// From here on no attach finds the namespace. In memory only: a restarted agent reads the unchanged record, and
    /// finds that the namespace is gone or receives the client's call again.
    fn withhold(&self, record: &NamespaceRecord) -> bool {
        let mut state = self.registry.lock();
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

    /// Keeps the namespaces that clients have, adopts prewarmed ones, removes those that were being made.
    pub(crate) fn restore(&self, record: &NamespaceRecord) -> Result<(), AttachError> {
        let whole = netlink::netns::identity(&record.path).ok() == record.identity && record.identity.is_some();
        let retained = match &record.used_by {
            NamespaceUse::Making => false,
            NamespaceUse::Warm | NamespaceUse::Given { .. } => whole,
            // Only the client's delete removes it.
            NamespaceUse::Bound { .. } => true,
        };
        if !retained {
            return self.remove(record);
        }
        let Some(warm) = &record.warm else { return Ok(()) };
        match self.kernel.dataplane.adopt(warm.host_ifname.as_str(), warm.endpoint) {
            Ok(()) => Ok(()),
            Err(error) if record.used_by == NamespaceUse::Warm => {
                tracing::warn!(error = error_chain(&error), "cannot adopt a prewarmed namespace");
                self.remove(record)
            }
            Err(error) => {
                tracing::warn!(error = error_chain(&error), "cannot adopt a prewarmed interface");
                self.discard(record, warm)
            }
        }
    }
}

/// The record of a namespace that is bound to a sandbox from now on; none where it is bound already.
pub(crate) fn bound(state: &State, sandbox: &SandboxId, record: &NamespaceRecord) -> Option<NamespaceRecord> {
    if let NamespaceUse::Bound { sandbox: holder } = &record.used_by
        && (holder == sandbox || state.sandboxes.contains_key(holder))
    {
        return None;
    }
    let used_by = NamespaceUse::Bound {
        sandbox: sandbox.clone(),
    };
    Some(NamespaceRecord {
        used_by,
        ..record.clone()
    })
}

fn removal_of(record: &NamespaceRecord, warm: &WarmInterface) -> Removal {
    Removal {
        endpoint: warm.endpoint,
        host_ifname: warm.host_ifname.clone(),
        host_ifindex: warm.host_ifindex,
        netns: record.identity,
    }
}

/// Whether the name of a namespace is one that the agent gives: 16 hexadecimal digits.
pub(crate) fn is_own_path(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let number = name.strip_prefix(NAME_PREFIX).unwrap_or_default();
    number.len() == 16 && number.chars().all(|c| c.is_ascii_hexdigit()) && !path.starts_with("/proc")
}

/// Seconds since the node's boot.
pub(crate) fn now() -> u64 {
    since_boot().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_that_of_the_kernel_since_its_boot_which_is_never_set() {
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let seconds: u64 = uptime.split('.').next().unwrap().parse().unwrap();
        assert!(now().abs_diff(seconds) <= 1, "{} at {seconds} s", now());
    }
}
