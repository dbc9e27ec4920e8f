//! Notices that the API server's storage was restored from a backup when no watch shows it.
//!
//! A watch resumes at the newest version that it has seen. The API server accepts versions that its storage has not
//! reached: such a watch reports nothing until then, and never what the restore has undone. An API server is restarted
//! when its storage is restored, so objects of the node are compared whenever a watch was interrupted.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kni_api::AddressBlock;
use kni_cluster::Key;
use kni_crd::{NodeNetwork, PodInterface};
use kni_reflectors::version_of;
use kube::{Api, api::ListParams};

use super::ObjectControllers;

/// Interruptions within this time are one.
const GATHER: Duration = Duration::from_millis(200);
/// All nodes are interrupted together. This long for each, so that 5 000 nodes send their requests within 10 s.
const PER_NODE: Duration = Duration::from_millis(2);
/// Pause after the first failed request; each additional one doubles it.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause, as that of the watches.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// How many of the node's objects are compared beside its `NodeNetwork`: those that were written last, which a restore
/// undoes first.
const WITNESSES: usize = 4;

/// An object of the node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Own {
    Network,
    Block(Key),
    /// With the UID of its pod.
    Interface(Key, String),
}

/// UID and version of an object.
type Version = (String, u64);

/// What is known of the storage.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Storage {
    /// The newest version.
    newest: u64,
    /// Objects of the node.
    own: BTreeMap<Own, Version>,
}

impl Storage {
    /// Whether a later state has less than this one. The version of an object never decreases. A deletion between the
    /// two causes a superfluous list.
    fn is_undone_by(&self, later: &Self) -> bool {
        let is_older = |(own, (uid, version)): (&Own, &Version)| match later.own.get(own) {
            Some((later_uid, later)) => uid == later_uid && later < version,
            None => true,
        };
        self.own.iter().any(is_older) || later.newest < self.newest
    }
}

impl ObjectControllers {
    /// Compares for as long as the agent runs.
    pub(super) async fn compare_storage(self: Arc<Self>) {
        let mut interruptions = self.interruptions.subscribe();
        while kni_tasks::waiting(interruptions.changed()).await.is_ok() {
            // Now: what the agent writes from here on may be newer than a restore.
            let mut before = self.cached_storage();
            kni_tasks::waiting(tokio::time::sleep(GATHER + self.share_of_spread())).await;
            let mut pause = SHORTEST_PAUSE;
            loop {
                interruptions.mark_unchanged();
                match self.read_storage(&before).await {
                    Ok(now) => {
                        before.own.retain(|own, _| self.is_still_expected(own));
                        if before.is_undone_by(&now) {
                            // All nodes notice it together, and read every kind again.
                            kni_tasks::waiting(tokio::time::sleep(self.share_of_spread())).await;
                            self.cache.note_restore();
                        }
                        break;
                    }
                    // An API server that starts refuses for a while what it has not read yet, rights and definitions.
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

    /// What the watches have shown: the newest version, and the objects that are compared. After a restore that was
    /// noticed, cached objects are those of the former storage until they are listed again, and are left out.
    fn cached_storage(&self) -> Storage {
        let mut tables = self.cache.tables();
        let newest = tables.newest();
        let network = tables.own_network.get("", &self.node);
        let network = network.filter(|_| tables.own_network.newest() > 0);
        let mut own: BTreeMap<Own, Version> = network
            .and_then(|object| Some((Own::Network, version(&object.metadata)?)))
            .into_iter()
            .collect();
        let blocks = tables.blocks.rows().iter().filter(|_| tables.blocks.newest() > 0);
        let blocks = blocks.filter_map(|(key, row)| Some((Own::Block(key.clone()), version(&row.metadata)?)));
        let interfaces = tables.interfaces.rows().iter();
        let interfaces = interfaces.filter(|_| tables.interfaces.newest() > 0);
        let interfaces = interfaces.filter_map(|(key, row)| Some((interface(key, row), version(&row.metadata)?)));
        let mut others: Vec<(Own, Version)> = blocks.chain(interfaces).collect();
        others.sort_by_key(|(_, (_, version))| std::cmp::Reverse(*version));
        own.extend(others.into_iter().take(WITNESSES));
        Storage { newest, own }
    }

    /// Whether an object that was cached when a watch was interrupted must still be there. An interface goes with its
    /// pod; an interface that a list no longer has, while its pod is there, may be what the restore has undone.
    fn is_still_expected(&self, own: &Own) -> bool {
        let Own::Interface(key, pod_uid) = own else {
            return true;
        };
        let tables = self.cache.tables();
        let mut pods = tables.pods.rows().values();
        tables.interfaces.rows().contains_key(key) || pods.any(|pod| pod.uid == *pod_uid)
    }

    /// What the storage has now, of the objects in `before`.
    async fn read_storage(&self, before: &Storage) -> Result<Storage, kube::Error> {
        let api: Api<NodeNetwork> = Api::all(self.client.clone());
        let own = ListParams::default().fields(&format!("metadata.name={}", self.node));
        let list = api.list_metadata(&own).await?;
        let newest = list.metadata.resource_version.as_deref();
        let mut now = Storage {
            // An answer without a version shows nothing.
            newest: newest.and_then(|version| version.parse().ok()).unwrap_or(u64::MAX),
            own: BTreeMap::new(),
        };
        let network = list.items.first().and_then(|object| version(&object.metadata));
        now.own.extend(network.map(|version| (Own::Network, version)));
        for own in before.own.keys() {
            let found = match own {
                Own::Network => continue,
                Own::Block(key) => {
                    let api: Api<AddressBlock> = Api::all(self.client.clone());
                    api.get_metadata_opt(&key.name)
                        .await?
                        .and_then(|object| version(&object.metadata))
                }
                Own::Interface(key, _) => {
                    let api: Api<PodInterface> = Api::namespaced(self.client.clone(), &key.namespace);
                    api.get_metadata_opt(&key.name)
                        .await?
                        .and_then(|object| version(&object.metadata))
                }
            };
            now.own.extend(found.map(|version| (own.clone(), version)));
        }
        Ok(now)
    }
}

fn interface(key: &Key, row: &PodInterface) -> Own {
    Own::Interface(key.clone(), row.spec.pod_uid.clone())
}

fn version(metadata: &ObjectMeta) -> Option<Version> {
    Some((metadata.uid.clone()?, version_of(metadata)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage(newest: u64, own: &[(Own, &str, u64)]) -> Storage {
        Storage {
            newest,
            own: own
                .iter()
                .map(|(own, uid, version)| (own.clone(), ((*uid).to_owned(), *version)))
                .collect(),
        }
    }

    #[test]
    fn a_restore_is_noticed_by_versions_that_decrease() {
        let network = |uid, version| [(Own::Network, uid, version)];
        let before = storage(100, &network("a", 90));
        for (later, is_restored) in [
            (storage(100, &network("a", 90)), false),
            (storage(120, &network("a", 110)), false),
            // The former versions are still to come.
            (storage(80, &network("a", 70)), true),
            // They have passed; only the object shows it.
            (storage(120, &network("a", 70)), true),
            (storage(120, &[]), true),
            // An administrator has deleted it, and the agent has made another one.
            (storage(120, &network("b", 110)), false),
        ] {
            assert_eq!(before.is_undone_by(&later), is_restored, "{later:?}");
        }
        assert!(!storage(0, &[]).is_undone_by(&storage(5, &[])), "nothing was known");
    }

    /// The agent has written its `NodeNetwork` again since the restore, or never before it.
    #[test]
    fn objects_that_were_written_last_show_a_restore_too() {
        let block = || Own::Block(Key::new("", "red.v4-10-0-0-0-26"));
        let interface = || Own::Interface(Key::new("shop", "web.eth0"), "p".to_owned());
        let before = storage(
            100,
            &[(Own::Network, "n", 60), (block(), "b", 80), (interface(), "i", 90)],
        );
        let newer = (Own::Network, "n", 130);
        for (later, is_restored) in [
            (
                storage(130, &[newer.clone(), (block(), "b", 80), (interface(), "i", 95)]),
                false,
            ),
            (storage(130, &[newer.clone(), (block(), "b", 80)]), true),
            (storage(130, &[newer, (block(), "b", 70), (interface(), "i", 90)]), true),
        ] {
            assert_eq!(before.is_undone_by(&later), is_restored, "{later:?}");
        }
    }
}
