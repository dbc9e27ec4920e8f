//! Watches the node's links, its tunnel device included, addresses and routes for changes, except those of pods.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "rtnetlink is open-ended: other messages are skipped"
)]

use std::io;

use kni_common::IFINDEX_BASE;
use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_route::{RouteNetlinkMessage, link::LinkMessage, route::RouteHeader};
use netlink_sys::{AsyncSocket as _, AsyncSocketExt as _, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE};
use tokio::sync::watch;

use super::{
    Netlink, Result,
    error::Place,
    own::{OVERLAY_NAME, ROUTE_PROTOCOL, is_our_link},
};

/// `RTNLGRP_*` (linux/rtnetlink.h) as bits: links, addresses and routes of both families.
const GROUPS: u32 = 1 | 1 << 4 | 1 << 6 | 1 << 8 | 1 << 10;

/// A burst of pods causes hundreds of messages at once; lost ones count as a change.
const RECEIVE_BUFFER: usize = 1 << 20;

/// Receives notifications of changes.
#[derive(Debug)]
pub struct Changes(watch::Receiver<u64>);

impl Changes {
    /// Waits for changes since the last call, or since the beginning. Stays pending after the watch has ended, which
    /// happens only when the process ends.
    pub async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Netlink {
    /// Watches the namespace of the calling thread.
    pub fn watch() -> Result<Changes> {
        let place = || Place::new("watch links, addresses and routes");
        let driver = Self::driver().map_err(|error| place().refused(error))?;
        let _in_driver = driver.enter();
        let socket = open().map_err(|error| place().refused(error))?;
        let (sender, changes) = watch::channel(0);
        driver.spawn(forward(socket, sender));
        Ok(Changes(changes))
    }
}

fn open() -> io::Result<TokioSocket> {
    let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
    socket.socket_mut().bind(&SocketAddr::new(0, GROUPS))?;
    socket.socket_ref().set_rx_buf_sz(RECEIVE_BUFFER)?;
    Ok(socket)
}

async fn forward(socket: TokioSocket, sender: watch::Sender<u64>) {
    loop {
        let matters = match socket.recv_from_full().await {
            Ok((bytes, _)) => concerns_node(&bytes),
            // ENOBUFS: messages were lost.
            Err(error) => {
                tracing::debug!(%error, "lost changes of the node's network");
                true
            }
        };
        if matters {
            sender.send_modify(|count| *count = count.wrapping_add(1));
        }
        if sender.is_closed() {
            return;
        }
    }
}

/// Whether a datagram has a message about anything but interfaces of pods. Others that cannot be read count.
fn concerns_node(mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        if let Some(length) = length_if_of_pods(bytes) {
            bytes = bytes.get(length..).unwrap_or_default();
            continue;
        }
        let Ok(message) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes) else {
            return true;
        };
        let length = usize::try_from(message.header.length).unwrap_or(usize::MAX);
        if matches_node(&message.payload) {
            return true;
        }
        // Messages begin at multiples of four.
        bytes = bytes.get(length.next_multiple_of(4).max(16)..).unwrap_or_default();
    }
    false
}

/// The length of the first message, padding included, if its fixed headers alone (`nlmsghdr`, `ifinfomsg`, `ifaddrmsg`,
/// `rtmsg`) show that it is about an interface of a pod, a route of the agent, or a route of another table than the
/// main one: addresses cover the local table. Each attach causes about ten of them, and decoding their attributes took
/// 6 % of the agent's CPU time.
fn length_if_of_pods(bytes: &[u8]) -> Option<usize> {
    let word = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let length = usize::try_from(word(0)?).ok()?;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let of_pods = match kind {
        libc::RTM_NEWLINK | libc::RTM_DELLINK | libc::RTM_NEWADDR | libc::RTM_DELADDR => word(20)? >= IFINDEX_BASE,
        libc::RTM_NEWROUTE | libc::RTM_DELROUTE => {
            *bytes.get(20)? != RouteHeader::RT_TABLE_MAIN || *bytes.get(21)? == ROUTE_PROTOCOL
        }
        _ => false,
    };
    // Messages begin at multiples of four.
    (of_pods && (24..=bytes.len()).contains(&length)).then_some(length.next_multiple_of(4))
}

/// Whether a message that [`length_if_of_pods`] has let through concerns the node.
fn matches_node(payload: &NetlinkPayload<RouteNetlinkMessage>) -> bool {
    let NetlinkPayload::InnerMessage(message) = payload else {
        return true;
    };
    match message {
        RouteNetlinkMessage::NewLink(link) | RouteNetlinkMessage::DelLink(link) => !is_pods(link),
        RouteNetlinkMessage::NewAddress(_)
        | RouteNetlinkMessage::DelAddress(_)
        | RouteNetlinkMessage::NewRoute(_)
        | RouteNetlinkMessage::DelRoute(_) => true,
        _ => false,
    }
}

fn is_pods(link: &LinkMessage) -> bool {
    use netlink_packet_route::link::LinkAttribute;

    let (mut name, mut alias) = (None, None);
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::IfName(found) => name = Some(found.as_str()),
            LinkAttribute::IfAlias(found) => alias = Some(found.as_str()),
            _ => {}
        }
    }
    // The tunnel device concerns the node: other programs may set it down or remove it.
    name.is_some_and(|name| name != OVERLAY_NAME && is_our_link(name, alias))
}

#[cfg(test)]
mod tests;
