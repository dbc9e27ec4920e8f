//! Holds the kernel drivers that the owners share.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kni_dataplane::Dataplane;
use kni_model::{Attachment, EndpointId, NetnsIdentity, error_chain};
use kni_netlink::{DirectNetlink, Netlink, Netns};

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
    /// Connections inside prewarmed namespaces, so that attaching a pod needs no thread that enters its namespace. One
    /// keeps its namespace alive: it goes before the namespace is removed, and at the latest with the agent.
    inside: Mutex<HashMap<NetnsIdentity, DirectNetlink>>,
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
            inside: Mutex::default(),
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

    fn lock_inside(&self) -> MutexGuard<'_, HashMap<NetnsIdentity, DirectNetlink>> {
        // Each change is one call of the map.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a connection inside a prewarmed namespace.
    pub(crate) fn keep_connected(&self, netns: NetnsIdentity, inside: DirectNetlink) {
        self.lock_inside().insert(netns, inside);
    }

    /// The connection inside a prewarmed namespace, for its only attach. None in those that an earlier agent made.
    pub(crate) fn take_connection(&self, netns: NetnsIdentity) -> Option<DirectNetlink> {
        self.lock_inside().remove(&netns)
    }

    /// Closes the connection inside a namespace, where there is one.
    pub(crate) fn disconnect(&self, netns: Option<NetnsIdentity>) {
        netns.and_then(|netns| self.take_connection(netns));
    }

    /// Which namespace is the node's.
    pub(crate) fn home_id(&self) -> NetnsIdentity {
        self.home.id()
    }
}
