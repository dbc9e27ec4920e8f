//! Checks isolation on a machine with only a kernel: loads all programs, attaches them with the available hook, and
//! proves with real packets that networks with the same addresses are isolated.
//!
//! Prints `KNI-VM: PASS`, or `KNI-VM: FAIL` with the reason. It changes network namespaces and pins of its machine: run
//! it in a virtual machine or in separate namespaces.

mod checks;
mod pods;

use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use aya::util::KernelVersion;
use kni_dataplane as dataplane;
use kni_dataplane::{Dataplane, DataplaneOptions, EventStream, Hook, HookChoice, NodeConfig};
use kni_integration::{Namespaces, programs};

use self::pods::Pods;

fn main() -> ExitCode {
    match run() {
        Ok(()) => {
            println!("KNI-VM: PASS");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("KNI-VM: FAIL {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    let _reactor = runtime.enter();
    let node = Namespaces::current("node")?;
    let options = DataplaneOptions {
        hook: HookChoice::Auto,
        ..programs::options(4096)?
    };
    let opened = open(&options)?;
    let mut pods = Pods::new(node);
    let result = runtime
        .block_on(pods.start(&opened.0))
        .and_then(|()| check(&runtime, &options, opened, &pods));
    let cleaned = runtime.block_on(pods.remove());
    let unpinned = dataplane::remove_pins(&options.root);
    result?;
    cleaned?;
    Ok(unpinned?)
}

/// Loads every program through the verifier of this kernel; the selected hook must be the best one that the kernel
/// supports.
fn open(options: &DataplaneOptions) -> Result<(Dataplane, EventStream)> {
    let opened = Dataplane::open(options)?;
    opened.0.configure(&NodeConfig::default())?;
    let has_tcx = KernelVersion::current()? >= KernelVersion::new(6, 6, 0);
    let (hook, expected) = (opened.0.hook(), if has_tcx { Hook::Tcx } else { Hook::Clsact });
    println!("programs are loaded, hook {}", hook.as_str());
    ensure!(
        hook == expected,
        "the hook is {}, not {}",
        hook.as_str(),
        expected.as_str()
    );
    Ok(opened)
}

fn check(
    runtime: &tokio::runtime::Runtime,
    options: &DataplaneOptions,
    opened: (Dataplane, EventStream),
    pods: &Pods,
) -> Result<()> {
    checks::attached(&opened.0, pods)?;
    checks::isolation(pods)?;
    checks::fast_path(pods)?;
    checks::spoofing(&opened.0, pods)?;
    checks::every_packet_is_counted(&opened.0, pods)?;
    drop(opened);
    checks::isolation(pods).context("while no agent runs")?;
    let (dataplane, _events) = open(options).context("opening again")?;
    runtime.block_on(pods.adopt(&dataplane))?;
    checks::attached(&dataplane, pods).context("after adoption")?;
    checks::isolation(pods).context("after adoption")?;
    checks::spoofing(&dataplane, pods).context("after adoption")?;
    checks::withdrawn(&dataplane, pods)
}
