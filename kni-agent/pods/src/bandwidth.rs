//! Bounds the rates of an interface: at its host end what reaches the pod, at its pod end what the pod sends.

use kni_model::Attachment;
use kni_netlink::Netlink;

use super::{AttachError, Inner, error::Subject};

impl Inner {
    /// Before the interface is published. The pod cannot lift the bound: that takes `CAP_NET_ADMIN` in its namespace.
    pub(super) async fn bound_rates(
        &self,
        attachment: &Attachment,
        pod: &Netlink,
        subject: &Subject,
    ) -> Result<(), AttachError> {
        let failed = |step| subject.failed::<kni_netlink::Error>(step);
        if let Some(rate) = &attachment.bandwidth.to_pod {
            self.netlink
                .shape(attachment.host_ifindex, rate)
                .await
                .map_err(failed("bounding the rate of what reaches the pod"))?;
        }
        if let Some(rate) = &attachment.bandwidth.from_pod {
            pod.shape(attachment.ifindex, rate)
                .await
                .map_err(failed("bounding the rate of what the pod sends"))?;
        }
        Ok(())
    }
}
