//! Holds the kernel drivers that the owners share.

use std::sync::Arc;

use kni_dataplane::Dataplane;
use kni_model::NetnsIdentity;
use kni_netlink::{Netlink, Netns};

use crate::error::{AttachError, Subject};

/// The node's kernel.
pub(crate) struct Kernel {
    pub(crate) netlink: Netlink,
    /// A separate connection, so that long removals delay no attach.
    pub(crate) teardown: Netlink,
    pub(crate) dataplane: Arc<Dataplane>,
    /// The node's own namespace, to which moved devices return.
    pub(crate) home: Netns,
}

impl Kernel {
    /// Connects to the namespace of the calling thread.
    pub(crate) fn open(dataplane: Arc<Dataplane>) -> Result<Self, AttachError> {
        let failed = |error: kni_netlink::Error| Subject::node().kernel("connecting to rtnetlink", &error);
        Ok(Self {
            netlink: Netlink::new().map_err(failed)?,
            teardown: Netlink::for_teardown().map_err(failed)?,
            dataplane,
            home: Netns::current().map_err(failed)?,
        })
    }

    /// Which namespace is the node's.
    pub(crate) fn home_id(&self) -> NetnsIdentity {
        self.home.id()
    }
}
