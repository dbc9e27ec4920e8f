//! Tests which messages count as changes of the node's network.

use super::*;

/// A message without attributes: `nlmsghdr` and the fixed header of its kind, of which one word is not zero.
fn message(kind: u16, word: [u8; 4]) -> Vec<u8> {
    let fixed: u8 = match kind {
        libc::RTM_NEWADDR | libc::RTM_DELADDR => 8,
        libc::RTM_NEWROUTE | libc::RTM_DELROUTE | libc::RTM_NEWNEIGH => 12,
        _ => 16,
    };
    let mut bytes = vec![0; 16 + usize::from(fixed)];
    bytes[0] = 16 + fixed;
    bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
    bytes[20..24].copy_from_slice(&word);
    bytes
}

#[test]
fn headers_alone_show_what_is_about_pods() {
    let pods = IFINDEX_BASE.to_ne_bytes();
    let uplink = 2_u32.to_ne_bytes();
    let main = RouteHeader::RT_TABLE_MAIN;
    let cases = [
        (libc::RTM_NEWLINK, pods, true),
        (libc::RTM_DELLINK, pods, true),
        (libc::RTM_NEWLINK, uplink, false),
        (libc::RTM_NEWADDR, pods, true),
        (libc::RTM_DELADDR, uplink, false),
        (libc::RTM_NEWROUTE, [main, ROUTE_PROTOCOL, 0, 0], true),
        (libc::RTM_NEWROUTE, [255, 2, 0, 0], true),
        (libc::RTM_DELROUTE, [main, 2, 0, 0], false),
        (libc::RTM_NEWNEIGH, pods, false),
    ];
    for (kind, word, of_pods) in cases {
        let bytes = message(kind, word);
        assert_eq!(length_if_of_pods(&bytes).is_some(), of_pods, "{kind} {word:?}");
        // What follows is looked at too.
        let both = [message(libc::RTM_NEWLINK, pods), bytes].concat();
        let concerns = !of_pods && kind != libc::RTM_NEWNEIGH;
        assert_eq!(concerns_node(&both), concerns, "{kind} {word:?}");
    }
}

#[test]
fn what_cannot_be_read_counts_as_a_change() {
    let whole = message(libc::RTM_NEWLINK, IFINDEX_BASE.to_ne_bytes());
    for length in 1..whole.len() {
        assert!(concerns_node(&whole[..length]), "{length} bytes");
    }
    for forged in [0_u32, 4, 16, 23, 33, u32::MAX] {
        let mut bytes = whole.clone();
        bytes[..4].copy_from_slice(&forged.to_ne_bytes());
        assert!(concerns_node(&bytes), "length {forged}");
    }
    assert!(!concerns_node(&whole));
}
