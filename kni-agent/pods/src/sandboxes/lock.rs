//! Locks sandboxes by name: calls for one sandbox are serialized, all others run concurrently.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// Locks by name. Unused ones are dropped.
#[derive(Debug, Default)]
pub(crate) struct KeyedLocks {
    locks: Mutex<HashMap<String, Arc<AsyncMutex<()>>>>,
}

impl KeyedLocks {
    /// Waits for the name's lock.
    pub(crate) async fn lock(&self, name: &str) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
            // A lock that only the map references is neither held nor awaited.
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(locks.entry(name.to_owned()).or_default())
        };
        lock.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn same_name_waits_and_unused_names_are_dropped() {
        let locks = KeyedLocks::default();
        let first = locks.lock("a").await;
        let other = locks.lock("b").await;
        let waits = tokio::time::timeout(std::time::Duration::from_millis(20), locks.lock("a")).await;
        assert!(waits.is_err());
        drop((first, other));
        let _again = locks.lock("a").await;
        assert_eq!(locks.locks.lock().unwrap().len(), 1);
    }
}
