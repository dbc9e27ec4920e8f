//! Tests what is carried between nodes by content: long streams, fragmented datagrams, crafted SCTP, echoes and ICMP
//! errors.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Pod,
    echo::{tcp_echo, udp_echo},
    frames::{Ip, Payload},
    long,
    traffic::{new_token, ping},
    wait::patience,
};

use super::{
    super::scene::{address, identity},
    bed::{Bed, Raw, pairs},
};

/// Bytes of a stream; of [`AROUND`], or of all in long tests.
const STREAM: usize = 8 << 20;
/// Bytes of the others.
const SHORT_STREAM: usize = 256 << 10;
/// Pairs of nodes that lead around all nodes.
const AROUND: [(usize, usize); 3] = [(1, 2), (2, 3), (3, 1)];
/// Bytes of a datagram that leaves in fragments.
const DATAGRAM: usize = 9_000;
/// Ports of the servers of this test.
const ECHO: u16 = 7100;
const CLOSED: u16 = 7101;
const SCTP: u8 = 132;

/// Each network, from each node to each other, in both families.
pub(super) fn passes_unchanged(bed: &Bed) -> Result<()> {
    let mut bytes = 0;
    for team in bed.teams {
        for (from, to) in pairs() {
            let is_full = long() || AROUND.contains(&(from, to));
            let stream = if is_full { STREAM } else { SHORT_STREAM };
            let (from, to) = (bed.pod(team, from), bed.pod(team, to));
            for v4 in [true, false] {
                let what = || format!("{} to {}, IPv4: {v4}", identity(from), identity(to));
                let there = SocketAddr::new(address(to, v4), ECHO);
                tcp_echo(&from.inside, there, &to.inside, ECHO, stream).with_context(what)?;
                udp_echo(&from.inside, there, &to.inside, ECHO, DATAGRAM).with_context(what)?;
                sctp(from, to, v4).with_context(what)?;
                ping(&from.inside, address(to, v4), &new_token(), patience()).with_context(what)?;
                refused_port(from, address(to, v4)).with_context(what)?;
                bytes += stream;
            }
        }
    }
    println!("streams of {bytes} bytes, datagrams of {DATAGRAM} in fragments, SCTP, echoes and ICMP errors are whole");
    Ok(())
}

/// An INIT arrives as it was sent, and so does what answers it.
fn sctp(from: &Pod, to: &Pod, v4: bool) -> Result<()> {
    let (near, far) = (Raw::of(from)?, Raw::of(to)?);
    let ends = (address(from, v4), address(to, v4));
    let init = Payload::sctp_init(5000, 5001);
    near.send(&Ip::new(ends.0, ends.1).packet(&init))?;
    let arrived = far.receive(ends.0, ends.1, SCTP)?.context("no INIT")?;
    ensure!(arrived == init.to_bytes(ends), "{arrived:?}");
    let answer = Payload::sctp_init(5001, 5000);
    far.send(&Ip::new(ends.1, ends.0).packet(&answer))?;
    let arrived = near.receive(ends.1, ends.0, SCTP)?.context("no answer")?;
    ensure!(arrived == answer.to_bytes((ends.1, ends.0)), "{arrived:?}");
    Ok(())
}

/// The ICMP error of a port without a server reaches the sender.
fn refused_port(from: &Pod, to: IpAddr) -> Result<()> {
    let socket = from.inside.enter(|| -> std::io::Result<UdpSocket> {
        let socket = UdpSocket::bind(SocketAddr::new(
            if to.is_ipv4() { [0; 4].into() } else { [0; 16].into() },
            0,
        ))?;
        socket.connect((to, CLOSED))?;
        Ok(socket)
    })??;
    socket.set_read_timeout(Some(patience()))?;
    socket.send(b"x")?;
    let error = socket.recv(&mut [0; 8]).err().context("an answer")?;
    ensure!(error.kind() == ErrorKind::ConnectionRefused, "{error}");
    Ok(())
}
