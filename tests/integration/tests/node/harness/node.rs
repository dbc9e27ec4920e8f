use std::{fs, process::Stdio};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Namespaces, Node, NodeSnapshot, eventually_sync, node, patience, require, traffic};
use kni_local_node::Fabric;

#[test]
fn a_node_is_not_visible_on_the_machine() -> Result<()> {
    require!(root, netns, ip, nft, tc, bpftool);
    let machine = Namespaces::current("machine")?;
    let mark = "kni-harness-mark";
    let test_node = Node::new("isolated")?;
    test_node.ip(&[
        "link add kniharness0 type veth peer name kniharness1",
        "rule add pref 31999 table 31999",
    ])?;
    test_node.nft("table inet kni_harness {\n chain c {\n }\n }\n")?;
    test_node.enter(|| {
        fs::create_dir_all("/run/netns")?;
        [format!("/run/{mark}"), format!("/tmp/{mark}")]
            .iter()
            .try_for_each(|path| fs::write(path, ""))?;
        fs::create_dir(format!("/sys/fs/bpf/{mark}"))
    })??;

    // Compared by name, because other programs may change the machine in the meantime.
    let seen = NodeSnapshot::take(&machine)?;
    for (kind, name) in [
        ("link", "kniharness0"),
        ("link", "uplink0"),
        ("rule", "31999"),
        ("nft", "kni_harness"),
    ] {
        assert!(
            !seen.section(kind).iter().any(|line| line.contains(name)),
            "{kind} {name} is on the machine"
        );
        let inside = NodeSnapshot::take(&test_node)?;
        assert!(
            inside.section(kind).iter().any(|line| line.contains(name)),
            "{kind} {name} is not in the node"
        );
    }
    for path in [
        format!("/run/{mark}"),
        format!("/tmp/{mark}"),
        format!("/sys/fs/bpf/{mark}"),
    ] {
        assert!(test_node.enter(|| fs::exists(&path))??, "{path} is not in the node");
        assert!(!fs::exists(&path)?, "{path} is on the machine");
    }
    let links = test_node.enter(|| fs::read_dir("/sys/class/net").map(Iterator::count))??;
    let names = test_node.run("ip", &["-o", "link"])?;
    assert_eq!(links, names.lines().count(), "sysfs shows another namespace");
    Ok(())
}

#[test]
fn a_node_reaches_the_fabric_and_has_a_way_out() -> Result<()> {
    require!(root, netns, ip);
    let test_node = Node::new("uplinked")?;
    let servers = traffic::Servers::start(test_node.fabric(), "outside", 8080)?;
    for address in [node::FABRIC_V4, node::FABRIC_V6] {
        let answer = traffic::tcp_get(&test_node, address.parse()?, 8080, patience())?;
        assert_eq!(answer.identity, servers.identity());
        let own = if answer.client.is_ipv4() {
            node::NODE_V4
        } else {
            node::NODE_V6
        };
        assert_eq!(answer.client.ip().to_string(), own);
    }
    let routes = NodeSnapshot::take(&test_node)?.section("route").join("\n");
    assert!(routes.contains(&format!("default via {}", node::FABRIC_V4)), "{routes}");
    assert!(routes.contains(&format!("default via {}", node::FABRIC_V6)), "{routes}");
    Ok(())
}

#[test]
fn nodes_have_the_network_settings_of_kubernetes() -> Result<()> {
    require!(root, netns, ip);
    let fabric = Fabric::new("set")?;
    for test_node in [
        Node::new("set")?,
        Node::whole("set-whole")?,
        Node::on(&fabric, "set-on", 11)?,
        Node::whole_on(&fabric, "set-whole-on", 12)?,
    ] {
        let read = |setting: &str| -> Result<Option<String>> {
            let file = format!("/proc/sys/net/{setting}");
            let text = test_node.enter(|| fs::exists(&file)?.then(|| fs::read_to_string(&file)).transpose())?;
            Ok(text.with_context(|| file.clone())?.map(|text| text.trim().to_owned()))
        };
        for (setting, wanted) in node::NETWORK_SETTINGS {
            match read(setting)? {
                Some(value) => assert_eq!(value, wanted, "{setting} of {}", test_node.name()),
                None => assert!(setting.starts_with("bridge/"), "no {setting}"),
            }
        }
        // Links inherit them, the uplink and later ones.
        test_node.ip(&["link add later0 type veth peer name later1"])?;
        for link in ["uplink0", "later0"] {
            for (setting, wanted) in [
                (format!("ipv4/conf/{link}/forwarding"), "1"),
                (format!("ipv6/conf/{link}/forwarding"), "1"),
                (format!("ipv4/conf/{link}/rp_filter"), "2"),
            ] {
                assert_eq!(
                    read(&setting)?.as_deref(),
                    Some(wanted),
                    "{setting} of {}",
                    test_node.name()
                );
            }
        }
    }
    Ok(())
}

#[test]
fn a_dropped_node_is_gone() -> Result<()> {
    require!(root, netns, ip);
    let test_node = Node::new("short-lived")?;
    // The inode number identifies a namespace: a process in it would still show it.
    let inode = test_node.enter(|| fs::read_link("/proc/thread-self/ns/net"))??;
    let mut inside = test_node.command("sleep").arg("60").stdout(Stdio::null()).spawn()?;
    let of_child = format!("/proc/{}/ns/net", inside.id());
    let entered = eventually_sync(patience(), || {
        ensure!(fs::read_link(&of_child)? == inode, "a command does not run in the node");
        Ok(())
    });
    inside.kill()?;
    inside.wait()?;
    entered?;
    drop(test_node);
    let held = |folder: &str| -> Result<bool> {
        let entries = fs::read_dir(folder).with_context(|| folder.to_owned())?;
        Ok(entries
            .flatten()
            .any(|entry| fs::read_link(entry.path()).is_ok_and(|target| target == inode)))
    };
    eventually_sync(patience(), || {
        ensure!(!held("/proc/self/fd")?, "the namespace is still held open");
        Ok(())
    })
}

#[test]
fn a_missing_need_skips_and_a_present_one_does_not() {
    assert!(kni_integration::privilege::require("self-test", &["sh"]).is_some());
    if std::env::var_os("KNI_REQUIRE").is_none() {
        let permit = kni_integration::privilege::require("self-test", &["no-such-program-anywhere"]);
        assert!(permit.is_none());
    }
    let name = {
        fn here() {}
        kni_integration::privilege::test_name(&here)
    };
    assert_eq!(name, "harness::node::a_missing_need_skips_and_a_present_one_does_not");
}
