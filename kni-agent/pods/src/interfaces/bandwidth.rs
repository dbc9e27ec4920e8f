//! Limits the rates of an interface: ingress of the pod at the host end, egress at the pod end.

use kni_model::Attachment;
use kni_netlink::{self as netlink, Netlink};

use crate::{
    error::{AttachError, Subject},
    kernel::Kernel,
};

/// Runs before the interface is published. The pod cannot lift the limit: that takes `CAP_NET_ADMIN` in its namespace.
pub(super) async fn limit(
    kernel: &Kernel,
    attachment: &Attachment,
    pod: &Netlink,
    subject: &Subject,
) -> Result<(), AttachError> {
    let failed = |step| subject.failed::<netlink::Error>(step);
    if let Some(rate) = &attachment.bandwidth.to_pod {
        kernel
            .netlink
            .shape(attachment.host_ifindex, rate)
            .await
            .map_err(failed("limiting the rate to the pod"))?;
    }
    if let Some(rate) = &attachment.bandwidth.from_pod {
        pod.shape(attachment.ifindex, rate)
            .await
            .map_err(failed("limiting the rate from the pod"))?;
    }
    Ok(())
}
