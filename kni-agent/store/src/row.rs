//! Encodes records as rows: JSON with a version, in tables by name.

use std::{collections::BTreeMap, marker::PhantomData};

use kni_model::{Network, Sandbox};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{AddressRest, NamespaceRecord, Removal, UplinkRecord, error::StoreError};

pub(super) const SANDBOXES: Table<Sandbox> = Table::new("sandboxes");
pub(super) const NAMESPACES: Table<NamespaceRecord> = Table::new("namespaces");
pub(super) const REMOVALS: Table<Removal> = Table::new("removals");
pub(super) const NETWORKS: Table<Network> = Table::new("networks");
pub(super) const RESTS: Table<AddressRest> = Table::new("rests");
pub(super) const UPLINK: Table<UplinkRecord> = Table::new("uplink");
/// Rows of other tables that this agent cannot decode, unchanged; the key is `TABLE/KEY`.
pub(super) const QUARANTINE: &str = "quarantine";

/// Tables with records.
pub(super) const TABLES: [&str; 6] = [
    SANDBOXES.name,
    NAMESPACES.name,
    REMOVALS.name,
    NETWORKS.name,
    RESTS.name,
    UPLINK.name,
];

/// Version of the rows.
const RECORD_VERSION: u32 = 1;

/// Identifies a row. Numeric keys are in decimal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowId {
    /// Name of the table.
    pub table: String,
    /// Key in the table.
    pub key: String,
}

impl RowId {
    /// A row of a table.
    pub fn new(table: impl Into<String>, key: impl Into<String>) -> Self {
        Self {
            table: table.into(),
            key: key.into(),
        }
    }
}

/// All rows, encoded.
pub type Rows = BTreeMap<RowId, Vec<u8>>;

/// A write of one row, or its removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edit {
    /// The row.
    pub id: RowId,
    /// Its new content; `None` removes it.
    pub row: Option<Vec<u8>>,
}

impl Edit {
    pub(super) fn put(id: RowId, row: Vec<u8>) -> Self {
        Self { id, row: Some(row) }
    }

    pub(super) fn remove(id: RowId) -> Self {
        Self { id, row: None }
    }
}

/// Applies edits in order.
pub(super) fn apply(rows: &mut Rows, edits: &[Edit]) {
    for Edit { id, row } in edits {
        match row {
            Some(row) => {
                rows.insert(id.clone(), row.clone());
            }
            None => {
                rows.remove(id);
            }
        }
    }
}

/// The edits that turn one set of rows into another.
pub(super) fn difference(from: &Rows, to: &Rows) -> Vec<Edit> {
    let gone = from
        .keys()
        .filter(|id| !to.contains_key(*id))
        .cloned()
        .map(Edit::remove);
    let changed = to.iter().filter(|(id, row)| from.get(*id) != Some(*row));
    gone.chain(changed.map(|(id, row)| Edit::put(id.clone(), row.clone())))
        .collect()
}

#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    version: u32,
    record: T,
}

/// A table of records by key.
pub(super) struct Table<T> {
    pub(super) name: &'static str,
    types: PhantomData<fn() -> T>,
}

impl<T> Table<T> {
    const fn new(name: &'static str) -> Self {
        Self {
            name,
            types: PhantomData,
        }
    }

    pub(super) fn id(&self, key: impl Into<String>) -> RowId {
        RowId::new(self.name, key)
    }
}

impl<T: Serialize + DeserializeOwned> Table<T> {
    fn refuse(&self, key: &str, reason: String) -> StoreError {
        StoreError::Record {
            table: self.name,
            key: key.to_owned(),
            reason,
        }
    }

    /// The write of a record.
    pub(super) fn put(&self, key: String, record: &T) -> Result<Edit, StoreError> {
        let versioned = Versioned {
            version: RECORD_VERSION,
            record,
        };
        let row = serde_json::to_vec(&versioned).map_err(|error| self.refuse(&key, error.to_string()))?;
        Ok(Edit::put(self.id(key), row))
    }

    /// The records of this table that can be decoded, in the order of their keys.
    pub(super) fn records(&self, rows: &Rows) -> Vec<T> {
        let own = rows.iter().filter(|(id, _)| id.table == self.name);
        own.filter_map(|(id, row)| self.decode(&id.key, row).ok()).collect()
    }

    pub(super) fn decode(&self, key: &str, bytes: &[u8]) -> Result<T, StoreError> {
        let row: Versioned<T> = serde_json::from_slice(bytes).map_err(|error| self.refuse(key, error.to_string()))?;
        if row.version != RECORD_VERSION {
            let reason = format!("version {}, this agent reads {RECORD_VERSION}", row.version);
            return Err(self.refuse(key, reason));
        }
        Ok(row.record)
    }
}

/// Whether this agent can decode a row; the error names the row and the reason. Rows of unknown tables are not decoded.
pub(super) fn check(id: &RowId, row: &[u8]) -> Result<(), StoreError> {
    let key = id.key.as_str();
    match id.table.as_str() {
        "sandboxes" => SANDBOXES.decode(key, row).map(drop),
        "namespaces" => NAMESPACES.decode(key, row).map(drop),
        "removals" => REMOVALS.decode(key, row).map(drop),
        "networks" => NETWORKS.decode(key, row).map(drop),
        "rests" => RESTS.decode(key, row).map(drop),
        "uplink" => UPLINK.decode(key, row).map(drop),
        _ => Ok(()),
    }
}
