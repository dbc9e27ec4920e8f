//! Provides sockets whose datagrams are never fragmented, and sockets with headers of their own choice.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{Namespaces, eventually_sync};

/// Timeout for the error about a large datagram, including repetitions after losses.
const PATIENCE: Duration = Duration::from_secs(3);

/// A UDP socket of a namespace, connected to `to`, that never fragments: datagrams that exceed the path MTU are refused
/// with `EMSGSIZE` once the path MTU is known (ip(7), `IP_PMTUDISC_DO`).
pub fn whole_datagrams(from: &Namespaces, to: SocketAddr) -> Result<UdpSocket> {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = from.enter(|| {
        let socket = UdpSocket::bind(any)?;
        socket.connect(to).map(|()| socket)
    })??;
    let (level, option) = if to.is_ipv4() {
        (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER)
    } else {
        (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER)
    };
    set_option(&socket, (level, option), &libc::IP_PMTUDISC_DO.to_ne_bytes())?;
    Ok(socket)
}

/// Sets an option, of a level, of a socket.
pub fn set_option(socket: &impl AsRawFd, (level, option): (libc::c_int, libc::c_int), value: &[u8]) -> Result<()> {
    let size = libc::socklen_t::try_from(value.len())?;
    // SAFETY: the descriptor is open and the option's value lives through the call.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, value.as_ptr().cast(), size) };
    if set != 0 {
        bail!(io::Error::last_os_error());
    }
    Ok(())
}

/// Whether the kernel refused a datagram because it exceeds the known path MTU.
pub fn is_too_big(sent: &io::Result<usize>) -> bool {
    sent.as_ref()
        .is_err_and(|error| error.raw_os_error() == Some(libc::EMSGSIZE))
}

/// Sends whole datagrams of `length` bytes, the first of which must be sent, until the kernel of `from` refuses them
/// because of the path MTU.
pub fn assert_path_limit(from: &Namespaces, to: SocketAddr, length: usize) -> Result<()> {
    let socket = whole_datagrams(from, to)?;
    let data = vec![0; length];
    let first = socket.send(&data);
    first.with_context(|| format!("{length} bytes do not pass the interface of {}", from.name()))?;
    eventually_sync(PATIENCE, || {
        let known = is_too_big(&socket.send(&data));
        ensure!(
            known,
            "{} does not learn that {length} bytes are too big for {to}",
            from.name()
        );
        Ok(())
    })
}
