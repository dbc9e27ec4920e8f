//! Finds the network namespaces of the node by the numbers under which links refer to them.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use kni_netlink::{self as netlink, Netlink, Netns};

/// Where runtimes mount namespaces, in addition to the agent's own folder.
const USUAL: &str = "/run/netns";

/// Every namespace that has a path or a process, by number. Paths with a name take precedence.
pub(super) async fn by_number(netlink: &Netlink, netns_dir: &Path) -> BTreeMap<i32, Netns> {
    let dir = netns_dir.to_owned();
    let opened = tokio::task::spawn_blocking(move || open_all(&dir)).await;
    let mut found = BTreeMap::new();
    for netns in opened.unwrap_or_default() {
        if let Ok(Some(number)) = netlink.netns_id(&netns).await {
            found.entry(number).or_insert(netns);
        }
    }
    found
}

fn open_all(netns_dir: &Path) -> Vec<Netns> {
    let mut seen = BTreeSet::new();
    let mut open = |path: PathBuf| {
        let netns = netlink::netns::open(&path).ok()?;
        seen.insert(netns.id()).then_some(netns)
    };
    let mut found = Vec::new();
    for dir in [netns_dir, Path::new(USUAL)] {
        found.extend(entries(dir).into_iter().filter_map(&mut open));
    }
    let processes = entries(Path::new("/proc")).into_iter();
    let processes = processes.filter(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with(|c: char| c.is_ascii_digit())
    });
    found.extend(processes.filter_map(|process| open(process.join("ns/net"))));
    found
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Vec::new();
    };
    entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
}
