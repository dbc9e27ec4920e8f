//! Tests veth pairs: created in place, recognised by a new connection, deleted without effect on others.

use std::{collections::BTreeSet, fs};

use futures::future::join_all;

use super::{Pod, mac, netns_path, on_node, on_node_with_ip, spec};
use crate::{Error, Existing, Netlink, netns, own};

#[test]
fn the_pair_is_as_asked_for() {
    on_node("the_pair_is_as_asked_for", async || {
        let node = Netlink::new().unwrap();
        let pod = Pod::new(&node, 7).await;
        assert_eq!(pod.indexes.host, 1007);
        let host = node.get_link(1007).await.unwrap().unwrap();
        assert_eq!((host.name.as_str(), host.mtu, host.up), ("kni7", 1450, false));
        assert_eq!(host.mac, Some(mac(0x1007)));
        assert_eq!(host.alias.as_deref(), Some("kni:default/pod-7/eth0"));
        assert_eq!(host.peer_ifindex, Some(pod.indexes.pod));
        assert_eq!(host.peer_netnsid, node.netns_id(&pod.netns).await.unwrap());
        assert!(host.peer_netnsid.is_some());
        let inside = pod.inside.get_link("eth0").await.unwrap().unwrap();
        assert_eq!(
            (inside.ifindex, inside.mtu, inside.mac),
            (pod.indexes.pod, 1450, Some(mac(0x2007)))
        );
        assert_eq!(
            node.get_link("eth0").await.unwrap(),
            None,
            "the pod end was never in the node's namespace"
        );

        node.set_up(1007).await.unwrap();
        let early = node.get_link(1007).await.unwrap().unwrap();
        assert!(early.up && !early.operational);
        pod.inside.set_up(pod.indexes.pod).await.unwrap();
        node.wait_for_carrier(1007).await.unwrap();
        let on_node = node.pod_interfaces().await.unwrap();
        let host = on_node.iter().find(|i| i.link.name == "kni7").unwrap();
        assert!(host.link.operational);
        assert_eq!(host.addresses, [], "the host end has no link-local address");
    });
}

#[test]
fn properties_can_be_changed() {
    on_node("properties_can_be_changed", async || {
        let node = Netlink::new().unwrap();
        let pod = Pod::new(&node, 1).await;
        let index = pod.indexes.pod;
        for _twice in 0..2 {
            pod.inside.set_mtu(index, 1300).await.unwrap();
            pod.inside.set_mac(index, mac(9)).await.unwrap();
            pod.inside.set_name(index, &"net1".parse().unwrap()).await.unwrap();
            pod.inside.set_alias(index, "other").await.unwrap();
            pod.inside.set_up(index).await.unwrap();
        }
        let link = pod.inside.get_link("net1").await.unwrap().unwrap();
        assert_eq!(
            (link.mtu, link.mac, link.alias.as_deref(), link.up),
            (1300, Some(mac(9)), Some("other"), true)
        );
        pod.inside.set_down(index).await.unwrap();
        assert!(!pod.inside.get_link(index).await.unwrap().unwrap().up);
        let error = pod.inside.set_mtu(index, 70_000).await.unwrap_err();
        assert_eq!(error.errno(), Some(libc::EINVAL));
        let text = error.to_string();
        assert!(
            text.contains("set MTU") && text.contains("/run/netns/pod1") && text.contains("mtu"),
            "{text}"
        );
    });
}

#[test]
fn what_exists_is_named_and_left_alone() {
    on_node("what_exists_is_named_and_left_alone", async || {
        let node = Netlink::new().unwrap();
        let pod = Pod::new(&node, 1).await;
        let before = node.list_links().await.unwrap();
        let what = |result: crate::Result<_>| match result {
            Err(Error::Exists { what, .. }) => what,
            other => panic!("{other:?}"),
        };
        let same_name = super::VethSpec {
            host_ifindex: Some(2000),
            alias: "kni:thief".to_owned(),
            ..spec(1)
        };
        let existing = what(node.create_veth(&same_name, &pod.netns).await);
        assert_eq!(existing, Existing::HostName("kni1".to_owned()));
        let same_index = super::VethSpec {
            host_ifindex: Some(1001),
            alias: "kni:thief".to_owned(),
            ..spec(2)
        };
        assert_eq!(
            what(node.create_veth(&same_index, &pod.netns).await),
            Existing::IfIndex(1001)
        );
        let same_pod = what(node.create_veth(&spec(3), &pod.netns).await);
        assert_eq!(same_pod, Existing::PodName("eth0".to_owned()));
        assert_eq!(node.list_links().await.unwrap(), before);
    });
}

#[test]
fn only_our_links_are_ours() {
    on_node("only_our_links_are_ours", async || {
        let node = Netlink::new().unwrap();
        let ours = Pod::new(&node, 1).await;
        // Each foreign link has one of the two marks.
        let no_alias = super::VethSpec {
            alias: "something else".to_owned(),
            ..spec(0)
        };
        let no_name = super::VethSpec {
            host_name: "veth0".parse().unwrap(),
            ..spec(3)
        };
        for (foreign, name) in [(no_alias, "x"), (no_name, "y")] {
            let path = netns_path(name);
            netns::create(&path).await.unwrap();
            node.create_veth(&foreign, &netns::open(&path).unwrap()).await.unwrap();
        }
        let fresh = Netlink::new().unwrap();
        let found = fresh.list_our_links().await.unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].ifindex, found[0].name.as_str()), (ours.indexes.host, "kni1"));
        assert_eq!(found[0].peer_netnsid, fresh.netns_id(&ours.netns).await.unwrap());
        assert_eq!(found[0].peer_ifindex, Some(ours.indexes.pod));
        assert!(!own::is_our_link("kni0", None) && !own::is_our_link("veth0", Some("kni:a")));
    });
}

#[test]
fn deletion_is_idempotent_and_checks_the_name() {
    on_node("deletion_is_idempotent_and_checks_the_name", async || {
        let node = Netlink::new().unwrap();
        let pod = Pod::new(&node, 1).await;
        assert!(!node.delete_link(1001, "kni2").await.unwrap());
        assert_eq!(
            node.delete_links(&[(1001, "kni2"), (1, "kni3"), (99, "kni4")])
                .await
                .unwrap(),
            0
        );
        assert!(node.get_link(1001).await.unwrap().is_some());
        assert!(node.delete_link(1001, "kni1").await.unwrap());
        assert!(!node.delete_link(1001, "kni1").await.unwrap());
        assert_eq!(node.get_link(1001).await.unwrap(), None);
        assert_eq!(pod.inside.get_link("eth0").await.unwrap(), None);
    });
}

#[test]
fn a_batch_never_takes_a_stranger_along() {
    on_node_with_ip("a_batch_never_takes_a_stranger_along", async || {
        let node = Netlink::new().unwrap();
        let mut links = Vec::new();
        for number in 1..=3 {
            let pod = Pod::new(&node, number).await;
            links.push((pod.indexes.host, format!("kni{number}")));
        }
        let group = own::DELETE_GROUP.to_string();
        let marked = std::process::Command::new("ip")
            .args(["link", "set", "kni3", "group", &group])
            .status();
        assert!(marked.unwrap().success());
        let two: Vec<(u32, &str)> = links.iter().take(2).map(|(i, n)| (*i, n.as_str())).collect();
        assert_eq!(node.delete_links(&two).await.unwrap(), 2);
        let left = node.list_our_links().await.unwrap();
        assert_eq!(left.iter().map(|link| link.name.as_str()).collect::<Vec<_>>(), ["kni3"]);
        let all: Vec<(u32, &str)> = links.iter().map(|(i, n)| (*i, n.as_str())).collect();
        assert_eq!(node.delete_links(&all).await.unwrap(), 1);
        assert_eq!(node.list_our_links().await.unwrap(), []);
    });
}

#[test]
fn fifty_at_once() {
    on_node("fifty_at_once", async || {
        let node = Netlink::new().unwrap();
        let before = node.list_links().await.unwrap();
        let pods = join_all((0..50).map(|number| Pod::new(&node, number))).await;
        let hosts: BTreeSet<u32> = pods.iter().map(|pod| pod.indexes.host).collect();
        assert_eq!(hosts, (1000..1050).collect());
        join_all(pods.iter().map(async |pod| {
            node.set_up(pod.indexes.host).await.unwrap();
            pod.inside.configure_pod(&pod.config()).await.unwrap();
            // Concurrent listings on the same connection.
            assert_eq!(node.list_our_links().await.unwrap().len(), 50);
        }))
        .await;
        let names: Vec<(u32, &str)> = pods
            .iter()
            .map(|p| (p.indexes.host, p.spec.host_name.as_str()))
            .collect();
        assert_eq!(node.delete_links(&names).await.unwrap(), 50);
        for number in 0..50 {
            assert!(netns::remove(&netns_path(&format!("pod{number}"))).await.unwrap());
        }
        assert_eq!(node.list_links().await.unwrap(), before);
        assert_eq!(fs::read_dir("/run/netns").unwrap().count(), 0);
    });
}
