//! Tests the tunnel device and the host's routes to pods of other nodes.

use std::{
    collections::BTreeSet,
    future::{Ready, ready},
    iter,
    net::UdpSocket,
    process::Command,
    thread,
    time::Duration,
};

use super::{on_node, on_node_with_ip};
use crate::{Error, Netlink, RemoteRoute, own::OVERLAY_NAME};

const PORT: u16 = 4789;
const MTU: u32 = 1450;

fn ip(arguments: &str) -> String {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// Whether the device is up; `None` without one.
async fn is_up(node: &Netlink) -> Option<bool> {
    node.get_link(OVERLAY_NAME).await.unwrap().map(|link| link.up)
}

/// Attaches nothing, and checks whether the device is up meanwhile.
async fn attach_while(node: &Netlink, up: bool) -> Result<(), Error> {
    assert_eq!(is_up(node).await, Some(up), "while the programs are attached");
    Ok(())
}

/// A process that another test starts has the sockets of this one for a moment.
fn bound(address: &str) -> UdpSocket {
    let bind = || {
        thread::sleep(Duration::from_millis(5));
        UdpSocket::bind(address).ok()
    };
    iter::repeat_with(bind).take(200).flatten().next().unwrap()
}

fn refuse(node: &Netlink) -> Ready<Result<(), Error>> {
    ready(Err(Error::Foreign {
        place: node.place("attach the programs"),
        reason: "refused".to_owned(),
    }))
}

#[test]
fn the_tunnel_device_is_down_without_its_programs() {
    on_node("the_tunnel_device_is_down_without_its_programs", async || {
        let node = Netlink::new().unwrap();
        let device = node
            .ensure_overlay(PORT, MTU, attach_while(&node, false))
            .await
            .unwrap();
        assert_eq!(is_up(&node).await, Some(true));
        // At the start of another agent nothing is interrupted.
        let again = node.ensure_overlay(PORT, MTU, attach_while(&node, true)).await.unwrap();
        assert_eq!((again, is_up(&node).await), (device, Some(true)));
        node.ensure_overlay(PORT, MTU, refuse(&node)).await.unwrap_err();
        assert_eq!(is_up(&node).await, Some(false), "its programs are in an unknown state");
        // Neither another attempt nor a new device is up before it succeeds.
        node.ensure_overlay(PORT, MTU, refuse(&node)).await.unwrap_err();
        assert_eq!(is_up(&node).await, Some(false));
        node.ensure_overlay(PORT + 1, MTU, refuse(&node)).await.unwrap_err();
        assert_eq!(is_up(&node).await, Some(false), "a new device");
        let later = node.ensure_overlay(PORT + 1, MTU, attach_while(&node, false)).await;
        assert_ne!(later.unwrap(), device, "of another port");
        assert_eq!(is_up(&node).await, Some(true));

        let before = node.find_overlay().await.unwrap();
        for address in ["0.0.0.0:5000", "127.0.0.1:5000", "[::]:5000"] {
            let taken = bound(address);
            let error = node.ensure_overlay(5000, MTU, refuse(&node)).await.unwrap_err();
            assert!(error.to_string().contains("a process has UDP port 5000"), "{error}");
            assert_eq!(node.find_overlay().await.unwrap(), before, "the device of before stays");
            assert_eq!(is_up(&node).await, Some(true));
            drop(taken);
        }
        node.remove_overlay().await.unwrap();
        // Without a device before, it is there and down.
        let taken = bound("0.0.0.0:5000");
        let error = node
            .ensure_overlay(5000, MTU, attach_while(&node, false))
            .await
            .unwrap_err();
        assert!(error.to_string().contains("a process has UDP port 5000"), "{error}");
        assert_eq!(is_up(&node).await, Some(false));
        drop(taken);
        node.ensure_overlay(5000, MTU, attach_while(&node, false))
            .await
            .unwrap();
        assert_eq!(is_up(&node).await, Some(true));
    });
}

#[test]
fn another_device_with_the_port_is_named_and_stays() {
    on_node_with_ip("another_device_with_the_port_is_named_and_stays", async || {
        let node = Netlink::new().unwrap();
        ip("link set lo up");
        ip("address add 192.0.2.1/32 dev lo");
        for (device, kind) in [("flannel.1", "id 1 local 192.0.2.1 nolearning"), ("theirs", "external")] {
            ip(&format!("link add {device} type vxlan {kind} dstport {PORT}"));
            for up in ["down", "up"] {
                ip(&format!("link set {device} {up}"));
                let error = node.ensure_overlay(PORT, MTU, refuse(&node)).await.unwrap_err();
                let named = format!("UDP port {PORT} is that of device {device};");
                assert!(error.to_string().contains(&named), "{error}");
                assert!(error.to_string().contains("--overlay-port"), "{error}");
            }
            assert_eq!(is_up(&node).await, None, "no device of KNI");
            assert_eq!(node.get_link(device).await.unwrap().map(|link| link.up), Some(true));
            // With another port both are there, and a change to the taken one is refused in the same way.
            node.ensure_overlay(PORT + 1, MTU, attach_while(&node, false))
                .await
                .unwrap();
            let error = node.ensure_overlay(PORT, MTU, refuse(&node)).await.unwrap_err();
            assert!(error.to_string().contains(device), "{error}");
            assert!(node.get_link(device).await.unwrap().is_some(), "it is not changed");
            ip(&format!("link delete {device}"));
            node.remove_overlay().await.unwrap();
        }
    });
}

#[test]
fn a_working_device_stays_where_another_one_has_the_new_port() {
    on_node_with_ip(
        "a_working_device_stays_where_another_one_has_the_new_port",
        async || {
            let node = Netlink::new().unwrap();
            let device = node
                .ensure_overlay(PORT + 1, MTU, attach_while(&node, false))
                .await
                .unwrap();
            // The kernel lists it after the device of KNI.
            ip(&format!("link add theirs type vxlan external dstport {PORT}"));
            for _attempt in 0..2 {
                let error = node.ensure_overlay(PORT, MTU, refuse(&node)).await.unwrap_err();
                let named = format!("UDP port {PORT} is that of device theirs;");
                assert!(error.to_string().contains(&named), "{error}");
                assert_eq!(node.find_overlay().await.unwrap(), Some(device));
                assert_eq!(
                    is_up(&node).await,
                    Some(true),
                    "it still serves nodes with the former port"
                );
            }
            ip("link delete theirs");
            node.ensure_overlay(PORT, MTU, attach_while(&node, false))
                .await
                .unwrap();
            assert_ne!(node.find_overlay().await.unwrap(), Some(device));
            assert_eq!(is_up(&node).await, Some(true));
        },
    );
}

#[test]
fn routes_through_the_tunnel_have_the_mtu_of_the_way() {
    on_node_with_ip("routes_through_the_tunnel_have_the_mtu_of_the_way", async || {
        let node = Netlink::new().unwrap();
        ip("link set lo up");
        ip("address add 192.0.2.1/32 dev lo");
        ip("address add 2001:db8::1/128 dev lo nodad");
        let ifindex = node
            .ensure_overlay(PORT, MTU, attach_while(&node, false))
            .await
            .unwrap();
        let route = |destination: &str, source: &str, mtu| RemoteRoute {
            destination: destination.parse().unwrap(),
            ifindex,
            gateway: None,
            source: source.parse().unwrap(),
            mtu,
        };
        // A route of an earlier agent has no MTU.
        for mtu in [0, 1330, MTU, 1430, 0] {
            let desired = BTreeSet::from([
                route("10.0.1.0/26", "192.0.2.1", mtu),
                route("fd00:1::/122", "2001:db8::1", mtu),
            ]);
            for _twice in 0..2 {
                node.ensure_remote_routes(&desired).await.unwrap();
            }
            for (shown, destination) in [
                (ip("route show table 19278"), "10.0.1.0/26"),
                (ip("-6 route show table 19278"), "fd00:1::/122"),
            ] {
                assert_eq!(shown.lines().count(), 1, "{shown}");
                assert!(shown.starts_with(destination), "{shown}");
                let expected = if mtu == 0 {
                    String::new()
                } else {
                    format!(" mtu {mtu} ")
                };
                assert_eq!(shown.contains(" mtu "), mtu > 0, "{shown}");
                assert!(format!("{} ", shown.trim()).contains(&expected), "mtu {mtu}: {shown}");
            }
        }
        node.ensure_remote_routes(&BTreeSet::new()).await.unwrap();
        assert_eq!(ip("route show table 19278") + &ip("-6 route show table 19278"), "");
    });
}
