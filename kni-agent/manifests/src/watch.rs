//! Watches a folder of manifests: inotify for speed, a periodic scan for certainty.

use std::{io, path::Path, sync::Arc, time::Duration};

use futures::StreamExt as _;
use inotify::{EventStream, Inotify, WatchDescriptor, WatchMask};
use kni_tasks::Tasks;
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};

use super::{
    ManifestError, ManifestSet, ManifestSource,
    folder::{self, Texts},
};

/// Interval of the scans that do not depend on events: links may refer to files elsewhere, and the folder itself may
/// have been replaced.
const RESCAN: Duration = Duration::from_secs(5);

/// A folder that changes without a pause is read at least after this many debounce times.
const MAX_DEBOUNCES: u32 = 10;

/// The events of a folder that may mean a change of its manifests.
const CHANGES: WatchMask = WatchMask::CLOSE_WRITE
    .union(WatchMask::MODIFY)
    .union(WatchMask::ATTRIB)
    .union(WatchMask::CREATE)
    .union(WatchMask::DELETE)
    .union(WatchMask::MOVE)
    .union(WatchMask::DELETE_SELF)
    .union(WatchMask::MOVE_SELF)
    .union(WatchMask::ONLYDIR);

/// Bytes of events that are read at once; one event has at most 272.
const BUFFER: usize = 4096;

type Events = EventStream<[u8; BUFFER]>;

impl ManifestSource {
    /// Reads the folder and watches it. The receiver holds the current content of the folder and is notified only when
    /// it changes, `debounce` after the last of a series of changes. If the folder becomes unreadable, the last content
    /// stays, so that an unmounted folder does not remove all networks. Ends when the last receiver is dropped. Needs a
    /// tokio runtime; `tasks` supervises the work.
    pub async fn watch(self, debounce: Duration, tasks: &Tasks) -> Result<watch::Receiver<ManifestSet>, ManifestError> {
        let fail = |source| ManifestError::Watch {
            path: self.dir.clone(),
            source,
        };
        let inotify = Inotify::init().map_err(fail)?;
        // Before the first read, so that no change is missed in between.
        let watched = inotify.watches().add(&self.dir, CHANGES).map_err(fail)?;
        let events = inotify.into_event_stream([0; BUFFER]).map_err(fail)?;
        let (texts, set) = self.read(None, ManifestSet::default()).await?.unwrap_or_default();
        let (sender, receiver) = watch::channel(set);
        tasks.spawn_finite("manifests", self.follow(events, watched, (sender, texts), debounce));
        Ok(receiver)
    }

    /// Reads the folder; parses it only if its texts differ from `last`, and returns `None` otherwise: the texts of a
    /// thousand Services are read in milliseconds and parsed in half a second.
    async fn read(
        &self,
        last: Option<Arc<Texts>>,
        former: ManifestSet,
    ) -> Result<Option<(Arc<Texts>, ManifestSet)>, ManifestError> {
        let dir = self.dir.clone();
        let read = move || {
            let texts = folder::read(&dir)?;
            if last.is_some_and(|last| *last == texts) {
                return Ok(None);
            }
            let set = folder::parse(&texts, Some(&former));
            Ok(Some((Arc::new(texts), set)))
        };
        match tokio::task::spawn_blocking(read).await {
            Ok(result) => result,
            Err(error) => Err(ManifestError::Folder {
                path: self.dir.clone(),
                source: io::Error::other(error),
            }),
        }
    }

    async fn follow(
        self,
        mut events: Events,
        mut watched: WatchDescriptor,
        (sender, mut texts): (watch::Sender<ManifestSet>, Arc<Texts>),
        debounce: Duration,
    ) {
        let mut rescan = interval(RESCAN);
        rescan.set_missed_tick_behavior(MissedTickBehavior::Delay);
        rescan.reset();
        let mut last_error = None;
        loop {
            kni_tasks::progress();
            tokio::select! {
                () = sender.closed() => return,
                result = changed(&mut events) => match result {
                    Ok(()) => wait_for_quiet(&mut events, debounce).await,
                    // Without events, the periodic scan continues alone.
                    Err(error) => {
                        report(&self.dir, &mut last_error, &error);
                        rescan.tick().await;
                    }
                },
                _ = rescan.tick() => {}
            }
            // Adding the watch again costs nothing if the folder is the same, and watches the new one if it was
            // replaced.
            let read = match events.watches().add(&self.dir, CHANGES) {
                Ok(now) => {
                    if now != watched {
                        // The replaced folder; if it was deleted, its watch is gone already.
                        events.watches().remove(watched).ok();
                        watched = now;
                    }
                    let former = sender.borrow().clone();
                    self.read(Some(Arc::clone(&texts)), former).await
                }
                Err(source) => Err(ManifestError::Watch {
                    path: self.dir.clone(),
                    source,
                }),
            };
            match read {
                Ok(None) => last_error = None,
                Ok(Some((read, set))) => {
                    last_error = None;
                    texts = read;
                    sender.send_if_modified(|current| {
                        let differs = *current != set;
                        *current = set;
                        differs
                    });
                }
                Err(error) => report(&self.dir, &mut last_error, &error),
            }
        }
    }
}

/// Logs an error once, not at every scan.
fn report(dir: &Path, last: &mut Option<String>, error: &dyn std::error::Error) {
    let text = match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    };
    if last.as_ref() != Some(&text) {
        tracing::warn!(dir = %dir.display(), error = %text, "manifests keep their last meaning");
        *last = Some(text);
    }
}

/// Waits for an event. The events are not evaluated: the folder is read again.
async fn changed(events: &mut Events) -> io::Result<()> {
    let event = events.next().await;
    event
        .unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()))
        .map(drop)
}

/// Waits until no event has arrived for `debounce`, but not indefinitely.
async fn wait_for_quiet(events: &mut Events, debounce: Duration) {
    let limit = Instant::now() + debounce * MAX_DEBOUNCES;
    loop {
        let quiet = (Instant::now() + debounce).min(limit);
        tokio::select! {
            () = sleep_until(quiet) => return,
            result = changed(events) => if result.is_err() || Instant::now() >= limit { return },
        }
    }
}
