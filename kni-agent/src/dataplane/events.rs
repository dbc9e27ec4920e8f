//! Reads drop events from the ring buffer.

use aya::maps::{MapData, RingBuf};
use kni_common::{
    Direction, Verdict,
    event::{DropEvent, EVENT_VERSION},
};
use tokio::io::{Interest, unix::AsyncFd};
use zerocopy::FromBytes as _;

use super::DataplaneError;

/// An event whose codes have been understood.
#[derive(Debug, Clone, Copy)]
pub struct DropRecord {
    /// The record as the program wrote it.
    pub event: DropEvent,
    /// Its direction.
    pub direction: Direction,
    /// Its reason.
    pub reason: Verdict,
}

/// The events of the dataplane, in order.
pub struct EventStream {
    ring: AsyncFd<RingBuf<MapData>>,
}

impl EventStream {
    pub(super) fn new(ring: RingBuf<MapData>) -> Result<Self, DataplaneError> {
        // SAFETY: the ring owns its descriptor, always the same one, and closes it only when it is dropped, which
        // `AsyncFd` does after it has deregistered the descriptor.
        let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) };
        ring.map(|ring| Self { ring }).map_err(|error| {
            DataplaneError::Kernel(format!("watching the EVENTS ring: {}", std::io::Error::from(error)))
        })
    }

    /// Waits for events and returns all that lie in the ring. Records of another version are left out.
    pub async fn next(&mut self) -> std::io::Result<Vec<DropRecord>> {
        let mut guard = self.ring.readable_mut().await?;
        let ring = guard.get_inner_mut();
        let mut records = Vec::new();
        while let Some(item) = ring.next() {
            records.extend(understand(&item));
        }
        guard.clear_ready();
        Ok(records)
    }
}

fn understand(bytes: &[u8]) -> Option<DropRecord> {
    let event = DropEvent::read_from_bytes(bytes)
        .ok()
        .filter(|event| event.version == EVENT_VERSION)?;
    Some(DropRecord {
        event,
        direction: Direction::from_code(event.direction)?,
        reason: Verdict::from_code(event.verdict)?,
    })
}
