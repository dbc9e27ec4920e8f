//! Macvlan interfaces: pods on the link of an interface of the node.

use kni_model::{Attachment, provider::Macvlan};
use kni_netlink as netlink;
use kni_netlink::{MacvlanSpec, Netns};

use super::{Subject, failed};
use crate::{AttachError, Inner};

impl Inner {
    pub(super) async fn make_macvlan(
        &self,
        macvlan: &Macvlan,
        attachment: &mut Attachment,
        netns: &Netns,
        metric: u32,
        subject: &Subject,
    ) -> Result<(), AttachError> {
        let parent = self
            .netlink
            .get_link(&macvlan.parent)
            .await
            .map_err(subject.failed("looking for the parent"))?
            .ok_or_else(|| {
                let reason = format!("parent {} does not exist on the node", macvlan.parent);
                failed(subject, attachment, reason, true)
            })?;
        if netlink::own::is_our_link(&parent.name, parent.alias.as_deref()) {
            let reason = format!("parent {} is a pod's interface", macvlan.parent);
            return Err(failed(subject, attachment, reason, false));
        }
        if attachment.mtu > parent.mtu {
            let reason = format!(
                "spec.mtu {} is above the {} of parent {}",
                attachment.mtu, parent.mtu, parent.name
            );
            return Err(failed(subject, attachment, reason, false));
        }
        let spec = MacvlanSpec {
            parent: parent.ifindex,
            name: attachment.ifname.clone(),
            mac: attachment.mac,
            mtu: attachment.mtu,
            mode: macvlan.mode,
        };
        self.netlink
            .create_macvlan(&spec, netns)
            .await
            .map_err(subject.failed("creating the macvlan interface"))?;
        let inside = self.enter(netns, subject).await?;
        let link = inside
            .get_link(&attachment.ifname)
            .await
            .map_err(subject.failed("reading the macvlan interface"))?
            .ok_or_else(|| failed(subject, attachment, "the interface is gone again".to_owned(), true))?;
        attachment.ifindex = link.ifindex;
        attachment.mac = link.mac.unwrap_or(attachment.mac);
        self.configure_plain(attachment, &inside, metric, subject).await
    }
}
