//! Follows the API server with one watch per kind, which is restarted for as long as the process runs.

use std::{fmt::Debug, time::Duration};

use futures::StreamExt as _;
use kube::{
    Api, Resource, ResourceExt as _,
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;

use kni_cluster::{ClusterCache, Key, Table, Tables};

/// Interval of the checks for a kind that the API server does not have.
const ABSENT_PAUSE: Duration = Duration::from_secs(10);

/// A watched kind: its table, and the conversion of its objects.
pub(super) struct Kind<K, V> {
    /// Name for messages.
    pub(super) name: &'static str,
    pub(super) table: fn(&mut Tables) -> &mut Table<V>,
    pub(super) convert: fn(K) -> Option<V>,
    /// Whether the kind may be missing in a cluster.
    pub(super) optional: bool,
}

impl<K, V> Kind<K, V>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    V: PartialEq + Send + 'static,
{
    /// Follows all objects of the kind until the task is aborted.
    pub(super) async fn reflect(self, api: Api<K>, cache: ClusterCache) {
        self.reflect_selected(api, watcher::Config::default(), cache).await;
    }

    /// [`Self::reflect`] for the objects that `config` selects.
    pub(super) async fn reflect_selected(self, api: Api<K>, config: watcher::Config, cache: ClusterCache) {
        let mut last_error = String::new();
        loop {
            let mut events = watcher(api.clone(), config.clone()).default_backoff().boxed();
            let mut absent = false;
            while let Some(event) = events.next().await {
                match event {
                    Ok(event) => {
                        last_error.clear();
                        self.take(event, &cache);
                    }
                    Err(error) if self.optional && is_absent(&error) => {
                        absent = true;
                        break;
                    }
                    Err(error) => self.report(&mut last_error, &error),
                }
            }
            if absent {
                // The kind is missing, so its table is complete and empty.
                cache.change(|tables| {
                    let table = (self.table)(tables);
                    table.begin();
                    table.complete();
                });
            }
            tokio::time::sleep(ABSENT_PAUSE).await;
        }
    }

    fn take(&self, event: Event<K>, cache: &ClusterCache) {
        cache.change(|tables| {
            let table = (self.table)(tables);
            match event {
                Event::Init => table.begin(),
                Event::InitDone => table.complete(),
                Event::InitApply(object) | Event::Apply(object) => {
                    let key = key_of(&object);
                    table.put(key, (self.convert)(object));
                }
                Event::Delete(object) => table.remove(&key_of(&object)),
            }
        });
    }

    /// Logs each error once: the watch restarts by itself.
    fn report(&self, last: &mut String, error: &watcher::Error) {
        let text = error.to_string();
        if *last != text {
            tracing::warn!(
                kind = self.name,
                error = text,
                "cannot watch the API server; the cached objects stay"
            );
            *last = text;
        }
    }
}

fn key_of<K: Resource>(object: &K) -> Key {
    Key {
        namespace: object.namespace().unwrap_or_default(),
        name: object.name_any(),
    }
}

fn is_absent(error: &watcher::Error) -> bool {
    let (watcher::Error::InitialListFailed(cause)
    | watcher::Error::WatchStartFailed(cause)
    | watcher::Error::WatchFailed(cause)) = error
    else {
        return false;
    };
    matches!(cause, kube::Error::Api(status) if status.code == 404)
}
