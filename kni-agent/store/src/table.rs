//! Reads and writes typed tables: rows of JSON with a version.

use std::{fmt::Display, marker::PhantomData};

use kni_model::{Network, Sandbox};
use redb::{Key, ReadTransaction, ReadableTable as _, TableDefinition, Value, WriteTransaction};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{NamespaceRecord, Removal, UplinkRecord, error::StoreError};

pub(super) const SANDBOXES: Table<String, Sandbox> = Table::new("sandboxes");
pub(super) const NAMESPACES: Table<String, NamespaceRecord> = Table::new("namespaces");
pub(super) const REMOVALS: Table<u32, Removal> = Table::new("removals");
pub(super) const NETWORKS: Table<String, Network> = Table::new("networks");
pub(super) const UPLINK: Table<String, UplinkRecord> = Table::new("uplink");

/// Version of the rows.
const RECORD_VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    version: u32,
    record: T,
}

/// A write or removal of one row, ready for a transaction.
pub(super) type Edit = Box<dyn FnOnce(&WriteTransaction) -> Result<(), StoreError> + Send>;

/// An owned key, and its form in the database.
pub(super) trait RowKey: Display + Sized + Send + 'static {
    type Stored: Key + Send + 'static;

    fn stored(&self) -> <Self::Stored as Value>::SelfType<'_>;

    fn from_stored(stored: <Self::Stored as Value>::SelfType<'_>) -> Self;
}

impl RowKey for String {
    type Stored = &'static str;

    fn stored(&self) -> &str {
        self
    }

    fn from_stored(stored: &str) -> Self {
        stored.to_owned()
    }
}

impl RowKey for u32 {
    type Stored = Self;

    fn stored(&self) -> Self {
        *self
    }

    fn from_stored(stored: Self) -> Self {
        stored
    }
}

/// A table of records by key.
pub(super) struct Table<K, T> {
    name: &'static str,
    types: PhantomData<fn(K) -> T>,
}

impl<K, T> Table<K, T> {
    const fn new(name: &'static str) -> Self {
        Self {
            name,
            types: PhantomData,
        }
    }
}

impl<K: RowKey, T: Serialize + DeserializeOwned> Table<K, T> {
    const fn definition(&self) -> TableDefinition<'static, K::Stored, &'static [u8]> {
        TableDefinition::new(self.name)
    }

    fn refuse(&self, key: &K, reason: String) -> StoreError {
        StoreError::Record {
            table: self.name,
            key: key.to_string(),
            reason,
        }
    }

    /// Creates the table if it does not exist.
    pub(super) fn create(&self, transaction: &WriteTransaction) -> Result<(), StoreError> {
        transaction.open_table(self.definition())?;
        Ok(())
    }

    /// Writes a record.
    pub(super) fn put(&self, key: K, record: &T) -> Edit {
        let versioned = Versioned {
            version: RECORD_VERSION,
            record,
        };
        let row = serde_json::to_vec(&versioned).map_err(|error| self.refuse(&key, error.to_string()));
        let definition = self.definition();
        Box::new(move |transaction| {
            let row = row?;
            transaction
                .open_table(definition)?
                .insert(key.stored(), row.as_slice())?;
            Ok(())
        })
    }

    /// Removes a record. Idempotent.
    pub(super) fn remove(&self, key: K) -> Edit {
        let definition = self.definition();
        Box::new(move |transaction| {
            transaction.open_table(definition)?.remove(key.stored())?;
            Ok(())
        })
    }

    /// All records, in the order of their keys.
    pub(super) fn rows(&self, transaction: &ReadTransaction) -> Result<Vec<T>, StoreError> {
        let mut records = Vec::new();
        for row in transaction.open_table(self.definition())?.iter()? {
            let (key, value) = row?;
            records.push(self.decode(&K::from_stored(key.value()), value.value())?);
        }
        Ok(records)
    }

    pub(super) fn decode(&self, key: &K, bytes: &[u8]) -> Result<T, StoreError> {
        let row: Versioned<T> = serde_json::from_slice(bytes).map_err(|error| self.refuse(key, error.to_string()))?;
        if row.version != RECORD_VERSION {
            let reason = format!("version {}, this agent reads {RECORD_VERSION}", row.version);
            return Err(self.refuse(key, reason));
        }
        Ok(row.record)
    }
}
