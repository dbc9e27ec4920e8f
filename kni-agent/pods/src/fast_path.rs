//! Gives interfaces of networks with `spec.xdp` their XDP program.

use std::sync::Arc;

use kni_dataplane::DataplaneError;
use kni_model::Attachment;
use kni_netlink as netlink;
use kni_netlink::Netns;

use super::{
    AttachError, Inner,
    error::{Subject, chain},
};

impl Inner {
    /// Makes the pod end, which is up, fit for XDP and attaches the program. Before the endpoint is published: nothing of
    /// what the pod sent before, with an unfinished checksum, goes anywhere.
    pub(super) async fn speed_up(
        &self,
        attachment: &Attachment,
        netns: &Netns,
        subject: &Subject,
    ) -> Result<(), AttachError> {
        let refused = |reason: String| AttachError::Xdp {
            pod: subject.pod.clone(),
            sandbox: subject.sandbox.clone(),
            network: attachment.network.clone(),
            reason,
        };
        netlink::prepare_xdp_pod_interface(netns, &attachment.ifname)
            .await
            .map_err(|error| refused(chain(&error)))?;
        let dataplane = Arc::clone(&self.dataplane);
        let (ifname, ifindex) = (attachment.host_ifname.clone(), attachment.host_ifindex);
        let endpoint = attachment.endpoint;
        tokio::task::spawn_blocking(move || dataplane.attach_xdp(ifname.as_str(), ifindex, endpoint))
            .await
            .unwrap_or_else(|ended| Err(DataplaneError::Kernel(ended.to_string())))
            .map_err(|error| refused(chain(&error)))
    }

    /// Moves the program of an adopted interface to this agent's; attaches it where it is missing.
    pub(super) fn adopt_xdp(&self, attachment: &Attachment) -> Result<(), DataplaneError> {
        let Attachment {
            host_ifname,
            host_ifindex,
            endpoint,
            xdp,
            ..
        } = attachment;
        if !xdp {
            return Ok(());
        }
        self.dataplane
            .attach_xdp(host_ifname.as_str(), *host_ifindex, *endpoint)
    }
}
