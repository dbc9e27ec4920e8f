//! Attaches the XDP program to interfaces of networks with `spec.xdp`.

use std::sync::Arc;

use kni_dataplane::DataplaneError;
use kni_model::{Attachment, error_chain};
use kni_netlink::{self as netlink, Netns};

use crate::{
    error::{AttachError, ErrorKind, Subject},
    kernel::Kernel,
};

/// Prepares the pod end, which is up, for XDP and attaches the program. Runs before the endpoint is published: no
/// earlier packet of the pod, with an unfinished checksum, is forwarded.
pub(super) async fn attach(
    kernel: &Kernel,
    attachment: &Attachment,
    netns: &Netns,
    subject: &Subject,
) -> Result<(), AttachError> {
    let refused = |error: &dyn std::error::Error| {
        subject.error(ErrorKind::Xdp {
            network: attachment.network.clone(),
            reason: error_chain(error),
        })
    };
    netlink::prepare_xdp_pod_interface(netns, &attachment.ifname)
        .await
        .map_err(|error| refused(&error))?;
    let dataplane = Arc::clone(&kernel.dataplane);
    let (ifname, ifindex) = (attachment.host_ifname.clone(), attachment.host_ifindex);
    let endpoint = attachment.endpoint;
    tokio::task::spawn_blocking(move || dataplane.attach_xdp(ifname.as_str(), ifindex, endpoint))
        .await
        .unwrap_or_else(|ended| Err(DataplaneError::Kernel(ended.to_string())))
        .map_err(|error| refused(&error))
}

/// Replaces the program of an adopted interface by this agent's; attaches it where it is missing.
pub(super) fn adopt(kernel: &Kernel, attachment: &Attachment) -> Result<(), DataplaneError> {
    if !attachment.xdp {
        return Ok(());
    }
    let Attachment {
        host_ifname,
        host_ifindex,
        endpoint,
        ..
    } = attachment;
    let dataplane = &kernel.dataplane;
    dataplane.attach_xdp(host_ifname.as_str(), *host_ifindex, *endpoint)
}
