//! Lists the filters of the clsact qdisc, by which KNI's programs run where the kernel has no links for them.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "rtnetlink is open-ended: other messages are skipped"
)]

use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    tc::{TcHandle, TcMessage},
};

use super::{Netlink, Result, connection::Request};

/// The classes of the clsact qdisc (`TC_H_MIN_INGRESS`, `TC_H_MIN_EGRESS`).
const CLASSES: [TcHandle; 2] = [
    TcHandle {
        major: 0xffff,
        minor: 0xfff2,
    },
    TcHandle {
        major: 0xffff,
        minor: 0xfff3,
    },
];

impl Netlink {
    /// Whether an interface has a filter of that priority in both directions.
    pub async fn has_filters(&self, ifindex: u32, priority: u16) -> Result<bool> {
        for class in CLASSES {
            let mut filter = TcMessage::default();
            filter.header.family = AddressFamily::Unspec;
            filter.header.index = i32::try_from(ifindex).unwrap_or_default();
            filter.header.parent = class;
            let place = self.place("list filters").interface(format!("#{ifindex}"));
            let request = Request::new(place, RouteNetlinkMessage::GetTrafficFilter(filter), 0).forgive(&[
                libc::ENODEV,
                libc::EINVAL,
                libc::EOPNOTSUPP,
            ]);
            let answers = self.dump(request).await?;
            // Priority and protocol share a word.
            let found = answers.into_iter().any(|answer| match answer {
                RouteNetlinkMessage::NewTrafficFilter(found) => found.header.info >> 16 == u32::from(priority),
                _ => false,
            });
            if !found {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
