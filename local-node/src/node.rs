//! Creates the namespaces, mounts and the uplink of a node.

use std::{
    fs::{self, File},
    ops::Deref,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

pub use crate::fabric::{FABRIC_V4, FABRIC_V6};
use crate::{
    fabric::{Fabric, Uplink},
    hidden::{OF_RUNTIME, OWN},
    namespaces::Namespaces,
};

/// Uplink address of a node on a fabric of its own.
pub const NODE_V4: &str = "198.51.100.2";
/// See [`NODE_V4`].
pub const NODE_V6: &str = "2001:db8:100::2";

/// Where control groups are mounted.
const CGROUPS: &str = "/sys/fs/cgroup";

/// A node with network and mount namespaces of its own: fresh `/sys`, bpffs, `/run` and `/tmp`, and a link `uplink0`
/// to a fabric namespace, with addresses and default routes. Derefs to its [`Namespaces`].
///
/// It is not visible on the machine, and disappears with the value, the clones of its namespaces and the processes
/// inside.
#[derive(Debug)]
pub struct Node {
    inside: Namespaces,
    fabric: Namespaces,
    v4: String,
    v6: String,
}

impl Node {
    /// Makes a node. `name` appears in messages only.
    pub fn new(name: &str) -> Result<Self> {
        Self::alone(name, Namespaces::fresh(name, mount_own)?)
    }

    /// Makes a node like [`Self::new`] on a shared fabric: its addresses end in `number`, which is unique there.
    pub fn on(fabric: &Fabric, name: &str, number: u8) -> Result<Self> {
        Self::beside(fabric, Namespaces::fresh(name, mount_own)?, number)
    }

    /// Makes a node like [`Self::whole`] on a shared fabric; see [`Self::on`].
    pub fn whole_on(fabric: &Fabric, name: &str, number: u8) -> Result<Self> {
        Self::beside(fabric, Namespaces::fresh(name, mount_all)?, number)
    }

    /// Makes a node for a container runtime and a kubelet: in addition to [`Self::new`], it has the machine's control
    /// groups, its own `/var/lib` and `/var/log`, and settings of the machine that a kubelet cannot change.
    pub fn whole(name: &str) -> Result<Self> {
        Self::alone(name, Namespaces::fresh(name, mount_all)?)
    }

    fn alone(name: &str, inside: Namespaces) -> Result<Self> {
        let fabric = Namespaces::fresh_net(&format!("{name}-fabric"))?;
        inside.ip(&["link set lo up"])?;
        inside.veth("uplink0", &fabric, "fabric0")?;
        fabric.add_address("fabric0", &format!("{FABRIC_V4}/24"))?;
        fabric.add_address("fabric0", &format!("{FABRIC_V6}/64"))?;
        let uplink = Uplink {
            addresses: [NODE_V4.into(), NODE_V6.into()],
            gateways: [FABRIC_V4.into(), FABRIC_V6.into()],
        };
        Self::addressed(inside, fabric, uplink)
    }

    fn beside(fabric: &Fabric, inside: Namespaces, number: u8) -> Result<Self> {
        inside.ip(&["link set lo up"])?;
        let uplink = fabric.plug(&inside, "uplink0", number)?;
        Self::addressed(inside, fabric.inside().clone(), uplink)
    }

    fn addressed(inside: Namespaces, fabric: Namespaces, uplink: Uplink) -> Result<Self> {
        let [v4, v6] = uplink.addresses;
        inside.add_address("uplink0", &format!("{v4}/24"))?;
        inside.add_address("uplink0", &format!("{v6}/64"))?;
        let routes = uplink
            .gateways
            .map(|gateway| format!("route add default via {gateway}"));
        inside.ip(&routes.each_ref().map(String::as_str))?;
        Ok(Self { inside, fabric, v4, v6 })
    }

    /// The node's addresses on its uplink, IPv4 first.
    pub fn addresses(&self) -> [&str; 2] {
        [&self.v4, &self.v6]
    }

    /// Makes the node forward packets of both families, as every Kubernetes node does.
    pub fn forward(&self) -> Result<()> {
        self.set_forwarding(true)
    }

    /// The other end of the uplink: an external host at the node's default gateways.
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
    /// A path at which `program` can be executed inside. A program that the node's own mounts hide, such as one below
    /// the machine's `/tmp`, is copied.
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

/// Settings of the whole machine that a kubelet would change at its start, with the values that it wants.
const KUBELET_SYSCTLS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// Mounts the file systems of [`mount_own`] and those that a container runtime and a kubelet need.
fn mount_all() -> Result<()> {
    // The new /sys hides them, but not from an open descriptor.
    let cgroups = File::open(CGROUPS).context("control groups of this machine")?;
    mount_own()?;
    let none = None::<&str>;
    let source = format!("/proc/self/fd/{}", cgroups.as_raw_fd());
    mount(
        Some(source.as_str()),
        CGROUPS,
        none,
        MsFlags::MS_BIND | MsFlags::MS_REC,
        none,
    )
    .context("bind the control groups")?;
    mount_kinds(&OF_RUNTIME)?;
    // As the init process of a real node does, so that containers see namespaces that are mounted later.
    mount(none, "/run", none, MsFlags::MS_SHARED, none).context("share /run")?;
    cover_sysctls()?;
    show_proc()
}

/// Mounts a second procfs without covers. The kernel lets a container in a user namespace mount a procfs only if its
/// runtime sees one of which nothing is hidden, wherever that is.
fn show_proc() -> Result<()> {
    let whole = Path::new("/run/proc");
    fs::create_dir(whole).with_context(|| format!("create {}", whole.display()))?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), whole, Some("proc"), flags, None::<&str>).with_context(|| format!("mount {}", whole.display()))
}

/// Hides settings of the machine from the kubelet, which finds the values that it wants and changes nothing.
fn cover_sysctls() -> Result<()> {
    let folder = Path::new("/run/sysctls");
    fs::create_dir(folder).with_context(|| format!("create {}", folder.display()))?;
    for (name, value) in KUBELET_SYSCTLS {
        let setting = Path::new("/proc/sys").join(name);
        if !setting.exists() {
            continue;
        }
        let cover = folder.join(name.replace('/', "."));
        fs::write(&cover, format!("{value}\n")).with_context(|| format!("write {}", cover.display()))?;
        let none = None::<&str>;
        mount(Some(&cover), &setting, none, MsFlags::MS_BIND, none)
            .with_context(|| format!("cover {}", setting.display()))?;
    }
    Ok(())
}

fn mount_own() -> Result<()> {
    let none = None::<&str>;
    // Before anything else, or the mounts below would appear on the machine.
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).context("make mounts private")?;
    unmount_below("/run/")?;
    // A sysfs shows the network namespace in which it was mounted.
    mount_kinds(&OWN)
}

fn mount_kinds(all: &[(&str, &str)]) -> Result<()> {
    for (kind, at) in all {
        let what = Some(*kind);
        mount(what, *at, what, MsFlags::empty(), None::<&str>).with_context(|| format!("mount {kind} on {at}"))?;
    }
    Ok(())
}

/// Removes the mounts in a folder of the machine from the node. A mount over the folder would hide them, and still a
/// container runtime would find them in the list of mounts: it looks there for how a pod's path is mounted.
fn unmount_below(folder: &str) -> Result<()> {
    let list = fs::read_to_string("/proc/thread-self/mountinfo").context("list of mounts")?;
    let mut there: Vec<&str> = mount_points(&list).filter(|at| at.starts_with(folder)).collect();
    // The inner ones first.
    there.reverse();
    for at in there {
        umount2(at, MntFlags::MNT_DETACH).with_context(|| format!("unmount {at}"))?;
    }
    Ok(())
}

/// The mount points in the kernel's list, in the order in which they were mounted.
fn mount_points(list: &str) -> impl Iterator<Item = &str> {
    // 36 35 98:0 /root /mnt/point rw,noatime master:1 - ext3 /dev/root rw
    list.lines().filter_map(|line| line.split(' ').nth(4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_read_from_the_list() {
        let list = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
                    31 27 0:4 net:[4026532209] /run/netns/a rw shared:9 - nsfs nsfs rw\n";
        assert_eq!(mount_points(list).collect::<Vec<_>>(), ["/", "/run/netns/a"]);
    }
}
