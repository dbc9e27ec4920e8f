//! Watches a folder of manifests: inotify for speed, a periodic scan for certainty.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd, RawFd},
    path::Path,
    sync::Arc,
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
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

impl ManifestSource {
    /// Reads the folder and watches it. The receiver holds the current content of the folder and is notified only when
    /// it changes, `debounce` after the last of a series of changes. If the folder becomes unreadable, the last content
    /// stays, so that an unmounted folder does not remove all networks. Ends when the last receiver is dropped. Needs a
    /// tokio runtime.
    pub async fn watch(self, debounce: Duration) -> Result<watch::Receiver<ManifestSet>, ManifestError> {
        let fail = |source| ManifestError::Watch {
            path: self.dir.clone(),
            source,
        };
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).map_err(|e| fail(e.into()))?;
        // Before the first read, so that no change is missed in between.
        let watched = add_watch(&inotify, &self.dir).map_err(fail)?;
        let events = Events(inotify).register().map_err(fail)?;
        let (texts, set) = self.read(None).await?.unwrap_or_default();
        let (sender, receiver) = watch::channel(set);
        tokio::spawn(self.follow(events, watched, (sender, texts), debounce));
        Ok(receiver)
    }

    /// Reads the folder; parses it only if its texts differ from `last`, and returns `None` otherwise: the texts of a
    /// thousand Services are read in milliseconds and parsed in half a second.
    async fn read(&self, last: Option<Arc<Texts>>) -> Result<Option<(Arc<Texts>, ManifestSet)>, ManifestError> {
        let dir = self.dir.clone();
        let read = move || {
            let texts = folder::read(&dir)?;
            if last.is_some_and(|last| *last == texts) {
                return Ok(None);
            }
            let set = folder::parse(&texts);
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
        events: AsyncFd<Events>,
        mut watched: WatchDescriptor,
        (sender, mut texts): (watch::Sender<ManifestSet>, Arc<Texts>),
        debounce: Duration,
    ) {
        let mut rescan = interval(RESCAN);
        rescan.set_missed_tick_behavior(MissedTickBehavior::Delay);
        rescan.reset();
        let mut last_error = None;
        loop {
            tokio::select! {
                () = sender.closed() => return,
                result = changed(&events) => match result {
                    Ok(()) => wait_for_quiet(&events, debounce).await,
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
            let read = match add_watch(&events.get_ref().0, &self.dir) {
                Ok(now) => {
                    if now != watched {
                        // The replaced folder; if it was deleted, its watch is gone already.
                        events.get_ref().0.rm_watch(watched).ok();
                        watched = now;
                    }
                    self.read(Some(Arc::clone(&texts))).await
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

/// The inotify descriptor as a type that tokio can register.
struct Events(Inotify);

impl Events {
    fn register(self) -> io::Result<AsyncFd<Self>> {
        // SAFETY: the descriptor is owned by the value that is handed over, always the same one, and closed only when
        // that value is dropped, which `AsyncFd` does after it has deregistered the descriptor.
        unsafe { AsyncFd::register_with_interest(self, Interest::READABLE) }.map_err(io::Error::from)
    }
}

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

fn add_watch(inotify: &Inotify, dir: &Path) -> io::Result<WatchDescriptor> {
    let flags = AddWatchFlags::IN_CLOSE_WRITE
        | AddWatchFlags::IN_MODIFY
        | AddWatchFlags::IN_ATTRIB
        | AddWatchFlags::IN_CREATE
        | AddWatchFlags::IN_DELETE
        | AddWatchFlags::IN_MOVE
        | AddWatchFlags::IN_DELETE_SELF
        | AddWatchFlags::IN_MOVE_SELF
        | AddWatchFlags::IN_ONLYDIR;
    inotify.add_watch(dir, flags).map_err(io::Error::from)
}

/// Waits for at least one event and drains the queue. The events are not evaluated: the folder is read again.
async fn changed(events: &AsyncFd<Events>) -> io::Result<()> {
    loop {
        let mut ready = events.readable().await?;
        let taken = ready.try_io(|fd| fd.get_ref().0.read_events().map_err(io::Error::from));
        match taken {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) if error.raw_os_error() == Some(Errno::EINTR as i32) => {}
            Ok(Err(error)) => return Err(error),
            Err(_would_block) => {}
        }
    }
}

/// Waits until no event has arrived for `debounce`, but not indefinitely.
async fn wait_for_quiet(events: &AsyncFd<Events>, debounce: Duration) {
    let limit = Instant::now() + debounce * MAX_DEBOUNCES;
    loop {
        let quiet = (Instant::now() + debounce).min(limit);
        tokio::select! {
            () = sleep_until(quiet) => return,
            result = changed(events) => if result.is_err() || Instant::now() >= limit { return },
        }
    }
}
