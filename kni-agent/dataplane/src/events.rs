//! Reads flow and drop events from the ring buffer.

use std::time::Duration;

use aya::{
    Ebpf,
    maps::{MapData, RingBuf},
};
use kni_common::{
    Direction, Verdict,
    event::{EVENT_VERSION, FlowEvent},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    time::timeout,
};
use zerocopy::FromBytes as _;

use super::DataplaneError;

const NAME: &str = "EVENTS";

/// Longest time that events wait in the ring: short enough for people who watch, and the ring holds 80 000 events a
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
    ring: AsyncFd<RingBuf<MapData>>,
}

impl EventStream {
    /// Must be the only reader: two readers would share the events.
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, DataplaneError> {
        let map = ebpf.take_map(NAME).ok_or(DataplaneError::Missing {
            what: "map",
            name: NAME,
        })?;
        let ring = RingBuf::try_from(map).map_err(DataplaneError::map(NAME, "opening"))?;
        // SAFETY: the ring owns its descriptor, always the same one, and closes it only when it is dropped, which
        // `AsyncFd` does after it has deregistered the descriptor.
        let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) };
        ring.map(|ring| Self { ring }).map_err(|error| {
            DataplaneError::Kernel(format!("watching the EVENTS ring: {}", std::io::Error::from(error)))
        })
    }

    /// Waits for events and returns all that the ring holds. Records of another version are skipped.
    ///
    /// The programs usually do not wake the reader: a wake-up for each event would cost a connection more than the
    /// event itself. So this polls every [`PERIOD`].
    pub async fn next(&mut self) -> std::io::Result<Vec<FlowRecord>> {
        loop {
            // After the period the ring is read even if it is not ready.
            if let Ok(ready) = timeout(PERIOD, self.ring.readable_mut()).await {
                // Before the ring is read: later events make it ready again.
                ready?.clear_ready();
            }
            let records = self.drain();
            if !records.is_empty() {
                return Ok(records);
            }
        }
    }

    fn drain(&mut self) -> Vec<FlowRecord> {
        let ring = self.ring.get_mut();
        let mut records = Vec::new();
        while let Some(item) = ring.next() {
            records.extend(parse(&item));
        }
        records
    }
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
