//! Checks the dataplane on a machine with only a kernel: loads all programs and reports what the verifier counted,
//! attaches them at each hook that the kernel has, and proves with real packets that networks with the same addresses
//! are isolated, and that policy, services, egress and VLANs work.
//!
//! Prints `KNI-VM: PASS`, or `KNI-VM: FAIL` with the reason. It changes network namespaces and pins of its machine: run
//! it in a virtual machine or in separate namespaces.

mod checks;
mod pods;
mod tables;
mod uplink;

use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use aya::util::KernelVersion;
use kni_dataplane as dataplane;
use kni_dataplane::{Dataplane, DataplaneOptions, EventStream, Hook, HookChoice, NodeConfig};
use kni_integration::{Namespaces, programs, verifier};

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
    let options = DataplaneOptions {
        hook: HookChoice::Auto,
        ..programs::options(4096)?
    };
    verifier::report(&options.object)?;
    let has_tcx = KernelVersion::current()? >= KernelVersion::new(6, 6, 0);
    // The best hook last, as Auto selects it.
    let choices = if has_tcx {
        vec![(HookChoice::Clsact, Hook::Clsact), (HookChoice::Auto, Hook::Tcx)]
    } else {
        vec![(HookChoice::Auto, Hook::Clsact)]
    };
    for (choice, hook) in choices {
        let options = DataplaneOptions {
            hook: choice,
            ..options.clone()
        };
        at_hook(&runtime, &options, hook).with_context(|| format!("at hook {}", hook.as_str()))?;
        println!("passed at hook {}", hook.as_str());
    }
    Ok(())
}

/// Runs all checks on new pods, and removes everything again.
fn at_hook(runtime: &tokio::runtime::Runtime, options: &DataplaneOptions, hook: Hook) -> Result<()> {
    let opened = open(options, hook)?;
    let mut pods = Pods::new(Namespaces::current("node")?);
    let result = runtime
        .block_on(pods.start(&opened.0))
        .and_then(|()| check(runtime, options, hook, opened, &pods));
    let cleaned = runtime.block_on(pods.remove());
    let unpinned = dataplane::remove_pins(&options.root);
    result?;
    cleaned?;
    Ok(unpinned?)
}

/// Loads every program through the verifier of this kernel; the selected hook must be the expected one.
fn open(options: &DataplaneOptions, expected: Hook) -> Result<(Dataplane, EventStream)> {
    let opened = Dataplane::open(options)?;
    opened.0.configure(&NodeConfig::default())?;
    let hook = opened.0.hook();
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
    hook: Hook,
    opened: (Dataplane, EventStream),
    pods: &Pods,
) -> Result<()> {
    checks::attached(&opened.0, pods)?;
    checks::isolation(pods)?;
    checks::fast_path(pods)?;
    checks::spoofing(&opened.0, pods)?;
    checks::every_packet_is_counted(&opened.0, pods)?;
    tables::policy(&opened.0, pods)?;
    tables::services(&opened.0, pods)?;
    runtime.block_on(uplink::check(&opened.0, pods))?;
    drop(opened);
    checks::isolation(pods).context("while no agent runs")?;
    let (dataplane, _events) = open(options, hook).context("opening again")?;
    runtime.block_on(pods.adopt(&dataplane))?;
    checks::attached(&dataplane, pods).context("after adoption")?;
    checks::isolation(pods).context("after adoption")?;
    checks::spoofing(&dataplane, pods).context("after adoption")?;
    checks::withdrawn(&dataplane, pods)
}
