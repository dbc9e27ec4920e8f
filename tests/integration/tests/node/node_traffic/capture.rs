//! Captures frames that an interface receives, and verifies all their checksums.

use std::{
    io, mem,
    net::IpAddr,
    os::fd::AsRawFd as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use kni_integration::{Namespaces, frames::checksum};
use socket2::{Domain, Protocol, Socket, Type};

/// The state of a frame's transport checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Sum {
    /// Correct.
    Full,
    /// The kernel reports that it is not yet computed, as between local sockets.
    Partial,
    /// Wrong.
    Wrong,
}

/// A received packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Received {
    pub(crate) v4: bool,
    pub(crate) protocol: u8,
    pub(crate) source: IpAddr,
    pub(crate) sum: Sum,
    pub(crate) header_sum_right: bool,
    pub(crate) bytes: Vec<u8>,
}

/// Captures the received packets of all interfaces of a namespace.
#[derive(Debug)]
pub(crate) struct Capture(Socket);

impl Capture {
    pub(crate) fn open(ns: &Namespaces) -> Result<Self> {
        let every = i32::from(u16::try_from(libc::ETH_P_ALL)?.to_be());
        let socket = ns.enter(|| Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(every))))??;
        socket.set_recv_buffer_size(16 << 20)?;
        let on: libc::c_int = 1;
        let size = libc::socklen_t::try_from(size_of_val(&on))?;
        // SAFETY: the descriptor is open and the option's value is an int that lives through the call.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_AUXDATA,
                (&raw const on).cast(),
                size,
            )
        };
        if set != 0 {
            return Err(io::Error::last_os_error()).context("PACKET_AUXDATA");
        }
        Ok(Self(socket))
    }

    /// All IP packets received until no packet arrives for `quiet`.
    pub(crate) fn drain(&self, quiet: Duration) -> Result<Vec<Received>> {
        self.0.set_read_timeout(Some(quiet))?;
        let mut packets = Vec::new();
        while let Some((frame, partial)) = self.next()? {
            packets.extend(Received::parse(&frame, partial));
        }
        Ok(packets)
    }

    /// The first packet that `wanted` accepts.
    pub(crate) fn find(&self, timeout: Duration, wanted: impl Fn(&Received) -> bool) -> Result<Option<Received>> {
        let deadline = Instant::now() + timeout;
        self.0.set_read_timeout(Some(Duration::from_millis(50)))?;
        while Instant::now() < deadline {
            if let Some((frame, partial)) = self.next()?
                && let Some(packet) = Received::parse(&frame, partial)
                && wanted(&packet)
            {
                return Ok(Some(packet));
            }
        }
        Ok(None)
    }

    /// The next frame, empty for a sent one, and whether its checksum is not yet computed.
    fn next(&self) -> Result<Option<(Vec<u8>, bool)>> {
        let mut frame = vec![0_u8; 128 << 10];
        let mut control = [0_u64; 32];
        // SAFETY: all zeros are a valid address.
        let mut from: libc::sockaddr_ll = unsafe { mem::zeroed() };
        // SAFETY: all zeros are a valid message header.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        let mut part = libc::iovec {
            iov_base: frame.as_mut_ptr().cast(),
            iov_len: frame.len(),
        };
        message.msg_name = (&raw mut from).cast();
        message.msg_namelen = u32::try_from(size_of_val(&from))?;
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: every pointer in the header refers to a live buffer of the length beside it.
        let length = unsafe { libc::recvmsg(self.0.as_raw_fd(), &raw mut message, 0) };
        let Ok(length) = usize::try_from(length) else {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock => Ok(None),
                _ => Err(error.into()),
            };
        };
        frame.truncate(length);
        if from.sll_pkttype == libc::PACKET_OUTGOING {
            frame.clear();
        }
        Ok(Some((frame, is_partial(&message)?)))
    }
}

/// The flags of `struct tpacket_auxdata` of a received packet.
fn is_partial(message: &libc::msghdr) -> Result<bool> {
    // SAFETY: the kernel filled the header in.
    let head = unsafe { libc::CMSG_FIRSTHDR(message) };
    // SAFETY: null, or the first header in the control buffer, which lives as long as the message.
    let head = unsafe { head.as_ref() }.context("no auxiliary data")?;
    anyhow::ensure!(
        (head.cmsg_level, head.cmsg_type) == (libc::SOL_PACKET, libc::PACKET_AUXDATA),
        "other auxiliary data"
    );
    // SAFETY: the data of this message follows its header.
    let data = unsafe { libc::CMSG_DATA(head) };
    // SAFETY: the data is a `tpacket_auxdata`, which starts with the status; it may be unaligned.
    let status = unsafe { data.cast::<u32>().read_unaligned() };
    Ok(status & libc::TP_STATUS_CSUMNOTREADY != 0)
}

impl Received {
    fn parse(frame: &[u8], partial: bool) -> Option<Self> {
        let ip = frame.get(14..)?;
        let v4 = match frame.get(12..14)? {
            [0x08, 0x00] => true,
            [0x86, 0xdd] => false,
            _ => return None,
        };
        let (header, end) = if v4 {
            (
                usize::from(ip.first()? & 15) * 4,
                usize::from(u16::from_be_bytes([ip[2], ip[3]])),
            )
        } else {
            (40, 40 + usize::from(u16::from_be_bytes([*ip.get(4)?, ip[5]])))
        };
        let protocol = ip[if v4 { 9 } else { 6 }];
        // A length that does not fit its field is 0; fragments and protocols without a checksum are not verified.
        let payload = ip.get(header..if end > header { end } else { ip.len() })?;
        let fragment = v4 && u16::from_be_bytes([ip[6], ip[7]]) & 0x3fff != 0;
        if fragment || !matches!(protocol, 1 | 6 | 17 | 58) {
            return None;
        }
        let addresses = if v4 { &ip[12..20] } else { &ip[8..40] };
        let mut pseudo = addresses.to_vec();
        pseudo.extend(u32::try_from(payload.len()).ok()?.to_be_bytes());
        pseudo.extend([0, 0, 0, protocol]);
        if protocol == 1 {
            pseudo.clear();
        }
        // UDP over IPv4 may have no checksum.
        let none = v4 && protocol == 17 && payload.get(6..8)? == [0, 0];
        let sum = match checksum(&[&pseudo, payload]) {
            _ if partial => Sum::Partial,
            0 => Sum::Full,
            _ if none => Sum::Full,
            _ => Sum::Wrong,
        };
        let source = if v4 {
            IpAddr::from(<[u8; 4]>::try_from(&ip[12..16]).ok()?)
        } else {
            IpAddr::from(<[u8; 16]>::try_from(&ip[8..24]).ok()?)
        };
        Some(Self {
            v4,
            protocol,
            source,
            sum,
            header_sum_right: !v4 || checksum(&[&ip[..header]]) == 0,
            bytes: payload.to_vec(),
        })
    }
}
