use std::{fs, thread, time::Duration};

use anyhow::Result;
use kni_integration::{Node, NodeSnapshot, patience, require};
use nix::mount::{MsFlags, mount, umount};

/// The changes of [`leave`], by the prefixes of the lines that show them.
const CHANGES: [&str; 15] = [
    "+ link left0",
    "+ address left0 203.0.113.1 32",
    "+ address left0 2001:db8:1::1 128",
    "+ route 203.0.113.2 dev left0 table 77",
    "+ rule 77:",
    "+ neighbour 203.0.113.2 dev left0",
    "+ qdisc uplink0 clsact",
    "+ nft table ip left { chain c { counter",
    "+ file /run/netns/left",
    "+ file /run/kni/left.redb",
    "+ mount /run/netns/left nsfs",
    "+ bpffs /sys/fs/bpf/left",
    "- sysctl /proc/sys/net/ipv4/ip_forward = 1",
    "+ sysctl /proc/sys/net/ipv4/ip_forward = 0",
    "+ sysctl /proc/sys/net/ipv6/conf/all/forwarding = 0",
];

fn leave(node: &Node) -> Result<()> {
    node.ip(&[
        "link add left0 type veth peer name left1",
        "link set left0 up",
        "link set left0 alias pod",
        "address add 203.0.113.1/32 dev left0",
        "address add 2001:db8:1::1/128 dev left0 nodad",
        "route add 203.0.113.2 dev left0 table 77",
        "neighbour add 203.0.113.2 lladdr 02:00:00:00:00:09 dev left0 nud permanent",
    ])?;
    node.run("ip", &["-6", "rule", "add", "pref", "77", "table", "77"])?;
    node.run("tc", &["qdisc", "add", "dev", "uplink0", "clsact"])?;
    node.nft("table ip left {\n chain c {\n counter accept\n }\n }\n")?;
    node.enter(|| -> Result<()> {
        fs::create_dir_all("/run/netns")?;
        fs::create_dir_all("/run/kni")?;
        fs::write("/run/netns/left", "")?;
        fs::write("/run/kni/left.redb", "")?;
        let net = Some("/proc/thread-self/ns/net");
        mount(net, "/run/netns/left", None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        fs::create_dir("/sys/fs/bpf/left")?;
        fs::write("/proc/sys/net/ipv4/ip_forward", "0")?;
        fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "0")?;
        Ok(())
    })?
}

/// Reverts [`leave`], except for the link and its dependent state.
fn tidy(node: &Node) -> Result<()> {
    node.enter(|| -> Result<()> {
        umount("/run/netns/left")?;
        fs::remove_dir_all("/run/netns")?;
        fs::remove_dir_all("/run/kni")?;
        fs::remove_dir("/sys/fs/bpf/left")?;
        fs::write("/proc/sys/net/ipv4/ip_forward", "1")?;
        fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1")?;
        Ok(())
    })??;
    node.run("tc", &["qdisc", "del", "dev", "uplink0", "clsact"])?;
    node.nft("delete table ip left")?;
    node.run("ip", &["-6", "rule", "del", "pref", "77"]).map(drop)
}

#[test]
fn a_snapshot_sees_what_an_agent_could_leave() -> Result<()> {
    require!(root, netns, ip, nft, tc, bpftool);
    let node = Node::new("changed")?;
    let before = NodeSnapshot::take(&node)?;
    leave(&node)?;
    let differences = before.differences_within(&node, Duration::ZERO)?;
    for expected in CHANGES {
        assert!(
            differences.iter().any(|line| line.starts_with(expected)),
            "no {expected} in {differences:#?}"
        );
    }
    tidy(&node)?;
    let differences = before.differences_within(&node, Duration::ZERO)?;
    assert!(
        differences.iter().any(|line| line.starts_with("+ link left0")),
        "{differences:#?}"
    );
    // A delayed removal counts as a removal.
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(300));
            node.ip(&["link del left0"]).expect("the link is there");
        });
        before.assert_unchanged(&node, patience());
    });
    Ok(())
}
