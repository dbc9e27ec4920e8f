//! Sends packets from other nodes and from outside into the namespace of a pod.

use aya_ebpf::programs::TcContext;
use kni_common::{Direction, Verdict};

use crate::{
    action::{DROP, redirect_peer},
    count, endpoint,
    neighbour::mac_words,
    skb::{self, EthHeader},
};

/// Writes the MAC addresses that the pod expects and sends the packet into its namespace.
#[inline(always)]
pub fn deliver(ctx: &TcContext, destination: u32) -> i32 {
    let length = ctx.len();
    // Both existed a moment ago, and neither goes away while the program runs.
    let (Some(row), Some(eth)) = (endpoint::row(destination), skb::at::<EthHeader>(ctx, 0)) else {
        return DROP;
    };
    // SAFETY: `at` proved that the header lies in the packet.
    let eth = unsafe { &mut *eth };
    eth.destination = mac_words(&row.to_pod.destination);
    eth.source = mac_words(&row.to_pod.source);
    if endpoint::is_shaped(row) {
        return endpoint::redirect_through_host_end(ctx, endpoint::ifindex(destination));
    }
    count::forwarded(destination, Direction::ToPod, Verdict::Redirected, length);
    redirect_peer(endpoint::ifindex(destination))
}
