//! Holds the kernel drivers that the owners share.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kni_dataplane::Dataplane;
use kni_model::{Attachment, EndpointId, NetnsIdentity, error_chain};
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
    /// Endpoints whose host ends are down because their programs cannot be attached.
    closed: Mutex<BTreeSet<EndpointId>>,
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
            closed: Mutex::default(),
        })
    }

    fn lock_closed(&self) -> MutexGuard<'_, BTreeSet<EndpointId>> {
        // Each change is one call of the set.
        self.closed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Endpoints whose host ends are down because their programs cannot be attached.
    pub(crate) fn closed(&self) -> BTreeSet<EndpointId> {
        self.lock_closed().clone()
    }

    /// Sets a host end down: no traffic is better than traffic without policy (I1). The repair tries to open it again.
    pub(crate) async fn close(&self, attachment: &Attachment) {
        self.lock_closed().insert(attachment.endpoint);
        if let Err(error) = self.netlink.set_down(attachment.host_ifindex).await {
            tracing::error!(ifname = %attachment.host_ifname, error = error_chain(&error), "cannot set it down");
        }
    }

    /// Sets a host end up whose programs are attached again.
    pub(crate) async fn open_again(&self, attachment: &Attachment) -> Result<(), kni_netlink::Error> {
        self.netlink.set_up(attachment.host_ifindex).await?;
        self.reopened(attachment.endpoint);
        Ok(())
    }

    /// The interface is no longer closed, or gone.
    pub(crate) fn reopened(&self, endpoint: EndpointId) {
        self.lock_closed().remove(&endpoint);
    }

    /// Which namespace is the node's.
    pub(crate) fn home_id(&self) -> NetnsIdentity {
        self.home.id()
    }
}
