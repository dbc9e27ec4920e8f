//! Streams drop events without letting a slow client delay them.

use futures::{Stream, stream};
use kni_model::view::DropEventView;
use kni_proto::runtime::DropEvent;
use tokio::sync::{
    broadcast::{Receiver, error::RecvError},
    watch,
};
use tonic::Status;

use super::runtime_answer;

/// Streams events from now on. Events lost because the client is too slow are counted in the next event's `lost`. Ends
/// when `stopping` becomes true or its sender is dropped.
pub(super) fn watch(
    events: Receiver<DropEventView>,
    stopping: watch::Receiver<bool>,
) -> impl Stream<Item = Result<DropEvent, Status>> + Send {
    stream::unfold((events, stopping), |(mut events, mut stopping)| async move {
        let event = tokio::select! {
            biased;
            _ = stopping.wait_for(|stopping| *stopping) => None,
            event = next(&mut events) => event,
        };
        event.map(|event| (Ok(event), (events, stopping)))
    })
}

async fn next(events: &mut Receiver<DropEventView>) -> Option<DropEvent> {
    let mut lost = 0_u64;
    loop {
        match events.recv().await {
            Ok(event) => {
                return Some(DropEvent {
                    lost,
                    ..runtime_answer::drop_event(&event)
                });
            }
            Err(RecvError::Lagged(more)) => lost = lost.saturating_add(more),
            Err(RecvError::Closed) => return None,
        }
    }
}
