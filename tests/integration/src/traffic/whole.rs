//! Sockets whose datagrams are never fragmented.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd as _,
};

use anyhow::{Result, bail};

use crate::Namespaces;

/// A UDP socket of a namespace, connected to `to`, that never fragments: what is too large for the path is refused with
/// `EMSGSIZE` once the path's limit is known (ip(7), `IP_PMTUDISC_DO`).
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
    let value = libc::IP_PMTUDISC_DO;
    let size = libc::socklen_t::try_from(size_of_val(&value))?;
    // SAFETY: the descriptor is open and the option's value is an int that lives through the call.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), size) };
    if set != 0 {
        bail!(io::Error::last_os_error());
    }
    Ok(socket)
}
