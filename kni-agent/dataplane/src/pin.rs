//! Owns the pins: their paths, and the comparison of pinned maps with the layout that this agent expects.
//!
//! ```text
//! ROOT/v3/ENDPOINTS ...            maps of layout 3, bpftool shows their field names
//! ROOT/v3/node_connect4            cgroup link of a program of the node's own sockets, likewise node_sendmsg6 ...
//! ROOT/v3/of-117                   empty folder: their first rows came from those of map 117 of the layout before
//! ROOT/v3-new                      the same maps until they have these rows
//! ROOT/records                     copy of the agent's records, of no layout
//! ROOT/links/5-from_pod            TCX link of endpoint 5, TC ingress of its host interface
//! ROOT/links/5-to_pod              likewise, TC egress
//! ROOT/links/5-xdp_pod             XDP link of its host interface, where its network enables XDP
//! ROOT/links/uplink-from_uplink    TCX link of the uplink; the XDP link's name ends with its mode
//! ```

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use aya::maps::{MapInfo, MapType};
use kni_common::{
    Direction,
    layout::{LAYOUT_VERSION, MapKind, MapSpec},
};
use kni_model::EndpointId;
use nix::{
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};

use super::{DataplaneError, program::XDP_POD};

const BPFFS: &str = "/sys/fs/bpf";

/// Maps whose rows name endpoints by generation.
const REMEMBER_GENERATIONS: [&str; 6] = [
    "ADDRESSES",
    "FLOWS4",
    "FLOWS6",
    "HOST_PORTS",
    "NODE_PORTS",
    "NODE_PEERS",
];

/// The folders of the pins.
#[derive(Debug, Clone)]
pub(super) struct Pins {
    maps: PathBuf,
    links: PathBuf,
}

impl Pins {
    /// Creates the folders (root only); mounts bpffs where it is missing.
    pub(super) fn prepare(root: &Path) -> Result<Self, DataplaneError> {
        mount_bpffs(root)?;
        let pins = Self {
            maps: root.join(format!("v{LAYOUT_VERSION}")),
            links: root.join("links"),
        };
        for dir in [&pins.maps, &pins.links] {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(dir)
                .map_err(DataplaneError::pin(dir, "creating the folder"))?;
        }
        Ok(pins)
    }

    /// The same folders for maps that are not in use yet. Removes what an agent that was killed left there.
    pub(super) fn staged(&self) -> Result<Self, DataplaneError> {
        self.remove_staged()?;
        let maps = Self::fresh(&self.maps);
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&maps)
            .map_err(DataplaneError::pin(&maps, "creating the folder"))?;
        Ok(Self {
            maps,
            links: self.links.clone(),
        })
    }

    /// Removes staged maps. Idempotent.
    pub(super) fn remove_staged(&self) -> Result<(), DataplaneError> {
        let maps = Self::fresh(&self.maps);
        if maps.exists() { remove_tree(&maps) } else { Ok(()) }
    }

    /// Puts staged maps in the place of these, at once: an agent that is killed leaves either all of their rows or
    /// none.
    pub(super) fn replace_by(&self, staged: &Self) -> Result<(), DataplaneError> {
        if self.maps.exists() {
            remove_tree(&self.maps)?;
        }
        fs::rename(&staged.maps, &self.maps).map_err(DataplaneError::pin(&self.maps, "putting the maps in place"))
    }

    /// The folder of the maps of another layout.
    pub(super) fn other_layout(&self, version: u32) -> PathBuf {
        self.maps.with_file_name(format!("v{version}"))
    }

    /// Records the kernel's id of the map whose rows these maps continue.
    pub(super) fn record_origin(&self, map_id: u32) -> Result<(), DataplaneError> {
        let path = self.origin(map_id);
        fs::create_dir(&path).map_err(DataplaneError::pin(&path, "creating the folder"))
    }

    /// Whether these maps continue the rows of the map.
    pub(super) fn has_origin(&self, map_id: u32) -> bool {
        self.origin(map_id).is_dir()
    }

    fn origin(&self, map_id: u32) -> PathBuf {
        self.maps.join(format!("of-{map_id}"))
    }

    /// Removes every record of an origin.
    fn remove_origins(&self) -> Result<(), DataplaneError> {
        let entries = fs::read_dir(&self.maps).map_err(DataplaneError::pin(&self.maps, "listing"))?;
        for path in entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()) {
            fs::remove_dir(&path).map_err(DataplaneError::pin(&path, "removing the folder"))?;
        }
        Ok(())
    }

    pub(super) fn maps_dir(&self) -> PathBuf {
        self.maps.clone()
    }

    pub(super) fn map(&self, name: &str) -> PathBuf {
        self.maps.join(name)
    }

    pub(super) fn link(&self, endpoint: EndpointId, direction: Direction) -> PathBuf {
        self.links.join(format!("{endpoint}-{}", direction.as_str()))
    }

    /// Link of the XDP program at an endpoint's host interface.
    pub(super) fn xdp_link(&self, endpoint: EndpointId) -> PathBuf {
        self.links.join(format!("{endpoint}-{XDP_POD}"))
    }

    /// Link of a program at the tunnel device.
    pub(super) fn link_of_device(&self, what: &str) -> PathBuf {
        self.links.join(what)
    }

    /// Link of a program at the uplink.
    pub(super) fn uplink_link(&self, what: &str) -> PathBuf {
        self.links.join(format!("uplink-{what}"))
    }

    /// Link of a program of the node's own sockets. Beside the maps: an agent of another layout, which removes these,
    /// detaches the program with them.
    pub(super) fn socket_link(&self, program: &str) -> PathBuf {
        self.maps.join(program)
    }

    /// Compares every pinned map with its specification. One that differs is unpinned with a warning, so that loading
    /// creates a new one: its rows are restored from the agent's state, its flows are evaluated again.
    pub(super) fn check_maps(&self, specs: &[MapSpec]) -> Result<(), DataplaneError> {
        for spec in specs {
            let path = self.map(spec.name);
            if !path.exists() {
                continue;
            }
            let differences = match MapInfo::from_pin(&path) {
                Ok(info) => compare(spec, &info),
                Err(error) => vec![format!("not a map: {error}")],
            };
            if !differences.is_empty() {
                replace(spec.name, &path, &differences.join(", "))?;
            }
        }
        // A new table of endpoints counts generations from the start: rows with old ones would become valid again.
        if !self.map("ENDPOINTS").exists() {
            for name in REMEMBER_GENERATIONS {
                let path = self.map(name);
                if path.exists() {
                    replace(name, &path, "ENDPOINTS is new")?;
                }
            }
        }
        Ok(())
    }

    /// The links of an endpoint, whether they exist or not.
    pub(super) fn links(&self, endpoint: EndpointId) -> [PathBuf; 3] {
        [
            self.link(endpoint, Direction::FromPod),
            self.link(endpoint, Direction::ToPod),
            self.xdp_link(endpoint),
        ]
    }

    pub(super) fn remove_links(&self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        self.links(endpoint).iter().try_for_each(|path| Self::remove_link(path))
    }

    /// Path of a new link's pin until it replaces another one. bpffs accepts no names with a dot.
    pub(super) fn fresh(path: &Path) -> PathBuf {
        let mut name = path.as_os_str().to_owned();
        name.push("-new");
        PathBuf::from(name)
    }

    /// Unpins a link. Idempotent.
    pub(super) fn remove_link(path: &Path) -> Result<(), DataplaneError> {
        for path in [&Self::fresh(path), path] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(DataplaneError::pin(path, "unpinning")(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    pub(super) fn remove_other_layouts(&self) -> Result<(), DataplaneError> {
        let Some(root) = self.maps.parent() else { return Ok(()) };
        for entry in fs::read_dir(root)
            .map_err(DataplaneError::pin(root, "listing"))?
            .flatten()
        {
            let path = entry.path();
            let name = entry.file_name();
            let version = name
                .to_str()
                .and_then(|name| name.strip_prefix('v'))
                .and_then(|v| v.parse::<u32>().ok());
            if version.is_some_and(|version| version != LAYOUT_VERSION) {
                tracing::info!(path = %path.display(), "removing the maps of another layout");
                remove_tree(&path)?;
            }
        }
        self.remove_origins()
    }

    pub(super) fn linked_endpoints(&self) -> Result<Vec<EndpointId>, DataplaneError> {
        let entries = fs::read_dir(&self.links).map_err(DataplaneError::pin(&self.links, "listing"))?;
        let mut endpoints: Vec<EndpointId> = entries
            .filter_map(|entry| {
                entry
                    .ok()?
                    .file_name()
                    .to_str()?
                    .split_once('-')?
                    .0
                    .parse()
                    .ok()
                    .map(EndpointId)
            })
            .collect();
        endpoints.sort_unstable();
        endpoints.dedup();
        Ok(endpoints)
    }
}

fn replace(map: &str, path: &Path, differences: &str) -> Result<(), DataplaneError> {
    tracing::warn!(map, differences, "replacing a pinned map");
    fs::remove_file(path).map_err(DataplaneError::pin(path, "removing a map of another layout"))
}

fn compare(spec: &MapSpec, info: &MapInfo) -> Vec<String> {
    let kind = match spec.kind {
        MapKind::Array => MapType::Array,
        MapKind::PerCpuArray => MapType::PerCpuArray,
        MapKind::Hash => MapType::Hash,
        MapKind::PerCpuHash => MapType::PerCpuHash,
        MapKind::LruHash => MapType::LruHash,
        MapKind::LpmTrie => MapType::LpmTrie,
        MapKind::RingBuf => MapType::RingBuf,
    };
    let mut differences = Vec::new();
    if info.map_type().ok() != Some(kind) {
        differences.push(format!("kind is not {:?}", spec.kind));
    }
    for (what, found, expected) in [
        ("key size", info.key_size(), spec.key_size),
        ("value size", info.value_size(), spec.value_size),
        ("capacity", info.max_entries(), spec.max_entries),
    ] {
        if found != expected {
            differences.push(format!("{what} {found}, expected {expected}"));
        }
    }
    differences
}

fn mount_bpffs(root: &Path) -> Result<(), DataplaneError> {
    if on_bpffs(root) {
        return Ok(());
    }
    if !root.starts_with(BPFFS) {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "not on a BPF file system");
        return Err(DataplaneError::pin(root, "checking the file system")(source));
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("bpffs"), BPFFS, Some("bpf"), flags, Some("mode=700"))
        .map_err(|errno| DataplaneError::pin(Path::new(BPFFS), "mounting bpffs")(errno.into()))?;
    tracing::info!(path = BPFFS, "mounted bpffs");
    Ok(())
}

/// Whether the nearest existing ancestor lies on bpffs.
fn on_bpffs(path: &Path) -> bool {
    path.ancestors()
        .find(|dir| dir.exists())
        .and_then(|dir| statfs(dir).ok())
        .is_some_and(|stat| stat.filesystem_type() == BPF_FS_MAGIC)
}

/// Removes `root` and everything below it. Does nothing outside bpffs.
pub(super) fn remove_all(root: &Path) -> Result<(), DataplaneError> {
    if !root.exists() || !on_bpffs(root) {
        return Ok(());
    }
    remove_tree(root)
}

fn remove_tree(dir: &Path) -> Result<(), DataplaneError> {
    let device = fs::symlink_metadata(dir)
        .map_err(DataplaneError::pin(dir, "reading its attributes"))?
        .dev();
    for entry in fs::read_dir(dir)
        .map_err(DataplaneError::pin(dir, "listing"))?
        .flatten()
    {
        let path = entry.path();
        let meta = fs::symlink_metadata(&path).map_err(DataplaneError::pin(&path, "reading its attributes"))?;
        if meta.is_dir() && meta.dev() == device {
            remove_tree(&path)?;
        } else {
            fs::remove_file(&path).map_err(DataplaneError::pin(&path, "unpinning"))?;
        }
    }
    fs::remove_dir(dir).map_err(DataplaneError::pin(dir, "removing the folder"))
}
