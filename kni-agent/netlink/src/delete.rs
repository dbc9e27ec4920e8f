//! Deletes links, one by one or many at once.

use std::collections::BTreeMap;

use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkAttribute, LinkMessage},
};

use super::{
    Netlink, Result,
    connection::Request,
    link::{Link, LinkKey},
    own::DELETE_GROUP,
};

/// Links in one datagram. Each is acknowledged separately, and a socket of the default size holds 256 acknowledgements.
const BATCH: usize = 128;

impl Netlink {
    /// Deletes the link with that index, and with it the other end of a veth pair, if it still has the expected name;
    /// about 28 ms (p50), mostly grace periods of the kernel. Idempotent: returns whether there was such a link. A link
    /// with another name has reused the index and is not changed.
    pub async fn delete_link(&self, ifindex: u32, expected_name: &str) -> Result<bool> {
        let exists = self
            .get_link(ifindex)
            .await?
            .is_some_and(|link| link.name == expected_name);
        if !exists {
            return Ok(false);
        }
        self.apply(vec![self.delete_request(ifindex, expected_name)])
            .await
            .map(|()| true)
    }

    /// Deletes many links as [`Self::delete_link`] does, in one batch: they join [`DELETE_GROUP`], which is deleted as
    /// a whole, so that the kernel waits for its grace periods once instead of once per link. Measured on Linux 6.18
    /// against single deletions: 2 links 18 ms (65 ms), 10 links 13 ms (265 ms), 50 links 43 ms (1.17 s). While any
    /// other link is in that group, they are deleted one by one. Returns how many there were.
    pub async fn delete_links(&self, links: &[(u32, &str)]) -> Result<usize> {
        let expected: BTreeMap<u32, &str> = links.iter().copied().collect();
        let (ours, others): (Vec<Link>, Vec<Link>) = self
            .list_links()
            .await?
            .into_iter()
            .partition(|link| expected.get(&link.ifindex).is_some_and(|name| *name == link.name));
        // Another program uses the group's number: its link would be deleted with the group.
        let is_shared = others.iter().any(|link| link.group == DELETE_GROUP);
        if is_shared || ours.len() < 2 {
            let mut deleted = 0;
            for link in &ours {
                deleted += usize::from(self.delete_link(link.ifindex, &link.name).await?);
            }
            return Ok(deleted);
        }
        for batch in ours.chunks(BATCH) {
            let mut requests: Vec<Request> = batch.iter().map(|link| self.mark_request(link)).collect();
            let mut group = LinkMessage::default();
            group.attributes.push(LinkAttribute::Group(DELETE_GROUP));
            let place = self.place("delete links");
            requests.push(Request::new(place, RouteNetlinkMessage::DelLink(group), 0).forgive(&[libc::ENODEV]));
            self.apply(requests).await?;
        }
        Ok(ours.len())
    }

    fn mark_request(&self, link: &Link) -> Request {
        let mut message = LinkKey::Index(link.ifindex).message();
        message.attributes.push(LinkAttribute::Group(DELETE_GROUP));
        let place = self.place("mark link for deletion").interface(link.name.as_str());
        Request::new(place, RouteNetlinkMessage::SetLink(message), 0).forgive(&[libc::ENODEV])
    }

    fn delete_request(&self, ifindex: u32, name: &str) -> Request {
        let place = self.place("delete link").interface(name);
        let message = RouteNetlinkMessage::DelLink(LinkKey::Index(ifindex).message());
        Request::new(place, message, 0).forgive(&[libc::ENODEV])
    }
}
