//! Attaches programs again that another process has detached; closes the interface where that fails.

use std::sync::Arc;

use kni_dataplane::DataplaneError;
use kni_model::{Attachment, Sandbox, error_chain};

use super::{Interfaces, exists, veth};
use crate::error::Subject;

impl Interfaces {
    /// Returns whether the programs are attached again; not where they were found missing while links replaced filters.
    /// Filters come first, because they are attached within microseconds: from then on packets are evaluated again.
    pub(crate) async fn repair(&self, sandbox: &Sandbox, attachment: &Attachment) -> bool {
        let kernel = &self.kernel;
        let was_closed = kernel.closed().contains(&attachment.endpoint);
        if !exists(sandbox, attachment) {
            kernel.reopened(attachment.endpoint);
            return false;
        }
        if !was_closed && self.has_programs(attachment).await {
            return false;
        }
        let (dataplane, again) = (Arc::clone(&kernel.dataplane), attachment.clone());
        let attached = tokio::task::spawn_blocking(move || {
            let (ifname, endpoint) = (again.host_ifname.as_str(), again.endpoint);
            dataplane.attach_again(ifname, endpoint)?;
            if again.xdp {
                dataplane.attach_xdp(ifname, again.host_ifindex, endpoint)?;
            }
            Ok::<(), DataplaneError>(())
        });
        let attached = attached.await.map_err(|ended| ended.to_string());
        let attached = attached.and_then(|done| done.map_err(|error| error_chain(&error)));
        let (pod, ifname) = (&sandbox.pod, &attachment.host_ifname);
        if let Err(reason) = attached {
            if !was_closed {
                tracing::error!(%pod, %ifname, reason, "its programs were detached and cannot be attached again; closing it");
            }
            kernel.close(attachment).await;
            return false;
        }
        if was_closed && let Err(error) = kernel.open_again(attachment).await {
            tracing::error!(%pod, %ifname, error = error_chain(&error), "cannot set it up again");
            return false;
        }
        // Setting an interface down removes the routes over it.
        let routed = veth::ensure_host_routes(kernel, attachment, &Subject::from(sandbox)).await;
        if let Err(error) = routed {
            tracing::error!(%error, "cannot restore its routes");
        }
        tracing::warn!(%pod, %ifname, "its programs were detached by another process; they are attached again");
        true
    }

    /// Under the sandbox's lock, which an upgrade from filters to links holds.
    async fn has_programs(&self, attachment: &Attachment) -> bool {
        let kernel = &self.kernel;
        let dataplane = &kernel.dataplane;
        let (ifname, ifindex) = (attachment.host_ifname.as_str(), attachment.host_ifindex);
        if !dataplane.is_attached(ifname, ifindex, attachment.endpoint, attachment.xdp) {
            return false;
        }
        if !dataplane.is_on_clsact(attachment.endpoint) {
            return true;
        }
        let filters = kernel
            .netlink
            .has_filters(ifindex, kni_dataplane::FILTER_PRIORITY)
            .await;
        filters.is_ok_and(|found| found)
    }
}
