//! Notices the changes that a round of the address blocks depends on.

use tokio::sync::watch;

use super::ObjectControllers;

/// The versions of the objects that a round depends on. It also depends on the node's attachments and networks, on
/// demand, and on the time.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Inputs {
    /// What the node has, and what its pods need.
    own: [u64; 8],
    /// What is left of the networks, while attaches wait for it. Otherwise the periodic round is early enough.
    left: Option<[u64; 2]>,
}

impl ObjectControllers {
    pub(super) fn block_inputs(&self) -> Inputs {
        let waits = !self.cache.blocks().waiting().is_empty();
        let tables = self.cache.tables();
        Inputs {
            own: [
                tables.own_node.version(),
                tables.networks.version(),
                tables.numbers.version(),
                tables.blocks.version(),
                tables.pods.version(),
                // These decide which networks pods join.
                tables.namespaces.version(),
                tables.attachments.version(),
                tables.definitions.version(),
            ],
            left: waits.then(|| [tables.other_blocks.version(), tables.members.version()]),
        }
    }

    /// Waits for other inputs of a round: most changes, such as those of policies and of other nodes' pods, are none.
    pub(super) async fn other_inputs(&self, changes: &mut watch::Receiver<()>, seen: Option<&Inputs>) {
        while changes.changed().await.is_ok() {
            if Some(&self.block_inputs()) != seen {
                return;
            }
        }
        // The cache is gone; the periodic rounds continue.
        std::future::pending::<()>().await;
    }
}
