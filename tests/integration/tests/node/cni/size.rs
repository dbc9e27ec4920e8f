use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use kni_integration::require;

const MAX_BYTES: u64 = 5_000_000;
const MAX_START: Duration = Duration::from_millis(2);
const RUNS: usize = 200;

/// The output of `cargo xtask build-cni`, if it exists.
fn released() -> Result<Option<PathBuf>> {
    let own = std::env::current_exe()?;
    let targets = own
        .ancestors()
        .map(|folder| folder.join("x86_64-unknown-linux-gnu/release/kni-cni"));
    Ok(targets.into_iter().find(|path| path.exists()))
}

fn start(program: &Path) -> Result<Duration> {
    let mut command = Command::new(program);
    command.env_clear().env("CNI_COMMAND", "VERSION");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let started = Instant::now();
    let status = command.status().with_context(|| program.display().to_string())?;
    let took = started.elapsed();
    assert!(status.success(), "{status}");
    Ok(took)
}

/// The gate has the plugin of the tests only.
#[test]
#[ignore = "long: links the plugin as it is released"]
fn the_released_plugin_is_small_and_starts_quickly() -> Result<()> {
    require!(exclusive);
    let program = released()?.context("there is no plugin to measure: run `cargo xtask build-cni`")?;
    let bytes = program.metadata()?.len();
    // A program that does nothing shows the cost of starting a process on this machine.
    let mut starts: Vec<(Duration, Duration)> = Vec::new();
    for _ in 0..RUNS {
        starts.push((start(&program)?, start(Path::new("/bin/true"))?));
    }
    let median = |mut times: Vec<Duration>| {
        times.sort();
        times[RUNS / 2]
    };
    let plugin = median(starts.iter().map(|(plugin, _)| *plugin).collect());
    let nothing = median(starts.iter().map(|(_, nothing)| *nothing).collect());
    println!("kni-cni: {bytes} bytes, VERSION {plugin:?}, /bin/true {nothing:?}");
    assert!(bytes < MAX_BYTES, "{bytes} bytes");
    assert!(plugin < MAX_START.max(nothing * 3), "{plugin:?}, /bin/true {nothing:?}");
    Ok(())
}
