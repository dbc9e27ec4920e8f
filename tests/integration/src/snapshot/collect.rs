//! Collects the state of a node: netlink state with `ip`, `tc`, `nft` and `bpftool`, the rest from files.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::namespaces::Namespaces;

/// Folders of node-wide sysctls.
const SYSCTLS: [&str; 5] = [
    "/proc/sys/net/ipv4/conf/all",
    "/proc/sys/net/ipv4/conf/default",
    "/proc/sys/net/ipv6/conf/all",
    "/proc/sys/net/ipv6/conf/default",
    "/proc/sys/net/ipv4",
];
/// Files and folders that an agent may create.
const FILES: [&str; 3] = ["/run/kni", "/tmp/kni.sock", "/run/netns"];
const MOUNTS: [&str; 4] = ["/run/netns", "/var/run/netns", "/run/kni", "/sys/fs/bpf"];

pub(super) fn node(ns: &Namespaces) -> Result<BTreeMap<&'static str, Vec<String>>> {
    let files = ns.enter(|| {
        let trees = FILES.iter().flat_map(|root| tree(Path::new(root)));
        // The file of a namespace is a mount on an empty file; both are listed.
        (
            trees.collect::<Vec<_>>(),
            tree(Path::new("/sys/fs/bpf")),
            mounts(),
            sysctls(),
        )
    })?;
    let mut sections = BTreeMap::from([
        ("link", links(ns)?),
        ("address", addresses(ns)?),
        (
            "route",
            [
                lines(ns, "ip", "-4 route show table all")?,
                lines(ns, "ip", "-6 route show table all")?,
            ]
            .concat(),
        ),
        (
            "rule",
            [lines(ns, "ip", "-4 rule show")?, lines(ns, "ip", "-6 rule show")?].concat(),
        ),
        ("neighbour", neighbours(ns)?),
        ("qdisc", qdiscs(ns)?),
        ("program", attached_programs(ns)?),
        ("nft", nft(&ns.run("nft", &["--stateless", "list", "ruleset"])?)),
        ("file", files.0),
        ("bpffs", files.1),
        ("mount", files.2?),
        ("sysctl", files.3),
    ]);
    for section in sections.values_mut() {
        section.sort_unstable();
    }
    Ok(sections)
}

/// Programs, maps and links by name and kind, without ids.
pub(super) fn bpf_objects(ns: &Namespaces) -> Result<Vec<String>> {
    let mut objects = Vec::new();
    for kind in ["prog", "map", "link"] {
        let listed = ns.run("bpftool", &["-j", kind, "show"])?;
        let listed: Value = if listed.trim().is_empty() {
            Value::Null
        } else {
            serde_json::from_str(&listed)?
        };
        for object in items(&listed) {
            let fields = ["type", "name", "bytes_key", "bytes_value", "max_entries", "attach_type"];
            objects.push(format!("{kind} {}", pick(object, &fields)));
        }
    }
    objects.sort_unstable();
    Ok(objects)
}

fn links(ns: &Namespaces) -> Result<Vec<String>> {
    let listed = json(ns, "ip", "-j -d link show")?;
    let fields = [
        "ifname",
        "link_type",
        "mtu",
        "address",
        "ifalias",
        "master",
        "group",
        "qdisc",
    ];
    Ok(items(&listed)
        .map(|link| format!("{} {}", pick(link, &fields), steady_flags(link)))
        .collect())
}

fn addresses(ns: &Namespaces) -> Result<Vec<String>> {
    let listed = json(ns, "ip", "-j address show")?;
    let mut lines = Vec::new();
    for link in items(&listed) {
        for address in items(&link["addr_info"]) {
            lines.push(format!(
                "{} {}",
                pick(link, &["ifname"]),
                pick(address, &["local", "prefixlen", "scope"])
            ));
        }
    }
    Ok(lines)
}

fn neighbours(ns: &Namespaces) -> Result<Vec<String>> {
    Ok([
        lines(ns, "ip", "neighbour show nud permanent")?,
        lines(ns, "ip", "neighbour show proxy")?,
    ]
    .concat())
}

fn qdiscs(ns: &Namespaces) -> Result<Vec<String>> {
    // The kernel increments handles automatically.
    let listed = json(ns, "tc", "-j qdisc show")?;
    Ok(items(&listed)
        .map(|qdisc| pick(qdisc, &["dev", "kind", "parent"]))
        .collect())
}

fn attached_programs(ns: &Namespaces) -> Result<Vec<String>> {
    let listed = json(ns, "bpftool", "-j net show")?;
    let mut lines = Vec::new();
    for group in items(&listed) {
        for (hook, programs) in group.as_object().into_iter().flatten() {
            lines.extend(items(programs).map(|p| format!("{hook} {}", pick(p, &["devname", "kind", "name"]))));
        }
    }
    Ok(lines)
}

/// Each rule with its table and chain, so that equal rules in different chains differ.
fn nft(ruleset: &str) -> Vec<String> {
    let (mut around, mut rules) = (Vec::new(), Vec::new());
    for line in ruleset.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if line == "}" {
            around.pop();
            continue;
        }
        rules.push(around.iter().chain([&line]).copied().collect::<Vec<_>>().join(" "));
        if line.ends_with('{') {
            around.push(line);
        }
    }
    rules
}

fn tree(root: &Path) -> Vec<String> {
    let Ok(kind) = fs::symlink_metadata(root) else {
        return Vec::new();
    };
    let mut found = vec![root.display().to_string()];
    if kind.is_dir() {
        let entries = fs::read_dir(root).into_iter().flatten().flatten();
        found.extend(entries.flat_map(|entry| tree(&entry.path())));
    }
    found
}

fn mounts() -> Result<Vec<String>> {
    let listed = fs::read_to_string("/proc/thread-self/mountinfo")?;
    let ours = listed.lines().filter_map(|line| {
        let (at, kind) = (line.split(' ').nth(4)?, line.split(" - ").nth(1)?.split(' ').next()?);
        MOUNTS
            .iter()
            .any(|root| Path::new(at).starts_with(root))
            .then(|| format!("{at} {kind}"))
    });
    Ok(ours.collect())
}

/// Unreadable sysctls (an unset `stable_secret`) are omitted consistently.
fn sysctls() -> Vec<String> {
    let mut found = Vec::new();
    for folder in SYSCTLS {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if let Ok(value) = fs::read_to_string(entry.path()) {
                found.push(format!("{} = {}", entry.path().display(), value.trim()));
            }
        }
    }
    found
}

fn lines(ns: &Namespaces, program: &str, args: &str) -> Result<Vec<String>> {
    let text = ns.run(program, &args.split(' ').collect::<Vec<_>>())?;
    let kept = text.lines().map(|line| {
        // The lifetimes of learned routes count down.
        let mut words = line.split_whitespace();
        let mut steady = Vec::new();
        while let Some(word) = words.next() {
            if word == "expires" {
                words.next();
            } else {
                steady.push(word);
            }
        }
        steady.join(" ")
    });
    Ok(kept.collect())
}

fn json(ns: &Namespaces, program: &str, args: &str) -> Result<Value> {
    let text = ns.run(program, &args.split(' ').collect::<Vec<_>>())?;
    serde_json::from_str(&text).with_context(|| format!("{program} {args}: {text}"))
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn pick(value: &Value, fields: &[&str]) -> String {
    let text = |field: &&str| match &value[*field] {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    };
    fields.iter().filter_map(text).collect::<Vec<_>>().join(" ")
}

/// Configured flags, without those that depend on the state of the other end.
fn steady_flags(link: &Value) -> String {
    let flags = items(&link["flags"]).filter_map(Value::as_str);
    flags
        .filter(|flag| ["UP", "PROMISC", "NOARP", "ALLMULTI"].contains(flag))
        .collect::<Vec<_>>()
        .join(",")
}
