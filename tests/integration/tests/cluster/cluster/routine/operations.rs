//! Lists the operations of the table, and runs them.

mod agents;
mod control_plane;
mod networks;
mod nodes;
mod policies;

use std::time::Duration;

use anyhow::Result;
use kni_integration::traffic::StreamReport;

use super::bed::Bed;

/// How long something is away: hundreds of requests, and longer than the rounds of an agent.
const AWAY: Duration = Duration::from_millis(1500);

/// The streams that an operation has run itself.
pub(super) type Own = Vec<(String, StreamReport)>;

/// An operation, from the usual state of the cluster back to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    /// For a while.
    Nothing,
    /// The tunnel device of node3 is down until its agent finds it: packets are lost.
    TunnelDown,
    /// A label of the network: an object is different.
    ObjectChanged,
    AgentRestarted,
    AgentKilled,
    AgentsRolled,
    AgentAwayWhilePodEnds,
    ControllerReplaced,
    LeaseDeleted,
    ApiServerRestarted,
    StorageRestored,
    RegisteredAgain,
    RegisteredBeforeAgent,
    RegisteredAfterAgent,
    Rebooted,
    Drained,
    Narrowed,
    PolicyMistyped,
    PortChanged,
    LabelRemoved,
    NetworkExported,
    NetworkDeletedInUse,
    NetworkRestored,
    ReverseOrder,
}

impl Operation {
    pub(super) async fn run(self, bed: &mut Bed) -> Result<Own> {
        match self {
            Self::Nothing => tokio::time::sleep(AWAY).await,
            Self::TunnelDown => nodes::tunnel_down(bed).await?,
            Self::ObjectChanged => networks::labelled(bed, true).await?,
            Self::AgentRestarted => agents::restarted(bed)?,
            Self::AgentKilled => agents::killed(bed).await?,
            Self::AgentsRolled => agents::rolled(bed)?,
            Self::AgentAwayWhilePodEnds => agents::away_while_a_pod_ends(bed).await?,
            Self::ControllerReplaced => control_plane::controller_replaced(bed).await?,
            Self::LeaseDeleted => control_plane::lease_deleted(bed).await?,
            Self::ApiServerRestarted => control_plane::restarted(bed).await?,
            Self::StorageRestored => control_plane::restored(bed).await?,
            Self::RegisteredAgain => nodes::registered(bed, nodes::Order::AgentStays).await?,
            Self::RegisteredBeforeAgent => nodes::registered(bed, nodes::Order::NodeFirst).await?,
            Self::RegisteredAfterAgent => nodes::registered(bed, nodes::Order::AgentFirst).await?,
            Self::Rebooted => nodes::rebooted(bed).await?,
            Self::Drained => return nodes::drained(bed).await,
            Self::Narrowed => nodes::narrowed(bed).await?,
            Self::PolicyMistyped => policies::mistyped(bed).await?,
            Self::PortChanged => policies::port_changed(bed).await?,
            Self::LabelRemoved => policies::label_removed(bed).await?,
            Self::NetworkExported => networks::exported(bed).await?,
            Self::NetworkDeletedInUse => return networks::deleted_in_use(bed).await,
            Self::NetworkRestored => networks::restored(bed).await?,
            Self::ReverseOrder => return networks::reverse_order(bed).await,
        }
        Ok(Own::new())
    }

    /// Undoes what stays of a control.
    pub(super) async fn undo(self, bed: &Bed) -> Result<()> {
        match self {
            Self::ObjectChanged => networks::labelled(bed, false).await,
            _ => Ok(()),
        }
    }
}
