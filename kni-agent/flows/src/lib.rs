//! Reports flows and drops: names the programs' records, keeps the most recent ones, runs the programs for `explain`.
//! Layer: service.

mod drops;
mod ends;
mod explain;
mod frame;
mod name;
mod node;
mod remote_pods;
mod steps;
#[cfg(test)]
mod tests;
mod text;

use std::{
    collections::VecDeque,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kni_common::event::PolicyTrail;
use kni_dataplane::{Dataplane, EventStream, FlowRecord};
use kni_model::{
    Attachment, EndpointId, Network, NetworkId, NetworkName, Sandbox,
    flow_view::{FlowFilter, FlowView, TrailView},
    policy::PolicyDirection,
    view::{DropEventView, Owner},
};
pub use remote_pods::{RemotePod, RemotePods};
use tokio::sync::broadcast;

/// Size of the history of flows and drops, each of which takes about 700 bytes.
const REMEMBERED: usize = 1024;

/// How far a slow subscriber may lag before it loses events.
const BUFFERED: usize = 4096;

/// Pause after a failure to read, so that a broken ring does not spin.
const RETRY: Duration = Duration::from_secs(1);

/// Resolves numbers to names. Methods may wait some milliseconds for locks.
pub trait Naming: Send + Sync + 'static {
    /// The owner of an endpoint.
    fn owner(&self, endpoint: EndpointId) -> Option<Owner>;

    /// The endpoint that has an address of a network.
    fn endpoint_at(&self, network: NetworkId, address: IpAddr) -> Option<EndpointId>;

    /// Name of a network.
    fn network_name(&self, network: NetworkId) -> Option<NetworkName>;

    /// `namespace/name:port` of a service port.
    fn service_name(&self, service: u32) -> Option<String>;

    /// The decision of a policy set; `None` where none was consulted.
    fn trail(&self, trail: &PolicyTrail, direction: PolicyDirection, allowed: bool) -> Option<TrailView>;

    /// The sandbox of a pod, by namespace and name.
    fn sandbox_of(&self, namespace: &str, name: &str) -> Option<Arc<Sandbox>>;

    /// Why a network refused the last attach of a pod; `None` where none did.
    fn refusal_of(&self, namespace: &str, name: &str) -> Option<String>;

    /// An endpoint's attachment and its sandbox.
    fn attachment(&self, endpoint: EndpointId) -> Option<(Arc<Sandbox>, Attachment)>;

    /// The networks.
    fn networks(&self) -> Vec<Network>;

    /// The pod of another node that has an address of a network.
    fn remote_at(&self, network: NetworkId, address: IpAddr) -> Option<Arc<RemotePod>>;

    /// The interfaces of a pod of another node, by namespace and name.
    fn remote_pod(&self, namespace: &str, name: &str) -> Vec<Arc<RemotePod>>;

    /// The node, this one or another, whose own address that is for packets of a network.
    fn node_at(&self, network: Option<NetworkId>, address: IpAddr) -> Option<String>;

    /// The name of this node, empty where it has none.
    fn own_node(&self) -> String;
}

/// The flows of the node.
pub struct Flows {
    dataplane: Arc<Dataplane>,
    naming: Arc<dyn Naming>,
    remote_pods: Arc<RemotePods>,
    recent: Mutex<VecDeque<Arc<FlowView>>>,
    all: broadcast::Sender<Arc<FlowView>>,
    drops: broadcast::Sender<DropEventView>,
}

impl Flows {
    /// Starts without flows; [`Self::follow`] begins to read.
    pub fn new(dataplane: Arc<Dataplane>, naming: Arc<dyn Naming>, remote_pods: Arc<RemotePods>) -> Self {
        Self {
            dataplane,
            naming,
            remote_pods,
            recent: Mutex::new(VecDeque::with_capacity(REMEMBERED)),
            all: broadcast::Sender::new(BUFFERED),
            drops: broadcast::Sender::new(BUFFERED),
        }
    }

    /// The pods of other nodes, which `naming` names.
    pub fn remote_pods(&self) -> &Arc<RemotePods> {
        &self.remote_pods
    }

    /// Reads events for as long as the agent runs.
    pub async fn follow(self: Arc<Self>, mut events: EventStream) {
        loop {
            match kni_tasks::waiting(events.next()).await {
                Ok(records) => {
                    let flows = Arc::clone(&self);
                    // Naming waits for locks that policy changes hold.
                    let taken = tokio::task::spawn_blocking(move || flows.take(&records)).await;
                    if let Err(error) = taken {
                        tracing::error!(%error, "naming flow events");
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot read flow events");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    fn take(&self, records: &[FlowRecord]) {
        for record in records {
            let flow = Arc::new(name::flow(record, &*self.naming));
            // There may be no subscriber.
            if flow.is_drop() && self.drops.receiver_count() > 0 {
                let _unheard = self.drops.send(drops::event(&flow, record)).is_err();
            }
            let _unheard = self.all.send(Arc::clone(&flow)).is_err();
            let mut recent = self.recent();
            if recent.len() >= REMEMBERED {
                recent.pop_front();
            }
            recent.push_back(flow);
        }
    }

    fn recent(&self) -> MutexGuard<'_, VecDeque<Arc<FlowView>>> {
        // A panic while the lock was held leaves complete entries.
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last flows and drops that the filter selects, oldest first.
    pub fn history(&self, filter: &FlowFilter) -> Vec<Arc<FlowView>> {
        self.recent()
            .iter()
            .filter(|flow| filter.selects(flow))
            .map(Arc::clone)
            .collect()
    }

    /// Flows and drops from now on. A receiver that lags receives the number of lost events.
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<FlowView>> {
        self.all.subscribe()
    }

    /// Drops alone, otherwise as [`Self::subscribe`].
    pub fn subscribe_drops(&self) -> broadcast::Receiver<DropEventView> {
        self.drops.subscribe()
    }
}
