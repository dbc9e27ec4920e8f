//! Passes drop events from the dataplane to whoever watches, with names instead of numbers.

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use kni_common::address::to_ip;
use nix::time::{ClockId, clock_gettime};

use super::{Inner, views::Owner};
use crate::{
    dataplane::{DropRecord, EventStream},
    model::{EndpointId, view::DropEventView},
};

/// Pause after a failure to read, so that a broken ring does not spin.
const RETRY: Duration = Duration::from_secs(1);

impl Inner {
    pub(super) async fn pass_events(self: Arc<Self>, mut events: EventStream) {
        loop {
            match events.next().await {
                Ok(records) if self.drops.receiver_count() > 0 => {
                    for record in &records {
                        // Nobody may be listening any more.
                        let _unheard = self.drops.send(self.event_view(record)).is_err();
                    }
                }
                Ok(_nobody_listens) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot read drop events");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    fn event_view(&self, record: &DropRecord) -> DropEventView {
        let DropRecord {
            event,
            direction,
            reason,
        } = record;
        let Owner { network, pod, ifname } = self.state().owner_of(EndpointId(event.endpoint));
        DropEventView {
            time_ns: wall_clock(event.time_ns),
            network,
            pod,
            ifname,
            direction: *direction,
            reason: *reason,
            source: known(event.source),
            destination: known(event.destination),
            protocol: u8::try_from(event.protocol).unwrap_or(u8::MAX),
            source_port: u16::from_be_bytes(event.ports.source),
            destination_port: u16::from_be_bytes(event.ports.destination),
            length: event.length,
            ethertype: event.ethertype,
        }
    }
}

fn known(address: [u8; 16]) -> Option<IpAddr> {
    (address != [0; 16]).then(|| to_ip(address))
}

/// Nanoseconds since the Unix epoch for a time of `CLOCK_MONOTONIC`.
fn wall_clock(monotonic_ns: u64) -> u64 {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let monotonic = clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map(Duration::from)
        .unwrap_or_default();
    let age = monotonic.saturating_sub(Duration::from_nanos(monotonic_ns));
    u64::try_from(wall.saturating_sub(age).as_nanos()).unwrap_or(u64::MAX)
}
