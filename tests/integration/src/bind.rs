//! Binds sockets to ports that earlier sockets of the same test had.

use crate::wait::patience;
use std::{
    io, thread,
    time::{Duration, Instant},
};

/// Binds as soon as an earlier socket is released, within a minute. It was closed already, but a process that
/// another thread is starting holds a copy of it between fork and exec.
pub fn when_free<S>(bind: impl Fn() -> io::Result<S>) -> io::Result<S> {
    let deadline = Instant::now() + patience();
    loop {
        match bind() {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(1));
            }
            bound => return bound,
        }
    }
}
