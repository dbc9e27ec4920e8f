//! Reads and clears the counters of endpoints.

use kni_common::{
    Direction, Verdict,
    counter::{COUNTERS_PER_ENDPOINT, Counter, DropKey, EventGate, counter_index},
};
use kni_model::{
    EndpointId,
    view::{Count, EndpointCounts},
};

use super::{DataplaneError, endpoints::EndpointMaps};

/// Drops of one endpoint, direction and reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DropCount {
    /// The endpoint; 0 where there was none.
    pub endpoint: EndpointId,
    /// The program that dropped.
    pub direction: Direction,
    /// The reason.
    pub reason: Verdict,
    /// Packets and bytes.
    pub count: Count,
}

fn total(values: &[Counter]) -> Count {
    let mut sum = Count::default();
    for &Counter { packets, bytes } in values {
        sum += Count { packets, bytes };
    }
    sum
}

fn lost(gates: &[EventGate]) -> u64 {
    gates.iter().map(|gate| gate.lost).sum()
}

/// The programs that may drop an endpoint's packets.
const DIRECTIONS: [Direction; 5] = [
    Direction::FromPod,
    Direction::ToPod,
    Direction::FromUplink,
    Direction::ToUplink,
    Direction::FromOverlay,
];

/// Every row of `DROPS` that an endpoint can have.
fn drop_keys(endpoint: EndpointId) -> impl Iterator<Item = DropKey> {
    let reasons = Verdict::ALL.iter().filter(|verdict| verdict.is_drop());
    reasons.flat_map(move |verdict| {
        DIRECTIONS.map(|direction| DropKey {
            endpoint: endpoint.0,
            verdict: *verdict as u16,
            direction: direction as u16,
        })
    })
}

impl EndpointMaps {
    pub(super) fn forwarded(&self, endpoint: EndpointId) -> Result<Vec<(Direction, Verdict, Count)>, DataplaneError> {
        let mut rows = Vec::new();
        for direction in [Direction::FromPod, Direction::ToPod] {
            for verdict in Verdict::ALL.iter().filter(|verdict| !verdict.is_drop()) {
                let index = counter_index(endpoint.0, direction, *verdict);
                let count = total(&self.counters.get(&index)?);
                if count.packets > 0 {
                    rows.push((direction, *verdict, count));
                }
            }
        }
        Ok(rows)
    }

    pub(super) fn counts(&self, endpoint: EndpointId) -> Result<EndpointCounts, DataplaneError> {
        let mut counts = EndpointCounts::default();
        for (direction, verdict, count) in self.forwarded(endpoint)? {
            match (direction, verdict) {
                (Direction::FromPod, Verdict::Redirected | Verdict::PassedToStack) => counts.from_pod += count,
                (Direction::ToPod, Verdict::Redirected | Verdict::Delivered) => counts.to_pod += count,
                // Link control is not traffic of the pod.
                _ => {}
            }
        }
        counts.dropped = self.dropped(endpoint)?;
        Ok(counts)
    }

    /// By key, not by a walk over every endpoint's rows: this runs for each interface.
    fn dropped(&self, endpoint: EndpointId) -> Result<Count, DataplaneError> {
        let mut sum = Count::default();
        for key in drop_keys(endpoint) {
            sum += total(&self.drops.get(&key)?);
        }
        Ok(sum)
    }

    pub(super) fn drops(&self) -> Result<Vec<DropCount>, DataplaneError> {
        let mut drops = Vec::new();
        for (key, values) in self.drops.rows()? {
            // Codes of a newer agent are unknown here.
            if let (Some(direction), Some(reason)) =
                (Direction::from_code(key.direction), Verdict::from_code(key.verdict))
            {
                let count = total(&values);
                drops.push(DropCount {
                    endpoint: EndpointId(key.endpoint),
                    direction,
                    reason,
                    count,
                });
            }
        }
        drops.sort_by_key(|drop| (drop.endpoint, drop.direction, drop.reason));
        Ok(drops)
    }

    /// Clears the drops from before the row was ready: packets of the pod's kernel while its interface comes up
    /// (multicast reports, duplicate address detection), which are irrelevant.
    pub(super) fn remove_early_drops(&mut self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        for direction in [Direction::FromPod, Direction::ToPod] {
            let key = DropKey {
                endpoint: endpoint.0,
                verdict: Verdict::EndpointNotReady as u16,
                direction: direction as u16,
            };
            self.drops.remove(&key)?;
        }
        Ok(())
    }

    /// Events that were not sent since this agent's first endpoint.
    pub(super) fn lost_events(&self) -> Result<u64, DataplaneError> {
        let rows = self.gates.rows()?;
        Ok(rows.iter().map(|(_, gates)| lost(gates)).sum::<u64>() + self.lost_before)
    }

    /// Removes the counts, so that the next owner of the row starts from zero.
    pub(super) fn remove_counts(&mut self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        // The sum over all endpoints must be monotonic.
        self.lost_before += lost(&self.gates.get(&endpoint.0)?);
        self.gates.clear(&[endpoint.0])?;
        let rows: Vec<u32> = (0..COUNTERS_PER_ENDPOINT)
            .map(|offset| endpoint.0 * COUNTERS_PER_ENDPOINT + offset)
            .collect();
        self.counters.clear(&rows)?;
        for key in drop_keys(endpoint) {
            self.drops.remove(&key)?;
        }
        Ok(())
    }
}
