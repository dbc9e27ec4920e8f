//! Flows as a stream that a slow client cannot hold up.

use std::sync::Arc;

use futures::{Stream, stream};
use kni_model::flow_view::{FlowFilter, FlowView};
use kni_proto::runtime::Flow;
use tokio::sync::{
    broadcast::{Receiver, error::RecvError},
    watch,
};
use tonic::Status;

use super::flow_answer;

/// Flows from now on that the filter selects. What the client was too slow for is counted in the next flow's `lost`,
/// selected or not, since nobody has looked at it. Ends when `stopping` becomes true or its sender is gone.
pub(super) fn watch(
    flows: Receiver<Arc<FlowView>>,
    filter: FlowFilter,
    stopping: watch::Receiver<bool>,
) -> impl Stream<Item = Result<Flow, Status>> + Send {
    stream::unfold(
        (flows, filter, stopping),
        |(mut flows, filter, mut stopping)| async move {
            let flow = tokio::select! {
                biased;
                _ = stopping.wait_for(|stopping| *stopping) => None,
                flow = next(&mut flows, &filter) => flow,
            };
            flow.map(|flow| (Ok(flow), (flows, filter, stopping)))
        },
    )
}

async fn next(flows: &mut Receiver<Arc<FlowView>>, filter: &FlowFilter) -> Option<Flow> {
    let mut lost = 0_u64;
    loop {
        match flows.recv().await {
            Ok(flow) if filter.selects(&flow) => {
                return Some(Flow {
                    lost,
                    ..flow_answer::flow(&flow)
                });
            }
            Ok(_not_asked_for) => {}
            Err(RecvError::Lagged(more)) => lost = lost.saturating_add(more),
            Err(RecvError::Closed) => return None,
        }
    }
}
