//! Holds a pod's namespaces: reaps orphaned processes and ends on SIGTERM.

use std::process::ExitCode;

use nix::{
    errno::Errno,
    sys::{
        signal::{SigSet, Signal},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
};

fn main() -> ExitCode {
    let awaited = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGCHLD]);
    // Blocked, so that none is lost between two waits, and so that the first process of a namespace gets them at all.
    if awaited.thread_block().is_err() {
        return ExitCode::FAILURE;
    }
    loop {
        match awaited.wait() {
            Ok(Signal::SIGCHLD) => reap(),
            Ok(_) => return ExitCode::SUCCESS,
            Err(Errno::EINTR) => {}
            Err(_) => return ExitCode::FAILURE,
        }
    }
}

fn reap() {
    // Several that ended send one signal.
    while let Ok(status) = waitpid(None, Some(WaitPidFlag::WNOHANG)) {
        if status == WaitStatus::StillAlive {
            break;
        }
    }
}
