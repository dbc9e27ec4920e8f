//! Starts processes that the kernel kills when the process that started them ends.

use std::{
    io,
    os::unix::process::CommandExt as _,
    process::{Child, Command},
    sync::{Mutex, OnceLock, mpsc},
    thread,
};

use nix::sys::{prctl, signal::Signal};

type Job = Box<dyn FnOnce() + Send>;

/// Spawns `command` so that the kernel kills the child when this process ends.
///
/// The parent-death signal fires when the *thread* that forked ends, and test threads end early: one thread with the
/// lifetime of the process does all forking.
pub fn spawn_tied(mut command: Command) -> io::Result<Child> {
    // SAFETY: between fork and exec the closure makes only one system call.
    unsafe {
        command.pre_exec(|| prctl::set_pdeathsig(Signal::SIGKILL).map_err(io::Error::from));
    }
    let (answer, child) = mpsc::channel();
    let job: Job = Box::new(move || {
        // The receiver waits below; it is dropped only if its thread has ended.
        drop(answer.send(command.spawn()));
    });
    keeper()?
        .lock()
        .map_err(|e| io::Error::other(e.to_string()))?
        .send(job)
        .map_err(|e| io::Error::other(e.to_string()))?;
    child.recv().map_err(io::Error::other)?
}

fn keeper() -> io::Result<&'static Mutex<mpsc::Sender<Job>>> {
    static KEEPER: OnceLock<Mutex<mpsc::Sender<Job>>> = OnceLock::new();
    if let Some(keeper) = KEEPER.get() {
        return Ok(keeper);
    }
    let (sender, jobs) = mpsc::channel::<Job>();
    thread::Builder::new()
        .name("process-keeper".into())
        .spawn(move || jobs.into_iter().for_each(|job| job()))?;
    // The thread of a concurrent second call ends with its sender.
    Ok(KEEPER.get_or_init(|| Mutex::new(sender)))
}
