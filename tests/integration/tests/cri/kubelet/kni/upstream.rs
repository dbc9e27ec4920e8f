//! Executes the Go tests of kubelet and containerd with KNI: our own, and upstream's of the packages that have
//! additions.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use kni_integration::{long, machine, require};

/// Our own package, and the table of feature gates.
const ALWAYS: [&str; 2] = ["k8s.io/kubernetes/pkg/kubelet/kni", "k8s.io/kubernetes/pkg/features"];
/// Packages whose tests take minutes to compile.
const LONG: [&str; 3] = [
    "k8s.io/kubernetes/pkg/kubelet/apis/config/...",
    "k8s.io/kubernetes/cmd/kubelet/app",
    "k8s.io/kubernetes/cmd/kubelet/app/options",
];
/// The packages of containerd that have additions; the first two have tests of ours.
const CONTAINERD: [&str; 3] = [
    "github.com/containerd/containerd/v2/internal/cri/server",
    "github.com/containerd/containerd/v2/pkg/netns",
    "github.com/containerd/containerd/v2/internal/cri/config",
];
/// Our own tests of containerd.
const OWN: &str = "^(TestNamespacesOfOthersAreRefused|TestTheFolderOfNamespacesIsNoLink|TestNamespacesOfOthersStay)$";

/// One after the other: both write the files that make Go see the additions.
#[test]
fn packages_with_additions_pass_their_tests() -> Result<()> {
    require!(root, machine, unshare);
    let mut packages = ALWAYS.to_vec();
    if long() {
        packages.extend(LONG);
    }
    pass(&packages, packages.len())?;
    // What a killed test leaves mounted goes with it.
    let mut arguments = vec!["-exec", "unshare --mount"];
    if !long() {
        arguments.extend(["-run", OWN]);
        arguments.extend(&CONTAINERD[..2]);
        return pass(&arguments, 2);
    }
    // It expects a namespace that containerd gives only with cgroup v2.
    if !Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        arguments.extend(["-skip", "^TestCgroupNamespace$"]);
    }
    arguments.extend(CONTAINERD);
    pass(&arguments, CONTAINERD.len())
}

/// All packages pass, and so many have tests.
fn pass(arguments: &[&str], tested: usize) -> Result<()> {
    let done = machine::kni_tests(arguments)?.output().context("run go test")?;
    let said = String::from_utf8_lossy(&done.stdout);
    println!("{said}");
    ensure!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
    let passed = said
        .lines()
        .filter(|line| line.starts_with("ok") && !line.contains("no tests to run"));
    ensure!(passed.count() >= tested, "{said}");
    Ok(())
}
