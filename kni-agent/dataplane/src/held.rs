//! Holds descriptors of the pinned maps and links while the agent lives: a removed pin detaches nothing then, and the
//! object is pinned again.

use std::{
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Mutex,
};

use super::{
    bpf::link::{self, LinkInfo},
    lock,
};

/// Descriptors that remain for everything else: sockets, namespaces, files.
const OTHER_DESCRIPTORS: u64 = 512;

/// Pinned objects by path.
pub(super) struct HeldPins {
    objects: Mutex<BTreeMap<PathBuf, OwnedFd>>,
    most: usize,
}

impl HeldPins {
    pub(super) fn new() -> Self {
        let limit = link::raise_descriptor_limit().saturating_sub(OTHER_DESCRIPTORS);
        Self {
            objects: Mutex::default(),
            most: usize::try_from(limit).unwrap_or(usize::MAX),
        }
    }

    /// Holds the object that is pinned at the path now, instead of an earlier one. Best effort: without a descriptor
    /// the pin remains the only reference.
    pub(super) fn hold(&self, path: &Path) {
        let opened = link::open(path);
        let mut objects = lock(&self.objects);
        match opened {
            Ok(object) if objects.len() < self.most || objects.contains_key(path) => {
                objects.insert(path.to_owned(), object);
            }
            Ok(_too_many) => {}
            Err(error) => {
                objects.remove(path);
                tracing::debug!(path = %path.display(), %error, "cannot hold a pinned object");
            }
        }
    }

    /// Before the pin is removed on purpose.
    pub(super) fn release(&self, path: &Path) {
        lock(&self.objects).remove(path);
    }

    /// The link at a path, also without its pin.
    pub(super) fn link(&self, path: &Path) -> Option<LinkInfo> {
        let objects = lock(&self.objects);
        link::info(objects.get(path)?).ok()
    }

    /// Held objects whose pins are gone.
    pub(super) fn missing(&self) -> Vec<PathBuf> {
        let objects = lock(&self.objects);
        objects.keys().filter(|path| !path.exists()).cloned().collect()
    }

    /// Pins the objects without a pin again; returns how many there were. Those of interfaces that are gone are not.
    pub(super) fn pin_again(&self) -> io::Result<usize> {
        let mut objects = lock(&self.objects);
        let missing: Vec<PathBuf> = objects.keys().filter(|path| !path.exists()).cloned().collect();
        let mut pinned = 0;
        for path in missing {
            let Some(object) = objects.get(&path) else { continue };
            let is_detached = link::info(object).is_ok_and(|info| info.is_detached());
            if is_detached {
                objects.remove(&path);
            } else {
                link::pin(object, &path)?;
                pinned += 1;
            }
        }
        Ok(pinned)
    }
}
