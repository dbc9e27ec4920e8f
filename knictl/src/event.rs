//! Adds to events their time in a notation for people and log tools.

use kni_proto::runtime::{DropEvent, Flow};
use serde::{Deserialize, Serialize};

use crate::packet;

/// An event with its time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Timed<T> {
    /// RFC 3339, UTC.
    pub(crate) time: String,
    #[serde(flatten)]
    pub(crate) event: T,
}

impl From<DropEvent> for Timed<DropEvent> {
    fn from(event: DropEvent) -> Self {
        let time = packet::time(event.time_ns);
        Self { time, event }
    }
}

impl From<Flow> for Timed<Flow> {
    fn from(event: Flow) -> Self {
        let time = packet::time(event.time_ns);
        Self { time, event }
    }
}
