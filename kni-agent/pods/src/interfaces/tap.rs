//! Makes tap devices: the host side of a virtual machine's link, whose addresses the guest configures.

use kni_model::{Attachment, provider::Tap};
use kni_netlink as netlink;

use super::context::Build;
use crate::error::AttachError;

pub(super) async fn make(build: &Build<'_>, tap: &Tap, attachment: &mut Attachment) -> Result<(), AttachError> {
    let subject = build.subject;
    netlink::create_tap(build.netns, &attachment.ifname, tap)
        .await
        .map_err(subject.failed("creating the tap device"))?;
    let inside = build.enter().await?;
    let link = inside
        .get_link(&attachment.ifname)
        .await
        .map_err(subject.failed("reading the tap device"))?
        .ok_or_else(|| build.refused(attachment, "the tap device is gone again", true))?;
    attachment.ifindex = link.ifindex;
    let step = "configuring the tap device";
    inside.set_loopback_up().await.map_err(subject.failed(step))?;
    inside
        .set_mac(link.ifindex, attachment.mac)
        .await
        .map_err(subject.failed(step))?;
    inside
        .set_mtu(link.ifindex, attachment.mtu)
        .await
        .map_err(subject.failed(step))?;
    inside.set_up(link.ifindex).await.map_err(subject.failed(step))
}
