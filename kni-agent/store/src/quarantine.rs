//! Sets rows aside that this agent cannot decode, and reads from them what can still be read.

use std::{collections::BTreeMap, path::PathBuf};

use kni_model::{CniAttachment, EndpointId, PodRef, PortMapping, SandboxId, policy::ContainerPort};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::row::{QUARANTINE, RowId, Rows, TABLES, check};

/// A row that this agent cannot decode: damaged, or of a newer agent. It is kept unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantined {
    /// Its table and key.
    pub id: RowId,
    /// Why it cannot be decoded.
    pub reason: String,
    /// The endpoint numbers that it names. Empty where even these cannot be read.
    pub endpoints: Vec<EndpointId>,
    /// The parts of a sandbox that can be decoded on their own.
    pub parts: SandboxParts,
}

/// Parts of a sandbox that the kernel does not have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SandboxParts {
    /// The pod.
    pub pod: Option<PodRef>,
    /// Path of the namespace.
    pub netns: Option<PathBuf>,
    /// Labels of the pod.
    pub labels: Option<BTreeMap<String, String>>,
    /// Port mappings.
    pub port_mappings: Option<Vec<PortMapping>>,
    /// Named ports.
    pub container_ports: Option<Vec<ContainerPort>>,
    /// The CNI attachment.
    pub cni: Option<CniAttachment>,
    /// The pod's own sandbox.
    pub parent: Option<SandboxId>,
}

impl Quarantined {
    fn new(id: RowId, row: &[u8], reason: String) -> Self {
        let record = serde_json::from_slice::<Value>(row).ok();
        let record = record.as_ref().and_then(|row| row.get("record"));
        Self {
            endpoints: endpoints(row),
            parts: record.map(SandboxParts::of).unwrap_or_default(),
            id,
            reason,
        }
    }
}

impl SandboxParts {
    fn of(record: &Value) -> Self {
        Self {
            pod: part(record, "pod"),
            netns: part(record, "netns"),
            labels: part(record, "labels"),
            port_mappings: part(record, "port_mappings"),
            container_ports: part(record, "container_ports"),
            cni: part(record, "cni"),
            parent: part(record, "parent"),
        }
    }
}

fn part<T: DeserializeOwned>(record: &Value, name: &str) -> Option<T> {
    serde_json::from_value(record.get(name)?.clone()).ok()
}

/// The numbers behind `"endpoint":`, also in text that is no JSON any more.
fn endpoints(row: &[u8]) -> Vec<EndpointId> {
    let text = String::from_utf8_lossy(row);
    let mut found: Vec<EndpointId> = text
        .split("\"endpoint\"")
        .skip(1)
        .filter_map(|rest| {
            let rest = rest.trim_start().strip_prefix(':')?.trim_start();
            let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
            digits.parse().ok().map(EndpointId)
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// The key of a row in the table of quarantined rows.
pub(super) fn quarantine_id(id: &RowId) -> RowId {
    RowId::new(QUARANTINE, format!("{}/{}", id.table, id.key))
}

/// The row that a quarantined row was.
fn original_id(id: &RowId) -> Option<RowId> {
    let (table, key) = id.key.split_once('/')?;
    TABLES.contains(&table).then(|| RowId::new(table, key))
}

/// Moves rows that cannot be decoded to the quarantine, unless `copy` has a version of them that can; moves those back
/// that can be decoded by now. Returns the quarantined ones.
pub(super) fn sort_out(rows: &mut Rows, copy: Option<&Rows>) -> Vec<Quarantined> {
    let held: Vec<RowId> = rows.keys().filter(|id| id.table == QUARANTINE).cloned().collect();
    for held in held {
        let Some(original) = original_id(&held) else { continue };
        let decodes = rows.get(&held).is_some_and(|row| check(&original, row).is_ok());
        if decodes && let Some(row) = rows.remove(&held) {
            tracing::info!(
                table = original.table,
                key = original.key,
                "a quarantined state row is used again"
            );
            rows.insert(original, row);
        }
    }
    let bad: Vec<(RowId, String)> = rows
        .iter()
        .filter(|(id, _)| id.table != QUARANTINE)
        .filter_map(|(id, row)| Some((id.clone(), check(id, row).err()?.to_string())))
        .collect();
    for (id, reason) in bad {
        let replacement = copy
            .and_then(|copy| copy.get(&id))
            .filter(|row| check(&id, row).is_ok());
        let Some(row) = rows.remove(&id) else { continue };
        if let Some(replacement) = replacement {
            tracing::error!(reason, "a state row is damaged; its copy in the kernel is used");
            rows.insert(id, replacement.clone());
        } else {
            tracing::error!(reason, "a state row cannot be decoded; it is quarantined");
            rows.insert(quarantine_id(&id), row);
        }
    }
    quarantined(rows)
}

fn quarantined(rows: &Rows) -> Vec<Quarantined> {
    let held = rows.iter().filter(|(id, _)| id.table == QUARANTINE);
    held.filter_map(|(id, row)| {
        let original = original_id(id)?;
        let reason = check(&original, row).err()?.to_string();
        Some(Quarantined::new(original, row, reason))
    })
    .collect()
}
