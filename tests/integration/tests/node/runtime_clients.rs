//! Tests clients of current runtimes with the fields that they really send: containerd's draft of a pod network
//! service, containerd's KNI branch, the KNI kubelet. All of them use the same attach.

mod draft;
mod fields;

use std::path::PathBuf;

use anyhow::{Result, ensure};
use kni_integration::{
    Namespaces, Node, patience,
    traffic::{Servers, tcp_get},
};

/// The port of all servers.
const PORT: u16 = 8080;

/// A namespace created by a runtime, not by the agent.
pub(crate) struct RuntimeNetns {
    pub(crate) path: PathBuf,
    pub(crate) inside: Namespaces,
}

impl RuntimeNetns {
    pub(crate) fn new(node: &Node, name: &str) -> Result<Self> {
        node.run("ip", &["netns", "add", name])?;
        let path = PathBuf::from("/run/netns").join(name);
        let inside = node.net_at(name, &path)?;
        Ok(Self { path, inside })
    }

    pub(crate) fn path(&self) -> String {
        self.path.display().to_string()
    }
}

/// Checks that two pods reach each other.
pub(crate) fn assert_connected(pods: [(&Namespaces, &str); 2]) -> Result<()> {
    for [(from, _), (to, address)] in [pods, [pods[1], pods[0]]] {
        let server = Servers::start(to, address, PORT)?;
        let answer = tcp_get(from, address.parse()?, PORT, patience());
        ensure!(answer.is_ok(), "{address}: {answer:?}");
        drop(server);
    }
    Ok(())
}
