//! Makes macvlan interfaces: pods on the link of an interface of the node.

use kni_model::{Attachment, provider::Macvlan};
use kni_netlink::{self as netlink, MacvlanSpec};

use super::{context::Build, plain};
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
