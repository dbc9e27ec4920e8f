//! Connects the store with its copy in memory of the kernel.

use std::sync::Arc;

use kni_dataplane::{CopiedRecord, RecordMap};
use kni_model::error_chain;
use kni_store::{CopiedRows, Edit, RecordCopy, RowId};

/// The pinned map of the dataplane as the copy of the store.
pub(super) struct KernelCopy(pub(super) Arc<RecordMap>);

impl RecordCopy for KernelCopy {
    fn read(&self) -> Result<Option<CopiedRows>, String> {
        let found = self.0.read().map_err(|error| error_chain(&error))?;
        Ok(found.map(|(sequence, records)| CopiedRows {
            sequence,
            rows: records
                .into_iter()
                .filter_map(|record| Some((RowId::new(record.table, record.key), record.record?)))
                .collect(),
        }))
    }

    fn write(&self, sequence: u64, edits: &[Edit]) -> Result<(), String> {
        let records: Vec<CopiedRecord> = edits
            .iter()
            .map(|edit| CopiedRecord {
                table: edit.id.table.clone(),
                key: edit.id.key.clone(),
                record: edit.row.clone(),
            })
            .collect();
        let written = self.0.write(sequence, &records);
        written.map_err(|error| error_chain(&error))
    }

    fn replace(&self, rows: &CopiedRows) -> Result<(), String> {
        let records: Vec<CopiedRecord> = rows
            .rows
            .iter()
            .map(|(id, row)| CopiedRecord {
                table: id.table.clone(),
                key: id.key.clone(),
                record: Some(row.clone()),
            })
            .collect();
        let replaced = self.0.replace(rows.sequence, &records);
        replaced.map_err(|error| error_chain(&error))
    }
}
