//! One lock per sandbox, so that calls for the same one come one after the other and all others at once.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// Locks by name. Unused ones are forgotten.
#[derive(Debug, Default)]
pub(super) struct KeyedLocks {
    locks: Mutex<HashMap<String, Arc<AsyncMutex<()>>>>,
}

impl KeyedLocks {
    /// Waits for the name's lock.
    pub(super) async fn lock(&self, name: &str) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
            // Held by the map alone means: nobody has it and nobody waits.
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
    async fn same_name_waits_and_unused_names_are_forgotten() {
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
