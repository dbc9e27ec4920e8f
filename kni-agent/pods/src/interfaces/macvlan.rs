//! Makes macvlan interfaces: pods on the link of an interface of the node.

use kni_model::{Attachment, provider::Macvlan};
use kni_netlink::{self as netlink, Link, MacvlanSpec};

use super::{context::Build, device::refuse_uplink, offers::DeviceRefusal, plain};
use crate::{error::AttachError, kernel::Kernel};

pub(super) async fn make(
    kernel: &Kernel,
    build: &Build<'_>,
    macvlan: &Macvlan,
    attachment: &mut Attachment,
) -> Result<(), AttachError> {
    let subject = build.subject;
    let parent = kernel
        .netlink
        .get_link(&macvlan.parent)
        .await
        .map_err(subject.failed("looking for the parent"))?
        .ok_or_else(|| {
            let reason = format!("parent {} does not exist on the node", macvlan.parent);
            build.refused(attachment, reason, true)
        })?;
    if netlink::own::is_our_link(&parent.name, parent.alias.as_deref()) {
        let reason = format!("parent {} is a pod's interface", macvlan.parent);
        return Err(build.refused(attachment, reason, false));
    }
    if !macvlan.allow_uplink {
        let refused = refuse_node_use(kernel, &parent).await;
        refused.map_err(|refusal| {
            let reason = format!(
                "parent {} {refusal}: frames of pods there bypass the node's programs (spec.provider.allowUplink: true \
                 permits it)",
                parent.name
            );
            let is_transient = matches!(refusal, DeviceRefusal::Netlink(_));
            build.refused(attachment, reason, is_transient)
        })?;
    }
    if attachment.mtu > parent.mtu {
        let reason = format!(
            "spec.mtu {} is above the {} of parent {}",
            attachment.mtu, parent.mtu, parent.name
        );
        return Err(build.refused(attachment, reason, false));
    }
    let spec = MacvlanSpec {
        parent: parent.ifindex,
        name: attachment.ifname.clone(),
        mac: attachment.mac,
        mtu: attachment.mtu,
        mode: macvlan.mode,
    };
    kernel
        .netlink
        .create_macvlan(&spec, build.netns)
        .await
        .map_err(subject.failed("creating the macvlan interface"))?;
    let inside = build.enter().await?;
    let link = inside
        .get_link(&attachment.ifname)
        .await
        .map_err(subject.failed("reading the macvlan interface"))?
        .ok_or_else(|| build.refused(attachment, "the interface is gone again", true))?;
    attachment.ifindex = link.ifindex;
    attachment.mac = link.mac.unwrap_or(attachment.mac);
    plain::configure(build, attachment, &inside).await
}

/// Refuses parents whose frames may be those of the node. The kernel puts a macvlan interface on a macvlan interface on
/// the interface below, whichever that is.
async fn refuse_node_use(kernel: &Kernel, parent: &Link) -> Result<(), DeviceRefusal> {
    if matches!(parent.kind.as_deref(), Some("macvlan" | "macvtap")) {
        return Err(DeviceRefusal::Stacked);
    }
    refuse_uplink(kernel, parent).await
}
