//! Follows the objects of the networks that the node has joined. Those of a network that it joins later are listed
//! alone, and the watch continues with them: a list of all networks again would be most of what the API server sends in
//! a large cluster.

use std::{collections::BTreeSet, fmt::Debug, pin::pin, time::Duration};

use futures::StreamExt as _;
use kni_api::NETWORK_LABEL;
use kni_cluster::{ClusterCache, Table};
use kni_model::NetworkName;
use kube::{
    Api, Resource,
    api::{ListParams, WatchEvent, WatchParams},
    runtime::{
        utils::Backoff as _,
        watcher::{self, Event},
    },
};
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use super::{Kind, version_of};
use crate::{decoded::Decoded, watches::WatchState};

/// Networks that are joined within this time are listed together. An attach may wait for the list.
const GATHER: Duration = Duration::from_millis(5);
/// Objects in an answer to a list.
const PAGE: u32 = 500;
/// Marks the bookmark at the end of a list that arrives as the beginning of a watch.
const END_OF_LIST: &str = "k8s.io/initial-events-end";
/// Seconds after which the API server ends a watch; the longest that kube permits.
const WATCH_SECONDS: u32 = 290;

/// The networks that the node has joined; `None` until they are known.
type Joined = watch::Receiver<Option<BTreeSet<NetworkName>>>;

/// What follows a watch.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// The node has joined another network.
    Extend,
    /// Everything is listed again.
    List,
}

/// Up to where the objects of the watched networks are known.
struct Position {
    watched: BTreeSet<NetworkName>,
    /// The resource version of the latest event.
    version: u64,
    /// The networks that were listed last, and the version of that list: events up to it are older than their objects.
    listed: (BTreeSet<NetworkName>, u64),
}

impl<K, V> Kind<K, V>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    V: PartialEq + Send + 'static,
{
    /// Follows the objects of the networks in `joined`, until the API server refuses or its storage was restored. Those
    /// of a network that the node left stay until it joins another one.
    pub(in super::super) async fn reflect_joined(
        self,
        api: Api<Decoded<K>>,
        mut joined: Joined,
        cache: ClusterCache,
        counts: WatchState,
    ) {
        loop {
            let Some(watched) = joined.borrow_and_update().clone() else {
                if kni_tasks::waiting(joined.changed()).await.is_err() {
                    return;
                }
                continue;
            };
            if watched.is_empty() {
                cache.change(|tables| {
                    let table = (self.table)(tables);
                    table.begin();
                    table.complete();
                    table.cover(&watched);
                });
                kni_tasks::waiting(added(&mut joined, &watched)).await;
                continue;
            }
            let config = watcher::Config::default().labels(&selector(&watched));
            tokio::select! {
                () = self.watch(api.clone(), (config, Some(&watched)), &cache, &counts) => return,
                () = async {
                    added(&mut joined, &watched).await;
                    // A list of all networks that has begun is not begun again for one more.
                    self.listed(&watched, &cache).await;
                } => {}
            }
            let Some(mut position) = self.position(watched, &cache) else {
                continue;
            };
            while self.extend(&api, &mut position, &mut joined, (&cache, &counts)).await == Next::Extend
                && self.resume(&api, &mut position, &mut joined, (&cache, &counts)).await == Next::Extend
            {}
        }
    }

    /// Waits until the cache has all objects of the watched networks, which may be none.
    async fn listed(&self, watched: &BTreeSet<NetworkName>, cache: &ClusterCache) {
        let mut changes = cache.changes();
        let is_listed = || Self::is_complete(watched, (self.table)(&mut cache.tables()));
        while !is_listed() && changes.changed().await.is_ok() {}
    }

    fn is_complete(watched: &BTreeSet<NetworkName>, table: &Table<V>) -> bool {
        !table.is_listing() && watched.iter().all(|network| table.covers(network))
    }

    /// Up to where the cache has all objects of the watched networks; `None` if it has not, or if an empty list
    /// left no version.
    fn position(&self, watched: BTreeSet<NetworkName>, cache: &ClusterCache) -> Option<Position> {
        let mut tables = cache.tables();
        let table = (self.table)(&mut tables);
        let version = table.newest();
        (Self::is_complete(&watched, table) && version > 0).then(|| Position {
            watched,
            version,
            listed: (BTreeSet::new(), 0),
        })
    }

    /// Lists the objects of the networks that are not watched yet.
    async fn extend(
        &self,
        api: &Api<Decoded<K>>,
        position: &mut Position,
        joined: &mut Joined,
        (cache, counts): (&ClusterCache, &WatchState),
    ) -> Next {
        let Some(networks) = joined.borrow_and_update().clone() else {
            return Next::List;
        };
        let added: BTreeSet<NetworkName> = networks.difference(&position.watched).cloned().collect();
        if !added.is_empty() {
            let list = async {
                if counts.streams_lists() {
                    streamed(api, &added, position.version).await
                } else {
                    list(api, &added).await
                }
            };
            let listed = match kni_tasks::waiting(list).await {
                Ok((objects, version)) => {
                    cache.others().set_away(false);
                    cache.change(|tables| {
                        let table = (self.table)(tables);
                        for object in objects {
                            self.put(table, object);
                        }
                    });
                    version
                }
                Err(error) => {
                    cache.others().set_away(!matches!(error, kube::Error::Api(_)));
                    tracing::debug!(kind = self.name, %error, "cannot list the objects of a network");
                    return Next::List;
                }
            };
            position.listed = (added, listed);
        }
        cache.change(|tables| {
            let table = (self.table)(tables);
            for left in position.watched.difference(&networks) {
                table.remove_network(left.as_str());
            }
            table.cover(&networks);
        });
        position.watched = networks;
        Next::Extend
    }

    /// Follows the objects of the watched networks from where they are known.
    async fn resume(
        &self,
        api: &Api<Decoded<K>>,
        position: &mut Position,
        joined: &mut Joined,
        (cache, counts): (&ClusterCache, &WatchState),
    ) -> Next {
        let watched = position.watched.clone();
        let params = WatchParams::default()
            .labels(&selector(&watched))
            .timeout(WATCH_SECONDS);
        let mut more = pin!(added(joined, &watched));
        let (mut restores, mut pauses, mut last_error) = (cache.restores(), counts.pauses(), String::new());
        loop {
            let events = async {
                let mut stream = pin!(api.watch(&params, &position.version.to_string()).await?);
                while let Some(event) = stream.next().await {
                    pauses.reset();
                    counts.event(self.name);
                    cache.others().set_away(false);
                    if self.follow(event?, position, cache) == Next::List {
                        return Ok(Next::List);
                    }
                }
                // The API server has ended it.
                Ok::<_, kube::Error>(Next::Extend)
            };
            let ended = async {
                tokio::select! {
                    ended = events => Some(ended),
                    _ = restores.changed() => Some(Ok(Next::List)),
                    () = &mut more => None,
                }
            };
            match kni_tasks::waiting(ended).await {
                None => return Next::Extend,
                Some(Ok(Next::List)) => return Next::List,
                // A list would cost an API server that is overloaded more than the watch.
                Some(Err(kube::Error::Api(status))) if status.code != 429 => return Next::List,
                Some(Ok(Next::Extend)) => {}
                Some(Err(error)) => {
                    cache.others().set_away(true);
                    counts.restart(self.name);
                    self.report(&mut last_error, &error);
                }
            }
            let pause = pauses.next().unwrap_or_default();
            kni_tasks::waiting(tokio::time::sleep(pause)).await;
        }
    }

    /// Takes an event of a watch that was resumed.
    fn follow(&self, event: WatchEvent<Decoded<K>>, position: &mut Position, cache: &ClusterCache) -> Next {
        let event = match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => Event::Apply(object),
            WatchEvent::Deleted(object) => Event::Delete(object),
            WatchEvent::Bookmark(bookmark) => {
                let version = bookmark.metadata.resource_version.parse().unwrap_or_default();
                position.version = position.version.max(version);
                return Next::Extend;
            }
            // The version is too old, for example.
            WatchEvent::Error(_) => return Next::List,
        };
        if let Event::Apply(object) | Event::Delete(object) = &event {
            let version = version_of(object.meta());
            position.version = position.version.max(version);
            let (networks, listed) = &position.listed;
            let network = object
                .meta()
                .labels
                .as_ref()
                .and_then(|labels| labels.get(NETWORK_LABEL));
            let is_listed = network.is_some_and(|network| networks.iter().any(|name| name.as_str() == network));
            if is_listed && version <= *listed {
                return Next::Extend;
            }
        }
        // No list begins with it.
        self.take(event, 0, cache);
        Next::Extend
    }
}

/// All objects of networks, as new as the watch of the others is: so the API server answers from memory, without asking
/// its storage how new that is, and reads no objects of other networks.
async fn streamed<K>(
    api: &Api<Decoded<K>>,
    networks: &BTreeSet<NetworkName>,
    version: u64,
) -> Result<(Vec<Decoded<K>>, u64), kube::Error>
where
    K: Resource + Clone + DeserializeOwned + Debug + 'static,
{
    let params = WatchParams::default().labels(&selector(networks)).initial_events();
    let mut events = pin!(api.watch(&params, &version.to_string()).await?);
    let mut objects = Vec::new();
    while let Some(event) = events.next().await {
        match event? {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => objects.push(object),
            // Nothing is deleted before the end of the list.
            WatchEvent::Deleted(_) => {}
            WatchEvent::Bookmark(bookmark) => {
                let is_end = bookmark
                    .metadata
                    .annotations
                    .get(END_OF_LIST)
                    .is_some_and(|end| end == "true");
                if is_end {
                    let version = bookmark.metadata.resource_version.parse();
                    return Ok((objects, version.unwrap_or_default()));
                }
            }
            WatchEvent::Error(status) => return Err(kube::Error::Api(status)),
        }
    }
    let ended = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
    Err(kube::Error::ReadEvents(ended))
}

/// All objects of networks, and the version of the list.
async fn list<K>(api: &Api<Decoded<K>>, networks: &BTreeSet<NetworkName>) -> Result<(Vec<Decoded<K>>, u64), kube::Error>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    let mut params = ListParams::default().labels(&selector(networks)).limit(PAGE);
    let mut objects = Vec::new();
    loop {
        let page = api.list(&params).await?;
        objects.extend(page.items);
        if let Some(token) = page.metadata.continue_.filter(|token| !token.is_empty()) {
            params = params.continue_token(&token);
        } else {
            let version = page.metadata.resource_version.and_then(|version| version.parse().ok());
            return Ok((objects, version.unwrap_or_default()));
        }
    }
}

fn selector(networks: &BTreeSet<NetworkName>) -> String {
    let names: Vec<&str> = networks.iter().map(NetworkName::as_str).collect();
    format!("{NETWORK_LABEL} in ({})", names.join(","))
}

/// Ends when the node has joined a network that is not in `watched`.
async fn added(joined: &mut Joined, watched: &BTreeSet<NetworkName>) {
    loop {
        if joined.changed().await.is_err() {
            return;
        }
        let networks = joined.borrow_and_update().clone();
        if networks.is_some_and(|networks| !networks.is_subset(watched)) {
            tokio::time::sleep(GATHER).await;
            return;
        }
    }
}

#[cfg(test)]
mod tests;
