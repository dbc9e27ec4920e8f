//! Notices that the API server's storage was restored from a backup when no watch shows it.
//!
//! A watch resumes at the newest version that it has seen. The API server accepts versions that its storage has not reached:
//! such a watch reports nothing until then, and never what the restore has undone. An API server is restarted when its
//! storage is restored, so the node's own object is compared whenever a watch was interrupted.

use std::time::Duration;

use kni_crd::NodeNetwork;
use kni_reflectors::version_of;
use kube::{Api, ResourceExt as _, api::ListParams, core::PartialObjectMeta};

use super::ObjectControllers;

/// Interruptions within this time are one.
const GATHER: Duration = Duration::from_millis(200);
/// All nodes are interrupted together. This long for each, so that 5 000 nodes send their requests within 10 s.
const PER_NODE: Duration = Duration::from_millis(2);
/// Pause after the first failed request; each additional one doubles it.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause, as that of the watches.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What is known of the storage.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Storage {
    /// The newest version.
    newest: u64,
    /// UID and version of the node's `NodeNetwork`, if it has one.
    own: Option<(String, u64)>,
}

impl Storage {
    /// Whether a later state has less than this one. The version of an object never decreases. A deletion of the
    /// `NodeNetwork` by an administrator causes a superfluous list.
    fn is_undone_by(&self, later: &Self) -> bool {
        let is_older = match (&self.own, &later.own) {
            (Some((uid, version)), Some((now_uid, now))) => uid == now_uid && now < version,
            (Some(_), None) => true,
            (None, _) => false,
        };
        is_older || later.newest < self.newest
    }
}

impl ObjectControllers {
    /// Compares for as long as the agent runs.
    pub(super) async fn compare_storage(self) {
        let mut interruptions = self.interruptions.subscribe();
        while kni_tasks::waiting(interruptions.changed()).await.is_ok() {
            kni_tasks::waiting(tokio::time::sleep(GATHER + self.share_of_spread())).await;
            let mut pause = SHORTEST_PAUSE;
            loop {
                interruptions.mark_unchanged();
                let before = self.cached_storage();
                match self.read_storage().await {
                    Ok(now) => {
                        if before.is_undone_by(&now) {
                            // All nodes notice it together, and read every kind again.
                            kni_tasks::waiting(tokio::time::sleep(self.share_of_spread())).await;
                            self.cache.note_restore();
                        }
                        break;
                    }
                    // What the agent may not read it cannot compare; the next interruption asks again.
                    Err(kube::Error::Api(status)) if matches!(status.code, 401 | 403 | 404) => break,
                    Err(error) => tracing::debug!(%error, "cannot read the object of the node"),
                }
                kni_tasks::waiting(tokio::time::sleep(pause.mul_f64(fastrand::f64().mul_add(0.5, 0.5)))).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }

    /// A random part of the time over which all nodes spread what they do at once.
    fn share_of_spread(&self) -> Duration {
        let nodes = self.cache.tables().node_endpoints.rows().len();
        let most = PER_NODE.saturating_mul(u32::try_from(nodes).unwrap_or(u32::MAX));
        most.mul_f64(fastrand::f64())
    }

    /// What the watches have shown.
    fn cached_storage(&self) -> Storage {
        let tables = self.cache.tables();
        // After a restore that was noticed, the cached object is that of the former storage until it is listed again.
        let is_reported = tables.own_network.newest() > 0;
        let own = tables.own_network.get("", &self.node).filter(|_| is_reported);
        Storage {
            newest: tables.newest(),
            own: own.and_then(|object| Some((object.uid()?, version_of(&object.metadata)))),
        }
    }

    /// What the storage has now.
    async fn read_storage(&self) -> Result<Storage, kube::Error> {
        let api: Api<PartialObjectMeta<NodeNetwork>> = Api::all(self.client.clone());
        let own = ListParams::default().fields(&format!("metadata.name={}", self.node));
        let list = api.list(&own).await?;
        let newest = list.metadata.resource_version.as_deref();
        Ok(Storage {
            // An answer without a version shows nothing.
            newest: newest.and_then(|version| version.parse().ok()).unwrap_or(u64::MAX),
            own: list
                .items
                .first()
                .and_then(|object| Some((object.uid()?, version_of(&object.metadata)))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage(newest: u64, own: Option<(&str, u64)>) -> Storage {
        Storage {
            newest,
            own: own.map(|(uid, version)| (uid.to_owned(), version)),
        }
    }

    #[test]
    fn a_restore_is_noticed_by_versions_that_decrease() {
        let before = storage(100, Some(("a", 90)));
        for (later, is_restored) in [
            (storage(100, Some(("a", 90))), false),
            (storage(120, Some(("a", 110))), false),
            // The former versions are still to come.
            (storage(80, Some(("a", 70))), true),
            // They have passed; only the object shows it.
            (storage(120, Some(("a", 70))), true),
            (storage(120, None), true),
            // An administrator has deleted it, and the agent has made another one.
            (storage(120, Some(("b", 110))), false),
        ] {
            assert_eq!(before.is_undone_by(&later), is_restored, "{later:?}");
        }
        assert!(!storage(0, None).is_undone_by(&storage(5, None)), "nothing was known");
    }
}
