//! Lists the required Debian packages and installs the missing ones.

use std::{path::Path, process::Command};

use anyhow::{Result, bail};

use crate::{
    command::{find, run_logged},
    workspace::is_root,
};

/// The purpose of a package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A compiler that can build core for the BPF target, if none is installed.
    Compiler,
    /// Building bpf-linker.
    Linker,
    /// Linking programs, of Rust and of Go with C.
    Links,
    /// Building runc, one of the programs of a node.
    Runc,
    /// The demonstration.
    Demo,
    /// The tests on the running kernel.
    Test,
    /// The tests on another kernel, in a virtual machine.
    Vm,
    /// Programs for another architecture.
    Cross,
    /// The benchmarks.
    Bench,
    /// Running a real Kubernetes node, also for the tests.
    Node,
    /// A Debian root with nothing else, to try commands in.
    Fresh,
}

/// A Debian package and the reason for it.
pub(crate) struct Package {
    /// Name in the archive.
    pub(crate) name: &'static str,
    /// Its purposes.
    pub(crate) purposes: &'static [Purpose],
    /// The reason, for readers of this table and for error messages.
    pub(crate) reason: &'static str,
}

/// All packages that the commands need.
pub(crate) const PACKAGES: &[Package] = &[
    package("rustc-web", &[Purpose::Compiler], "a rustc with LLVM 22"),
    package(
        "rust-web-src",
        &[Purpose::Compiler],
        "the source of core, which has no BPF build of its own",
    ),
    package(
        "gcc",
        &[Purpose::Linker, Purpose::Links],
        "links bpf-linker, our programs and those of a node's images",
    ),
    package(
        "libc6-dev",
        &[Purpose::Linker, Purpose::Links],
        "links bpf-linker, our programs and those of a node's images",
    ),
    package("llvm-22-dev", &[Purpose::Linker], "bpf-linker is a front end to LLVM"),
    package("libpolly-22-dev", &[Purpose::Linker], "a part of LLVM"),
    package("libzstd-dev", &[Purpose::Linker], "used by LLVM"),
    package("libxml2-dev", &[Purpose::Linker], "used by LLVM"),
    package("zlib1g-dev", &[Purpose::Linker], "used by LLVM"),
    package(
        "iproute2",
        &[Purpose::Demo, Purpose::Test, Purpose::Bench, Purpose::Node],
        "lays out the network around a node",
    ),
    package(
        "nftables",
        &[Purpose::Demo, Purpose::Test, Purpose::Bench, Purpose::Node],
        "shows the rules of the node, and makes the DNAT rules of a foreign proxy",
    ),
    package(
        "libseccomp-dev",
        &[Purpose::Runc],
        "links runc, which runs the containers of a node",
    ),
    package("pkgconf", &[Purpose::Runc], "finds that library"),
    package("strace", &[Purpose::Test], "shows what an agent executes"),
    package(
        "bpftool",
        &[Purpose::Test, Purpose::Demo],
        "a second opinion on maps and programs",
    ),
    package(
        "iputils-ping",
        &[Purpose::Demo],
        "what the demonstration suggests to try",
    ),
    package("qemu-system-x86", &[Purpose::Vm], "boots another kernel"),
    package(
        "busybox-static",
        &[Purpose::Vm, Purpose::Test],
        "the user space of that machine, and the shell of upstream's test images",
    ),
    package("curl", &[Purpose::Test], "a program of upstream's test images"),
    package(
        "netcat-openbsd",
        &[Purpose::Test],
        "a program of upstream's test images",
    ),
    package(
        "bind9-dnsutils",
        &[Purpose::Test],
        "a program of upstream's test images",
    ),
    package("kmod", &[Purpose::Vm], "lists which module needs which"),
    package("xz-utils", &[Purpose::Vm], "unpacks the modules of newer kernels"),
    package(
        "gcc-aarch64-linux-gnu",
        &[Purpose::Cross],
        "links the programs for arm64",
    ),
    package(
        "libc6-dev-arm64-cross",
        &[Purpose::Cross],
        "the C library of the programs for arm64",
    ),
    package("debootstrap", &[Purpose::Fresh], "makes that root"),
    package(
        "containernetworking-plugins",
        &[Purpose::Bench, Purpose::Test],
        "the bridge plugin we compare with, and plugins behind the agent",
    ),
];

const fn package(name: &'static str, purposes: &'static [Purpose], reason: &'static str) -> Package {
    Package { name, purposes, reason }
}

/// The packages for any of `purposes` that are not installed; those for [`Purpose::Compiler`] also if they are.
///
/// A machine without dpkg counts as one that has none of them.
pub(crate) fn missing(purposes: &[Purpose]) -> Vec<&'static Package> {
    let wanted: Vec<_> = PACKAGES
        .iter()
        .filter(|p| p.purposes.iter().any(|p| purposes.contains(p)))
        .collect();
    if wanted.is_empty() {
        return wanted;
    }
    // dpkg-query fails as soon as one name is unknown, but still lists the others.
    let listed = Command::new("dpkg-query")
        .args(["--show", "--showformat", "${Package} ${db:Status-Status}\n"])
        .args(wanted.iter().map(|p| p.name))
        .output()
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    // A compiler package is requested only if the installed compiler is not usable: then it has to be upgraded.
    let is_stale = |p: &Package| p.purposes.contains(&Purpose::Compiler);
    wanted
        .into_iter()
        .filter(|p| is_stale(p) || !is_installed(&listed, p.name))
        .collect()
}

fn is_installed(listed: &str, name: &str) -> bool {
    listed.lines().any(|line| line.strip_suffix(" installed") == Some(name))
}

/// Installs `packages`, with apt's output in the file `log`.
///
/// Fails with the list of names if this user or this system cannot install them. Never removes a package.
pub(crate) fn install(packages: &[&Package], log: &Path) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    if find("apt-get").is_none() {
        bail!(
            "apt-get is not on this machine; install by other means:\n{}",
            listing(packages)
        );
    }
    if !is_root() {
        bail!(
            "only root may install packages; as root run `apt-get install {}`:\n{}",
            names(packages),
            listing(packages)
        );
    }
    run_logged(apt_get().arg("update"), log)?;
    let mut install = apt_get();
    install.args(["install", "--yes", "--no-install-recommends", "--no-remove"]);
    run_logged(install.args(packages.iter().map(|p| p.name)), log)
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    // Another apt may be running just after the machine has started.
    command.args(["-o", "DPkg::Lock::Timeout=300"]);
    command
}

fn names(packages: &[&Package]) -> String {
    packages.iter().map(|p| p.name).collect::<Vec<_>>().join(" ")
}

/// One line per package: its name and its reason.
pub(crate) fn listing(packages: &[&Package]) -> String {
    packages
        .iter()
        .map(|p| format!("  {:28} {}", p.name, p.reason))
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_package_in_state_installed_counts() {
        let listed = "gcc installed\nnftables config-files\nbpftool not-installed\n";
        assert!(is_installed(listed, "gcc"));
        assert!(!is_installed(listed, "nftables"));
        assert!(!is_installed(listed, "bpftool"));
        assert!(!is_installed(listed, "gc"));
    }

    #[test]
    fn no_package_is_listed_twice() {
        for (position, package) in PACKAGES.iter().enumerate() {
            assert!(
                !PACKAGES[..position].iter().any(|p| p.name == package.name),
                "{}",
                package.name
            );
        }
    }
}
