//! Executes the Go tests of the kubelet with KNI: our own, and upstream's of the packages that have additions.

use anyhow::{Context as _, Result, ensure};
use kni_integration::{long, machine, require};

/// Our own package, and the table of feature gates.
const ALWAYS: [&str; 2] = ["k8s.io/kubernetes/pkg/kubelet/kni", "k8s.io/kubernetes/pkg/features"];
/// Packages whose tests take minutes to compile.
const LONG: [&str; 2] = [
    "k8s.io/kubernetes/pkg/kubelet/apis/config/...",
    "k8s.io/kubernetes/cmd/kubelet/app/options",
];

#[test]
fn packages_with_additions_pass_their_tests() -> Result<()> {
    require!(machine);
    let mut packages = ALWAYS.to_vec();
    if long() {
        packages.extend(LONG);
    }
    let done = machine::kni_tests(&packages)?.output().context("run go test")?;
    let said = String::from_utf8_lossy(&done.stdout);
    println!("{said}");
    ensure!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
    ensure!(
        said.lines().filter(|line| line.starts_with("ok")).count() >= ALWAYS.len(),
        "{said}"
    );
    Ok(())
}
