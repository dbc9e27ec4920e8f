//! Reads the kernel's counters.

use anyhow::Result;
use kni_model::EndpointId;

use super::{INTERFACES, Programs};
use crate::model::Counts;

/// The non-zero counters of all endpoints.
pub fn counted(programs: &Programs) -> Result<Counts> {
    let mut counts = Counts::new();
    for id in 1..=INTERFACES {
        for (direction, verdict, count) in programs.dataplane().forwarded(EndpointId(id))? {
            counts.insert((id, direction, verdict), (count.packets, count.bytes));
        }
    }
    for drop in programs.dataplane().drops()? {
        let key = (drop.endpoint.0, drop.direction, drop.reason);
        counts.insert(key, (drop.count.packets, drop.count.bytes));
    }
    Ok(counts)
}
