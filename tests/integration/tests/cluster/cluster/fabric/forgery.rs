//! Builds forged packets of the tunnel, sends many of them, and checks that each is dropped for its reason.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    cluster::{
        Member, patience,
        wire::{Wire, ip_packet, tunnelled},
    },
    frames::{Ip, Link, Payload},
    long,
    programs::hex,
    traffic::Servers,
    wait,
};
use kni_proto::runtime::ListDropsRequest;

use super::{super::scene::PORT, bed::Bed};

/// Packets of each kind.
pub(super) fn count() -> u32 {
    if long() { 100_000 } else { 2000 }
}

/// The content by which a forged datagram is recognised.
const FORGED: &[u8] = b"00000000-forged";

/// The content of a tunnel's datagram with a forged packet inside.
pub(super) fn forged(number: u32, from: IpAddr, to: IpAddr) -> Vec<u8> {
    in_tunnel(number, &Ip::new(from, to).packet(&Payload::udp(999, PORT, FORGED)))
}

/// The content of a tunnel's datagram with a packet inside.
pub(super) fn in_tunnel(number: u32, packet: &[u8]) -> Vec<u8> {
    let [_, a, b, c] = number.to_be_bytes();
    let frame = Link::new([2, 0, 0, 0, 9, 9], [2, 0, 0, 0, 9, 8]).frame(packet);
    [&[8, 0, 0, 0, a, b, c, 0], &frame[..]].concat()
}

/// Packets that a node has dropped, by the program and the reason.
pub(super) async fn all_dropped(member: &Member) -> Result<BTreeMap<(String, String), u64>> {
    let request = ListDropsRequest::default();
    let listed = member.kubelet.kni().runtime().list_drops(request).await?;
    let mut sums = BTreeMap::new();
    for drop in listed.into_inner().drops {
        let packets = drop.count.map_or(0, |count| count.packets);
        *sums.entry((drop.direction, drop.reason)).or_default() += packets;
    }
    Ok(sums)
}

pub(super) async fn dropped(member: &Member, direction: &str, reason: &str) -> Result<u64> {
    let all = all_dropped(member).await?;
    let found = all.get(&(direction.to_owned(), reason.to_owned()));
    Ok(found.copied().unwrap_or_default())
}

/// Sends forged packets, and checks that exactly so many were dropped for the reason and that no server received one.
pub(super) async fn refused(
    (bed, what): (&Bed, &str),
    (member, direction, reason): (&Member, &str, &str),
    send: impl Fn(u32) -> Result<()>,
) -> Result<()> {
    let before = dropped(member, direction, reason).await?;
    let seen: usize = bed.servers.iter().map(Servers::seen).sum();
    for number in 0..count() {
        send(number).with_context(|| what.to_owned())?;
    }
    let expected = before + u64::from(count());
    wait::until(
        &format!("{what}: {} are dropped as {reason}", count()),
        patience(),
        async || {
            let found = dropped(member, direction, reason).await?;
            ensure!(found <= expected, "{found} of at most {expected}");
            ensure!(found == expected, "{} of {}", found - before, count());
            Ok(true)
        },
    )
    .await
    .with_context(|| bed.state())?;
    let now: usize = bed.servers.iter().map(Servers::seen).sum();
    ensure!(now == seen, "{what}: {} packets were delivered", now - seen);
    println!("{what}: {} sent, 0 delivered, {reason} at {direction}", count());
    Ok(())
}

/// No packet on the wire has the content of a forged one.
pub(super) fn nothing_forged_is_on(wire: &Wire) -> Result<()> {
    for frame in wire.frames()? {
        let datagram = ip_packet(&frame).and_then(|(_, _, protocol, payload)| match protocol {
            17 => Some(payload),
            // A routing header.
            43 => payload.get((usize::from(*payload.get(1)?) + 1) * 8..),
            _ => None,
        });
        if let Some((_, inner)) = datagram.and_then(tunnelled) {
            let is_forged = inner.windows(FORGED.len()).any(|part| part == FORGED);
            ensure!(!is_forged, "a forged packet left the node: {}", hex(&frame));
        }
    }
    Ok(())
}
