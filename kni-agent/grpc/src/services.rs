//! Contains the services of the node behind the gRPC services, and what decides how requests are read.

use std::{fmt, sync::Arc};

use super::{convert::NetnsAnnotation, inspect::Inspect, setup::Setup, unknown_keys::UnknownKeys};

/// The services of the node that answer the calls.
#[derive(Clone)]
pub struct Services<B> {
    /// Attaches and detaches.
    pub backend: B,
    /// Reads the node.
    pub inspector: Arc<dyn Inspect>,
    /// Prepares the node.
    pub setup: Arc<dyn Setup>,
    /// Whether pods come from a cluster. Then annotation `kni.dev/netns` belongs to the kubelet and is not read.
    pub in_cluster: bool,
    /// Keys of requests that the agent does not know.
    pub unknown_keys: UnknownKeys,
}

impl<B> Services<B> {
    pub(super) fn netns_annotation(&self) -> NetnsAnnotation {
        if self.in_cluster {
            NetnsAnnotation::Ignored
        } else {
            NetnsAnnotation::Last
        }
    }
}

impl<B> fmt::Debug for Services<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Services");
        out.field("in_cluster", &self.in_cluster);
        out.field("unknown_keys", &self.unknown_keys).finish_non_exhaustive()
    }
}
