//! Describes a node whose pods get their networks by KNI.

use crate::programs::Programs;

/// How the pods of a node get their networks by KNI.
#[derive(Debug, Clone)]
pub struct Kni {
    /// Those of [`Programs::build_kni`].
    pub programs: Programs,
    /// Whether the node's kubelet is the one that calls KNI.
    pub kubelet: bool,
    /// Whether the node's containerd takes namespaces from the kubelet.
    pub containerd: bool,
    /// How long an agent that does not answer leaves the node ready; the kubelet's default if 0.
    pub grace_seconds: u32,
    /// How often the kubelet computes the node's status; its default if 0.
    pub status_seconds: u32,
}

impl Kni {
    /// A node with both programs and the kubelet's defaults.
    pub fn new(programs: Programs) -> Self {
        Self {
            programs,
            kubelet: true,
            containerd: true,
            grace_seconds: 0,
            status_seconds: 0,
        }
    }
}
