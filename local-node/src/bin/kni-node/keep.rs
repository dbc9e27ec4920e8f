//! Runs the process that owns the nodes: starts them, and forwards connections to their API server.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::{Context, Result, bail};
use kni_local_node::Namespaces;

use crate::{
    Folders, Start, cluster, forward,
    single::Single,
    state::{Kind, State},
};

/// Last line of the output.
pub(crate) const READY: &str = "ready";
/// A file that the owner locks, so that there is only one.
pub(crate) const LOCK: &str = "lock";

/// Whether everything runs, with `up` or without it.
static COMPLETE: AtomicBool = AtomicBool::new(false);

/// Runs the command; returns only when something could not be started.
pub(crate) fn command(folders: &Folders, start: &Start) -> Result<()> {
    let folder = &folders.folder;
    let _lock = lock(folders)?;
    end_with_parent();
    let mut state = State::begin(Kind::of(start));
    state.save(folder)?;
    let (programs, statics) = folders.build(&mut |line| println!("{line}"))?;
    let (listener, server) = forward::listen()?;
    let built = (&programs, &statics);
    let kni = if start.kni {
        Some(folders.build_kni(&mut |line| println!("{line}"))?)
    } else {
        None
    };
    let announce = |state: &mut State, processes, api_server: &Namespaces| -> Result<()> {
        state.complete(processes);
        state.save(folder)?;
        COMPLETE.store(true, Ordering::Release);
        println!("{READY}");
        // `up` exits now, and with it the reader of standard output.
        forward::serve(&listener, api_server);
        bail!("the port of the API server was closed")
    };
    if let Some(count) = start.nodes {
        let mut cluster = cluster::start(folders, built, start, (count, kni), &server)?;
        let api_server = cluster::api_server(&mut cluster);
        announce(&mut state, cluster.processes().collect(), &api_server)
    } else {
        let node = Single::start(folders, built, (start.standalone, kni), &server)?;
        announce(&mut state, node.processes(), node.api_server())
    }
}

/// The lock of the folder; it is released when this process ends, for any reason.
fn lock(folders: &Folders) -> Result<File> {
    let folder = &folders.folder;
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let path = folder.join(LOCK);
    let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    file.try_lock()
        .with_context(|| format!("another process uses {}", folder.display()))?;
    Ok(file)
}

/// Ends this process when `up`, which holds the other end of its standard input, ends before everything runs: nothing
/// stays behind when `up` is interrupted.
fn end_with_parent() {
    thread::spawn(|| {
        // An error of reading is an end as well.
        drop(io::stdin().read_to_end(&mut Vec::new()));
        if !COMPLETE.load(Ordering::Acquire) {
            #[expect(clippy::exit, reason = "as if it was killed: the janitors remove everything")]
            std::process::exit(1);
        }
    });
}
