//! Ends sockets of the node's processes that are connected to pods behind ports that lead elsewhere by now.

use std::{collections::BTreeSet, net::SocketAddr};

use kni_netlink::ConnectedSocket;

use super::{State, Uplink, desired};

impl Uplink {
    /// Ends the node's UDP sockets that are connected to a pod through a port that does not lead there any more: the
    /// kernel has the pod's address from `connect` on, and no packet would show it to the process. A failure concerns
    /// them only.
    pub(super) fn end_node_sockets(&self, state: &mut State) {
        let targets = desired::udp_targets(state.pods.values());
        if !state.has_pods || state.node_targets.as_ref() == Some(&targets) {
            return;
        }
        match self.end_sockets_beside(&targets) {
            Ok(0) => {}
            Ok(ended) => tracing::info!(ended, "sockets of the node that were connected to pods that are gone"),
            Err(reason) => {
                // The next change tries again.
                tracing::warn!(reason, "sockets of the node stay connected to pods that are gone");
                return;
            }
        }
        state.node_targets = Some(targets);
    }

    fn end_sockets_beside(&self, targets: &BTreeSet<SocketAddr>) -> Result<usize, String> {
        let found = self.dataplane.node_sockets_beside(targets);
        let found = found.map_err(|error| kni_model::error_chain(&error))?;
        if found.is_empty() {
            return Ok(0);
        }
        let sockets = found.iter().map(|(cookie, peer)| ConnectedSocket {
            cookie: *cookie,
            peer: *peer,
        });
        let ended = kni_netlink::end_connected(&sockets.collect());
        let ended = ended.map_err(|error| kni_model::error_chain(&error))?;
        let ended = ended.iter().map(|socket| (socket.cookie, socket.peer)).collect();
        // Others have no connection: their rows have no effect without the pod, and are replaced by those of others.
        let removed = self.dataplane.remove_node_sockets(&ended);
        removed.map_err(|error| kni_model::error_chain(&error))?;
        Ok(ended.len())
    }
}
