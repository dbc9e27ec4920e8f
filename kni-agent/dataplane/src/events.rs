//! Reads flow and drop events from their ring buffers.

use std::time::Duration;

use aya::{
    Ebpf,
    maps::{MapData, RingBuf},
};
use kni_common::{
    Direction, Verdict,
    event::{EVENT_VERSION, FlowEvent},
};
use tokio::time::{Instant, sleep_until};
use zerocopy::FromBytes as _;

use super::DataplaneError;

/// One ring for drops and one for new flows, so that a flood of either displaces no event of the other.
const NAMES: [&str; 2] = ["DROP_EVENTS", "FLOW_EVENTS"];

/// Longest time that events wait in a ring: short enough for people who watch, and each ring holds 80 000 events a
/// second.
const PERIOD: Duration = Duration::from_millis(50);

/// An event with known codes.
#[derive(Debug, Clone, Copy)]
pub struct FlowRecord {
    /// The record as the program wrote it.
    pub event: FlowEvent,
    /// Its direction.
    pub direction: Direction,
    /// The decision: the reason of a drop, or the verdict on a new flow.
    pub verdict: Verdict,
}

/// The events of the dataplane, in order.
pub struct EventStream {
    rings: [RingBuf<MapData>; 2],
    due: Instant,
}

impl EventStream {
    /// Must be the only reader: two readers would share the events.
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, DataplaneError> {
        let [drops, flows] = NAMES;
        Ok(Self {
            rings: [ring(ebpf, drops)?, ring(ebpf, flows)?],
            due: Instant::now(),
        })
    }

    /// Waits for events and returns all that the rings hold, in the order of their times. Records of another version
    /// are skipped. Cancellation loses none.
    ///
    /// The programs do not wake the reader: a wake-up for each event would cost a connection more than the event
    /// itself. So this polls every `PERIOD`.
    ///
    /// # Errors
    /// None at present.
    pub async fn next(&mut self) -> std::io::Result<Vec<FlowRecord>> {
        loop {
            sleep_until(self.due).await;
            self.due = Instant::now() + PERIOD;
            let records = self.drain();
            if !records.is_empty() {
                return Ok(records);
            }
        }
    }

    fn drain(&mut self) -> Vec<FlowRecord> {
        let mut records = Vec::new();
        for ring in &mut self.rings {
            while let Some(item) = ring.next() {
                records.extend(parse(&item));
            }
        }
        records.sort_by_key(|record| record.event.time_ns);
        records
    }
}

fn ring(ebpf: &mut Ebpf, name: &'static str) -> Result<RingBuf<MapData>, DataplaneError> {
    let map = ebpf
        .take_map(name)
        .ok_or(DataplaneError::Missing { what: "map", name })?;
    RingBuf::try_from(map).map_err(DataplaneError::map(name, "opening"))
}

fn parse(bytes: &[u8]) -> Option<FlowRecord> {
    let event = FlowEvent::read_from_bytes(bytes)
        .ok()
        .filter(|event| event.version == EVENT_VERSION)?;
    Some(FlowRecord {
        event,
        direction: Direction::from_code(event.direction)?,
        verdict: Verdict::from_code(event.verdict)?,
    })
}
