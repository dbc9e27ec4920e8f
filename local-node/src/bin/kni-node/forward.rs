//! Forwards connections of a port of the machine to an API server inside a namespace.

use std::{
    io,
    net::{Shutdown, TcpListener, TcpStream},
    thread,
};

use anyhow::{Context, Result};
use kni_local_node::Namespaces;

/// The port that `up` prefers; any free one if it is in use.
const PORT: u16 = 16443;

/// Opens the port, on 127.0.0.1; returns it with its URL.
pub(crate) fn listen() -> Result<(TcpListener, String)> {
    let listener = TcpListener::bind(("127.0.0.1", PORT)).or_else(|_taken| TcpListener::bind("127.0.0.1:0"));
    let listener = listener.context("a port for the API server")?;
    let server = format!("https://{}", listener.local_addr()?);
    Ok((listener, server))
}

/// Forwards the connections of `listener` to the API server inside `node` until the process ends.
pub(crate) fn serve(listener: &TcpListener, node: &Namespaces) {
    for outer in listener.incoming().flatten() {
        let Ok(Ok(inner)) = node.enter(|| TcpStream::connect("127.0.0.1:6443")) else {
            // The API server is not running: the client's connection is closed.
            continue;
        };
        for (from, to) in [(&outer, &inner), (&inner, &outer)] {
            let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else {
                continue;
            };
            thread::spawn(move || copy(&from, &to));
        }
    }
}

fn copy(mut from: &TcpStream, mut to: &TcpStream) {
    // An error ends the connection like an end of file.
    drop(io::copy(&mut from, &mut to));
    drop(to.shutdown(Shutdown::Write));
}
