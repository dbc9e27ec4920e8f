//! A test node: namespaces, mounts and an uplink of its own, so that an agent finds what a machine gives it.

use std::{
    fs,
    ops::Deref,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use nix::mount::{MsFlags, mount};

use crate::namespaces::Namespaces;

/// The node's addresses on its uplink.
pub const NODE_V4: &str = "198.51.100.2";
/// See [`NODE_V4`].
pub const NODE_V6: &str = "2001:db8:100::2";
/// The address of the fabric's end of the uplink: the node's default gateway.
pub const FABRIC_V4: &str = "198.51.100.1";
/// See [`FABRIC_V4`].
pub const FABRIC_V6: &str = "2001:db8:100::1";

/// A node with network and mount namespaces of its own: fresh `/sys`, bpffs, `/run` and `/tmp`, and a link `uplink0`
/// to a fabric namespace, with addresses and default routes. Derefs to its [`Namespaces`].
///
/// Nothing of it is visible on the machine. It is gone when the value, its clones of namespaces and the processes
/// inside are gone.
#[derive(Debug)]
pub struct Node {
    inside: Namespaces,
    fabric: Namespaces,
}

impl Node {
    /// Makes a node. `name` appears in messages only.
    pub fn new(name: &str) -> Result<Self> {
        let inside = Namespaces::fresh(name, mount_own)?;
        let fabric = Namespaces::fresh_net(&format!("{name}-fabric"))?;
        inside.ip(&["link set lo up"])?;
        inside.veth("uplink0", &fabric, "fabric0")?;
        fabric.add_address("fabric0", &format!("{FABRIC_V4}/24"))?;
        fabric.add_address("fabric0", &format!("{FABRIC_V6}/64"))?;
        inside.add_address("uplink0", &format!("{NODE_V4}/24"))?;
        inside.add_address("uplink0", &format!("{NODE_V6}/64"))?;
        inside.ip(&[
            &format!("route add default via {FABRIC_V4}"),
            &format!("route add default via {FABRIC_V6}"),
        ])?;
        Ok(Self { inside, fabric })
    }

    /// What is at the other end of the uplink: an outside host at [`FABRIC_V4`] and [`FABRIC_V6`].
    pub fn fabric(&self) -> &Namespaces {
        &self.fabric
    }
}

impl Deref for Node {
    type Target = Namespaces;

    fn deref(&self) -> &Namespaces {
        &self.inside
    }
}

impl Namespaces {
    /// A path at which `program` can be executed inside: the node's `/tmp` and `/run` hide what the machine has there,
    /// so a program from there is copied in.
    pub fn install(&self, program: &Path) -> Result<PathBuf> {
        if self.enter(|| program.exists())? {
            return Ok(program.to_owned());
        }
        let bytes = fs::read(program).with_context(|| program.display().to_string())?;
        let inner = Path::new("/run/bin").join(program.file_name().context("program has no name")?);
        self.enter(|| {
            fs::create_dir_all("/run/bin")?;
            fs::write(&inner, bytes)?;
            fs::set_permissions(&inner, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        })?
        .with_context(|| format!("copy {} into {}", program.display(), self.name()))?;
        Ok(inner)
    }
}

fn mount_own() -> Result<()> {
    let none = None::<&str>;
    // Before anything else, or the mounts below would appear on the machine.
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).context("make mounts private")?;
    // A sysfs shows the network namespace of who mounted it.
    for (kind, at) in [
        ("sysfs", "/sys"),
        ("bpf", "/sys/fs/bpf"),
        ("tmpfs", "/run"),
        ("tmpfs", "/tmp"),
    ] {
        mount(Some(kind), at, Some(kind), MsFlags::empty(), none).with_context(|| format!("mount {kind} on {at}"))?;
    }
    Ok(())
}
