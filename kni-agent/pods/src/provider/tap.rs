//! Tap devices: the host's end of a virtual machine's link, whose addresses the guest configures.

use kni_model::{Attachment, provider::Tap};
use kni_netlink as netlink;
use kni_netlink::Netns;

use super::{Subject, failed};
use crate::{AttachError, Inner};

impl Inner {
    pub(super) async fn make_tap(
        &self,
        tap: &Tap,
        attachment: &mut Attachment,
        netns: &Netns,
        subject: &Subject,
    ) -> Result<(), AttachError> {
        netlink::create_tap(netns, &attachment.ifname, tap)
            .await
            .map_err(subject.failed("creating the tap device"))?;
        let inside = self.enter(netns, subject).await?;
        let link = inside
            .get_link(&attachment.ifname)
            .await
            .map_err(subject.failed("reading the tap device"))?
            .ok_or_else(|| failed(subject, attachment, "the tap device is gone again".to_owned(), true))?;
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
}
