//! What the CNI plugin and the agent agree on beside the messages: keys of `extradata`, ids, and the file of a delete
//! that is still to be done.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Name of the interface; `extradata` of `AttachInterface`.
pub const IFNAME: &str = "cni.ifname";
/// Name of the runtime's network configuration. Its presence makes a request one of CNI.
pub const NETWORK: &str = "cni.network";
/// The runtime's id of the container.
pub const CONTAINER: &str = "cni.container";
/// Random text that all repetitions of one call have in common. In `DetachInterface`: undo that call and no other.
pub const INVOCATION: &str = "cni.invocation";
/// Addresses that the runtime wants, a comma list without prefixes.
pub const IPS: &str = "cni.ips";
/// MAC address that the runtime wants.
pub const MAC: &str = "cni.mac";
/// Bandwidth that the runtime wants, its JSON.
pub const BANDWIDTH: &str = "cni.bandwidth";
/// `PodNetwork` to join instead of the default one.
pub const POD_NETWORK: &str = "cni.pod_network";
/// "true" or "false": whether the default routes leave through the interface.
pub const DEFAULT_ROUTE: &str = "cni.default_route";
/// Cgroup of the pod.
pub const CGROUP_PATH: &str = "cgroupPath";
/// Key of the extradata in answers about a sandbox: "true" if the pod requested no primary interface.
pub const NONE: &str = "none";

/// Folder of the deletes to be done, below the state folder.
const PENDING: &str = "cni/pending";
/// Longest id of a container, so that what is made of it is a sandbox id and a file name.
pub const MAX_CONTAINER: usize = 200;
/// Interface whose sandbox has the container's own id.
pub const PRIMARY_IFNAME: &str = "eth0";

/// The sandbox that stands for one interface of a container: the container's id for `eth0`. Neither ids of containers
/// nor names of interfaces contain a colon, so no two are the same.
pub fn sandbox_id(container: &str, ifname: &str) -> String {
    if ifname == PRIMARY_IFNAME {
        container.to_owned()
    } else {
        format!("{container}:{ifname}")
    }
}

/// A delete that the agent has still to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingDelete {
    /// [`PendingDelete::VERSION`].
    pub version: u32,
    /// The runtime's id of the container.
    pub container: String,
    /// Name of the interface.
    pub ifname: String,
    /// Name of the runtime's network configuration.
    pub network: String,
    /// Where it undoes one call: that one's. A later attachment is not touched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invocation: Option<String>,
}

impl PendingDelete {
    /// Version of the file.
    pub const VERSION: u32 = 1;

    /// The folder of such files.
    pub fn folder(state_dir: &Path) -> PathBuf {
        state_dir.join(PENDING)
    }

    /// The file for a sandbox. Files whose names begin with a dot are being written.
    pub fn file(state_dir: &Path, sandbox: &str) -> PathBuf {
        Self::folder(state_dir).join(format!("{sandbox}.json"))
    }

    /// The sandbox that is to go.
    pub fn sandbox(&self) -> String {
        sandbox_id(&self.container, &self.ifname)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_of_containers_are_different_sandboxes() {
        assert_eq!(sandbox_id("abc", "eth0"), "abc");
        assert_eq!(sandbox_id("abc", "net1"), "abc:net1");
        // Ids of containers may contain dots.
        assert_ne!(sandbox_id("abc", "net1"), sandbox_id("abc.net1", "eth0"));
    }

    #[test]
    fn the_file_is_named_after_the_sandbox() {
        let file = PendingDelete::file(Path::new("/var/lib/kni"), &sandbox_id("abc", "net1"));
        assert_eq!(file, Path::new("/var/lib/kni/cni/pending/abc:net1.json"));
        assert!(MAX_CONTAINER + ":".len() + 15 + ".json".len() <= 253);
    }
}
