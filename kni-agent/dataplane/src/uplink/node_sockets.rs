//! Lists the sockets of the node that have sent datagrams to pods through ports of the node.

use std::{collections::BTreeSet, net::SocketAddr};

use kni_common::{
    address::{from_ip, to_ip},
    uplink::NodePeerKey,
};

use crate::{Dataplane, DataplaneError, lock};

impl Dataplane {
    /// The sockets of the node that have sent datagrams, through a port of the node, to an address and port of a pod
    /// that are not among these: the kernel's cookie of each socket, and the address and port.
    pub fn node_sockets_beside(
        &self,
        targets: &BTreeSet<SocketAddr>,
    ) -> Result<BTreeSet<(u64, SocketAddr)>, DataplaneError> {
        let rows = lock(&self.uplink).node_peers.rows()?;
        let sockets = rows.into_iter().map(|(key, _)| {
            let [low, high] = key.socket.map(u64::from);
            let pod = SocketAddr::new(to_ip(key.address), u16::from_be_bytes(key.port));
            (high << 32 | low, pod)
        });
        Ok(sockets.filter(|(_, pod)| !targets.contains(pod)).collect())
    }

    /// Removes the rows of these sockets.
    pub fn remove_node_sockets(&self, sockets: &BTreeSet<(u64, SocketAddr)>) -> Result<(), DataplaneError> {
        #[expect(clippy::cast_possible_truncation, reason = "the halves")]
        let keys = sockets.iter().map(|(cookie, pod)| NodePeerKey {
            address: from_ip(pod.ip()),
            socket: [*cookie as u32, (*cookie >> 32) as u32],
            port: pod.port().to_be_bytes(),
            zero: 0,
        });
        let keys: Vec<NodePeerKey> = keys.collect();
        lock(&self.uplink).node_peers.remove_all(&keys)
    }
}
