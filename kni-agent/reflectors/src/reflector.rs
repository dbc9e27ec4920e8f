//! Follows the API server with one watch per kind, which is restarted for as long as the agent runs.

mod joined;

use std::{
    collections::BTreeSet,
    fmt::{Debug, Display},
    pin::pin,
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kni_cluster::{ClusterCache, Key, Refused, Table, Tables};
use kni_model::NetworkName;
use kube::{
    Api, Resource,
    runtime::{
        WatchStreamExt as _,
        utils::Backoff as _,
        watcher::{self, Event, InitialListStrategy, watcher},
    },
};
use serde::de::DeserializeOwned;

use super::{
    decoded::{Decoded, Undecoded},
    watches::WatchState,
};

/// A watch that was accepted for so long is a new one: pauses after a refusal begin anew.
const ACCEPTED: Duration = Duration::from_mins(1);

/// Why a watch has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// The API server refuses, or its storage was restored.
    Refused,
    /// The API server does not send lists as the beginning of a watch.
    NotStreamed,
}

/// A watched kind: its table, and the conversion of its objects.
pub(super) struct Kind<K, V> {
    /// Name for messages.
    name: &'static str,
    table: fn(&mut Tables) -> &mut Table<V>,
    convert: fn(K) -> Option<V>,
    /// Stands for an object that cannot be decoded. Without one, its last understood version stays.
    substitute: fn(&Undecoded) -> Option<V>,
    /// What a row is after the former one of its name.
    after: fn(V, &V) -> V,
}

impl<K, V> Clone for Kind<K, V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K, V> Copy for Kind<K, V> {}

impl<K, V> Kind<K, V>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    V: PartialEq + Send + 'static,
{
    /// A kind named `name` in messages.
    pub(super) const fn new(
        name: &'static str,
        table: fn(&mut Tables) -> &mut Table<V>,
        convert: fn(K) -> Option<V>,
    ) -> Self {
        Self {
            name,
            table,
            convert,
            substitute: |_| None,
            after: |row, _| row,
        }
    }

    pub(super) const fn name(&self) -> &'static str {
        self.name
    }

    pub(super) const fn table(&self) -> fn(&mut Tables) -> &mut Table<V> {
        self.table
    }

    /// Puts `substitute` in the place of objects that cannot be decoded.
    pub(super) const fn with_substitute(self, substitute: fn(&Undecoded) -> Option<V>) -> Self {
        Self { substitute, ..self }
    }

    /// Lets `after` make each row of the new and of the former one.
    pub(super) const fn with_former(self, after: fn(V, &V) -> V) -> Self {
        Self { after, ..self }
    }

    /// Follows the objects of the kind that `config` selects until the task is aborted.
    pub(super) async fn reflect_selected(
        self,
        api: Api<Decoded<K>>,
        config: watcher::Config,
        cache: ClusterCache,
        counts: WatchState,
    ) {
        let mut pauses = counts.pauses();
        loop {
            let begun = Instant::now();
            // A list shows whether the API server still refuses; a watch that is resumed does not.
            self.watch(api.clone(), (config.clone(), None), &cache, &counts).await;
            if begun.elapsed() >= ACCEPTED {
                pauses.reset();
            }
            kni_tasks::waiting(tokio::time::sleep(pauses.next().unwrap_or_default())).await;
        }
    }

    /// Follows all objects until the API server refuses to list or to watch the kind, or its storage was restored.
    pub(super) async fn reflect_while_served(
        self,
        api: Api<Decoded<K>>,
        config: watcher::Config,
        cache: ClusterCache,
        counts: WatchState,
    ) {
        self.watch(api, (config, None), &cache, &counts).await;
    }

    /// Lists and watches until the API server refuses, or its storage was restored. `networks` are those that `config`
    /// selects, if it does.
    async fn watch(
        &self,
        api: Api<Decoded<K>>,
        (config, networks): (watcher::Config, Option<&BTreeSet<NetworkName>>),
        cache: &ClusterCache,
        counts: &WatchState,
    ) {
        if counts.streams_lists() {
            let streaming = config.clone().streaming_lists();
            match self.watch_by(api.clone(), (streaming, networks), cache, counts).await {
                Ended::Refused => return,
                Ended::NotStreamed => counts.set_not_streamed(),
            }
        }
        self.watch_by(api, (config, networks), cache, counts).await;
    }

    async fn watch_by(
        &self,
        api: Api<Decoded<K>>,
        (config, networks): (watcher::Config, Option<&BTreeSet<NetworkName>>),
        cache: &ClusterCache,
        counts: &WatchState,
    ) -> Ended {
        let streams = config.initial_list_strategy == InitialListStrategy::StreamingList;
        let mut last_error = String::new();
        let mut restores = cache.restores();
        let mut events = pin!(watcher(api, config).backoff(counts.pauses()));
        // A list is requested at the beginning, or after an error, and may be older than what the agent writes
        // meanwhile.
        let mut before_list = self.writes(cache);
        loop {
            let next = async {
                tokio::select! {
                    event = events.next() => event,
                    _ = restores.changed() => None,
                }
            };
            let Some(event) = kni_tasks::waiting(next).await else {
                return Ended::Refused;
            };
            if streams && event.as_ref().is_err_and(is_not_streamed) {
                return Ended::NotStreamed;
            }
            let refused = event.as_ref().is_err_and(is_refusal);
            let is_complete = matches!(event, Ok(Event::InitDone));
            if event.is_err() {
                before_list = self.writes(cache);
            }
            self.process(event, before_list, (cache, counts), &mut last_error);
            if let Some(networks) = networks.filter(|_| is_complete) {
                cache.change(|tables| (self.table)(tables).cover(networks));
            }
            if refused {
                return Ended::Refused;
            }
        }
    }

    /// The agent's own writes of the kind so far.
    fn writes(&self, cache: &ClusterCache) -> u64 {
        (self.table)(&mut cache.tables()).writes()
    }

    /// `before_list`: the agent's own writes when a list was requested last.
    fn process(
        &self,
        event: Result<Event<Decoded<K>>, watcher::Error>,
        before_list: u64,
        (cache, counts): (&ClusterCache, &WatchState),
        last_error: &mut String,
    ) {
        match event {
            Ok(event) => {
                cache.others().set_away(false);
                last_error.clear();
                counts.event(self.name);
                self.take(event, before_list, cache);
            }
            Err(error) => {
                counts.restart(self.name);
                if is_no_answer(&error) {
                    cache.others().set_away(true);
                }
                if is_refusal(&error) {
                    let text = format!("{error}; the cached objects stay");
                    cache.change(|tables| (self.table)(tables).set_problem(Some(text)));
                }
                self.report(last_error, &error);
            }
        }
    }

    fn take(&self, event: Event<Decoded<K>>, before_list: u64, cache: &ClusterCache) {
        cache.change(|tables| {
            let table = (self.table)(tables);
            match event {
                Event::Init => table.begin_after(before_list),
                Event::InitDone => table.complete(),
                Event::InitApply(object) | Event::Apply(object) => self.put(table, object),
                Event::Delete(object) => {
                    table.remove_reported(&key_of(object.meta()), version_of(object.meta()));
                }
            }
        });
    }

    fn put(&self, table: &mut Table<V>, Decoded(object): Decoded<K>) {
        match object {
            Ok(object) => {
                let (key, version) = (key_of(object.meta()), version_of(object.meta()));
                let row = (self.convert)(object).map(|row| self.row_after(row, table.rows().get(&key)));
                table.put_reported(key, version, row);
            }
            Err(undecoded) => self.refuse(table, &undecoded),
        }
    }

    fn refuse(&self, table: &mut Table<V>, undecoded: &Undecoded) {
        let key = key_of(&undecoded.metadata);
        let before = table.refused().get(&key).map(|refused| &refused.reason);
        if before != Some(&undecoded.reason) {
            tracing::error!(
                kind = self.name,
                object = %key,
                reason = undecoded.reason,
                "the object is not understood; its last understood version stays, and a policy without one admits nothing"
            );
        }
        let version = version_of(&undecoded.metadata);
        let refused = Refused {
            reason: undecoded.reason.clone(),
            spec: undecoded.object.get("spec").cloned().unwrap_or_default(),
        };
        table.refuse(key, version, refused, |former| {
            (self.substitute)(undecoded).map(|row| self.row_after(row, former))
        });
    }

    fn row_after(&self, row: V, former: Option<&V>) -> V {
        match former {
            Some(former) => (self.after)(row, former),
            None => row,
        }
    }

    /// Logs each error once: the watch restarts by itself.
    fn report(&self, last: &mut String, error: &impl Display) {
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

fn key_of(metadata: &ObjectMeta) -> Key {
    Key {
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
    }
}

/// The resource version of an object as a number; 0 if it is none.
pub fn version_of(metadata: &ObjectMeta) -> u64 {
    let version = metadata.resource_version.as_deref();
    version.and_then(|version| version.parse().ok()).unwrap_or(0)
}

/// Whether the API server does not send lists as the beginning of a watch: its feature gate `WatchList` is off.
fn is_not_streamed(error: &watcher::Error) -> bool {
    let watcher::Error::WatchStartFailed(kube::Error::Api(status)) = error else {
        return false;
    };
    matches!(status.code, 400 | 422)
}

/// Whether the API server was not reached.
fn is_no_answer(error: &watcher::Error) -> bool {
    let (watcher::Error::InitialListFailed(error)
    | watcher::Error::WatchStartFailed(error)
    | watcher::Error::WatchFailed(error)) = error
    else {
        return false;
    };
    !matches!(error, kube::Error::Api(_))
}

/// Whether the API server does not serve the kind, or not to this agent. All other errors are retried where the watch
/// ended.
fn is_refusal(error: &watcher::Error) -> bool {
    let (watcher::Error::InitialListFailed(kube::Error::Api(status))
    | watcher::Error::WatchStartFailed(kube::Error::Api(status))) = error
    else {
        return false;
    };
    matches!(status.code, 401 | 403 | 404)
}

#[cfg(test)]
mod tests;
