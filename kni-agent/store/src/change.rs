//! Collects the edits of one commit.

use std::{net::IpAddr, path::Path};

use kni_model::{Network, NetworkName, Sandbox, SandboxId};

use super::{
    StoreError,
    record::{AddressRest, NamespaceRecord, Removal, UplinkRecord},
    row::{Edit, NAMESPACES, NETWORKS, REMOVALS, RESTS, RowId, Rows, SANDBOXES, UPLINK},
};

/// A set of changes that is applied whole or not at all.
#[derive(Default)]
pub struct Change {
    edits: Vec<Result<Edit, StoreError>>,
}

impl Change {
    /// No change yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn edit(mut self, edit: Result<Edit, StoreError>) -> Self {
        self.edits.push(edit);
        self
    }

    /// Writes a sandbox.
    #[must_use]
    pub fn sandbox(self, sandbox: &Sandbox) -> Self {
        self.edit(SANDBOXES.put(sandbox.id.to_string(), sandbox))
    }

    /// Removes a sandbox.
    #[must_use]
    pub fn remove_sandbox(self, id: &SandboxId) -> Self {
        self.edit(Ok(Edit::remove(SANDBOXES.id(id.to_string()))))
    }

    /// Writes a namespace.
    #[must_use]
    pub fn namespace(self, record: &NamespaceRecord) -> Self {
        self.edit(NAMESPACES.put(path_key(&record.path), record))
    }

    /// Removes a namespace.
    #[must_use]
    pub fn remove_namespace(self, path: &Path) -> Self {
        self.edit(Ok(Edit::remove(NAMESPACES.id(path_key(path)))))
    }

    /// Writes an interface that is to be removed.
    #[must_use]
    pub fn removal(self, removal: &Removal) -> Self {
        self.edit(REMOVALS.put(removal.endpoint.0.to_string(), removal))
    }

    /// Removes the record of an interface that is gone.
    #[must_use]
    pub fn remove_removal(self, removal: &Removal) -> Self {
        self.edit(Ok(Edit::remove(REMOVALS.id(removal.endpoint.0.to_string()))))
    }

    /// Writes a network.
    #[must_use]
    pub fn network(self, network: &Network) -> Self {
        self.edit(NETWORKS.put(network.spec.name.to_string(), network))
    }

    /// Writes the rest of an address.
    #[must_use]
    pub fn rest(self, rest: &AddressRest) -> Self {
        self.edit(RESTS.put(rest_key(&rest.network, rest.address), rest))
    }

    /// Removes the record of a rest.
    #[must_use]
    pub fn remove_rest(self, network: &NetworkName, address: IpAddr) -> Self {
        self.edit(Ok(Edit::remove(RESTS.id(rest_key(network, address)))))
    }

    /// Writes the agent's configuration of the uplink.
    #[must_use]
    pub fn uplink(self, record: &UplinkRecord) -> Self {
        self.edit(UPLINK.put(UPLINK_KEY.to_owned(), record))
    }

    pub(super) fn edits(self, rows: &Rows) -> Result<Vec<Edit>, StoreError> {
        let mut edits: Vec<Edit> = self.edits.into_iter().collect::<Result<_, _>>()?;
        // With a sandbox, its quarantined row goes too.
        let removed = edits.iter().filter(|edit| edit.row.is_none());
        let held: Vec<RowId> = removed.map(|edit| crate::quarantine::quarantine_id(&edit.id)).collect();
        edits.extend(held.into_iter().filter(|id| rows.contains_key(id)).map(Edit::remove));
        Ok(edits)
    }
}

fn path_key(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn rest_key(network: &NetworkName, address: IpAddr) -> String {
    format!("{network}/{address}")
}

/// The only key of [`UPLINK`].
pub(super) const UPLINK_KEY: &str = "uplink";
