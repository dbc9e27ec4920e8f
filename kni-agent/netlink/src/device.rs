//! Moves interfaces of the node into pods, with an alias by which a new process moves them back.

use std::os::fd::{AsFd, AsRawFd};

use kni_model::{IfName, provider::MovedDevice};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkAttribute, LinkFlags, LinkMessage},
};

use super::{Netlink, Netns, Result, connection::Request, error::Error, link::Link};

/// Prefix of the alias of a moved device; its original settings follow.
const PREFIX: &str = "kni-lent";
/// Longest alias: less than `IFALIASZ` (256) bytes with its final zero.
const MAX_ALIAS: usize = 254;

/// The alias with the original settings of a device. The kernel keeps it with the device in every namespace, also when
/// the device returns to the node because a namespace ended.
pub fn moved_device_alias(moved: &MovedDevice) -> String {
    let MovedDevice {
        device,
        mac,
        mtu,
        up,
        alias,
        physical: _,
    } = moved;
    let state = if *up { "up" } else { "down" };
    let own = alias.as_deref().unwrap_or_default();
    let text = format!("{PREFIX} {device} {mac} {mtu} {state} {own}");
    let kept = text.chars().scan(0, |bytes, c| {
        *bytes += c.len_utf8();
        (*bytes <= MAX_ALIAS).then_some(c)
    });
    kept.collect::<String>().trim_end().to_owned()
}

/// The original settings of a moved device; none for other links.
pub fn moved_device_from_alias(link: &Link) -> Option<MovedDevice> {
    let mut words = link.alias.as_deref()?.splitn(6, ' ');
    if words.next() != Some(PREFIX) {
        return None;
    }
    Some(MovedDevice {
        device: words.next()?.parse().ok()?,
        mac: words.next()?.parse().ok()?,
        mtu: words.next()?.parse().ok()?,
        up: words.next()? == "up",
        alias: words.next().map(str::to_owned),
        physical: link.kind.is_none(),
    })
}

impl Netlink {
    /// Moves a link of this connection's namespace, under another name, into `netns`; it is down then and has lost its
    /// addresses. [`Error::Refused`] with EEXIST if the name is taken there: the link may have moved without its name.
    ///
    /// Completes even if the returned future is dropped.
    pub async fn move_link(&self, ifindex: u32, name: &IfName, netns: &Netns) -> Result<()> {
        let place = self
            .place(format!("move link into {} as {name}", netns.path().display()))
            .interface(format!("#{ifindex}"));
        let (netlink, name, netns, of_task) = (self.clone(), name.clone(), netns.clone(), place.clone());
        // The message holds the number of a descriptor: the task keeps that open until the kernel has read it.
        let task = tokio::spawn(async move {
            let mut down = LinkMessage::default();
            down.header.index = ifindex;
            down.header.change_mask = LinkFlags::Up;
            let mut away = LinkMessage::default();
            away.header.index = ifindex;
            away.attributes = vec![
                LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd()),
                LinkAttribute::IfName(name.to_string()),
            ];
            let set = |message| Request::new(of_task.clone(), RouteNetlinkMessage::SetLink(message), 0);
            netlink.apply(vec![set(down), set(away)]).await
        });
        task.await.map_err(|_ended| Error::Ended {
            place,
            what: "the task",
        })?
    }

    /// Restores the settings of a device that is back on the node; the alias last, as it marks an unfinished restore.
    pub async fn restore_moved_device(&self, ifindex: u32, moved: &MovedDevice) -> Result<()> {
        self.set_mtu(ifindex, moved.mtu).await?;
        self.set_mac(ifindex, moved.mac).await?;
        if moved.up {
            self.set_up(ifindex).await?;
        } else {
            self.set_down(ifindex).await?;
        }
        self.set_alias(ifindex, moved.alias.as_deref().unwrap_or_default())
            .await
    }

    /// The moved devices in this connection's namespace.
    pub async fn list_moved_devices(&self) -> Result<Vec<(Link, MovedDevice)>> {
        let links = self.list_links().await?.into_iter();
        Ok(links
            .filter_map(|link| moved_device_from_alias(&link).map(|moved| (link, moved)))
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alias_has_the_settings_of_the_device() {
        for alias in [None, Some("port 7 of rack 2".to_owned())] {
            let moved = MovedDevice {
                device: "enp3s0f1".parse().unwrap(),
                mac: "02:00:00:00:00:07".parse().unwrap(),
                mtu: 9000,
                up: alias.is_some(),
                alias,
                physical: true,
            };
            let mut link = link();
            link.alias = Some(moved_device_alias(&moved));
            assert_eq!(moved_device_from_alias(&link), Some(moved.clone()));
            let long = MovedDevice {
                alias: Some("é".repeat(200)),
                ..moved
            };
            assert!(moved_device_alias(&long).len() <= MAX_ALIAS);
        }
        for other in [None, Some("kni:a/b eth0".to_owned()), Some("kni-lent".to_owned())] {
            let mut link = link();
            link.alias = other;
            assert_eq!(moved_device_from_alias(&link), None);
        }
    }

    fn link() -> Link {
        Link {
            ifindex: 7,
            name: "net1".to_owned(),
            mtu: 1500,
            ..Link::default()
        }
    }
}
