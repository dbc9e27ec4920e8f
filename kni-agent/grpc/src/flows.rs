//! Streams flows without letting a slow client delay them.

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

/// Streams the flows that the filter selects, from now on. Flows lost because the client is too slow are counted in the
/// next flow's `lost`, whether the filter selects them or not, since lost flows are not filtered. Ends when `stopping`
/// becomes true or its sender is dropped.
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
