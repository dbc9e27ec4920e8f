//! Measures frames from a pod that generates them in XDP to a pod that drops them in XDP, as packet processors do.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Namespaces,
    frames::{Ip, Link, Payload, parse_mac},
};
use kni_proto::runtime::Interface;
use nix::net::if_::if_nametoindex;

use crate::{bpf::Program, cpu::pin, path::Path, workload::Placement};

const PATIENCE: Duration = Duration::from_secs(2);
/// Frames per system call.
const ROUND: u32 = 1 << 14;

/// Opens a flow by an exchange between two sockets, so that policies are evaluated.
fn open_flow(path: &Path) -> Result<(UdpSocket, UdpSocket)> {
    let server = path.server.enter(|| UdpSocket::bind((path.address, 0)))??;
    let to = server.local_addr()?;
    let client = path.client.enter(|| UdpSocket::bind("0.0.0.0:0"))??;
    client.connect(to)?;
    for socket in [&client, &server] {
        socket.set_read_timeout(Some(PATIENCE))?;
    }
    for _ in 0..2 {
        client.send(&[0])?;
        let (_, from) = server.recv_from(&mut [0])?;
        server.send_to(&[0], from)?;
        client.recv(&mut [0])?;
    }
    Ok((client, server))
}

fn frame(interface: &Interface, from: SocketAddr, to: SocketAddr) -> Result<Vec<u8>> {
    let mac = |text: &str| parse_mac(text).with_context(|| format!("not a MAC address: {text:?}"));
    let link = Link::new(mac(&interface.mac)?, mac(&interface.host_mac)?);
    let own: IpAddr = from.ip();
    Ok(link.frame(&Ip::new(own, to.ip()).packet(&Payload::udp(from.port(), to.port(), &[0; 18]))))
}

/// Frames received by the interface.
fn received(ns: &Namespaces) -> Result<u64> {
    let shown = ns.run("ip", &["-s", "-j", "link", "show", "dev", "eth0"])?;
    let shown: serde_json::Value = serde_json::from_str(&shown)?;
    shown[0]["stats64"]["rx"]["packets"].as_u64().context("no count")
}

/// Received frames per second; 0 if the host end does not accept frames of this kind.
pub(super) fn run(path: &Path, interface: &Interface, placement: Placement, time: Duration) -> Result<f64> {
    let (client, _server) = open_flow(path)?;
    let frame = frame(interface, client.local_addr()?, client.peer_addr()?)?;
    let _taken = path
        .server
        .enter(|| Program::xdp_drop()?.attach_xdp(if_nametoindex("eth0")?))??;
    let before = received(&path.server)?;
    let word = |at: usize| -> Result<[u8; 4]> { Ok(frame[at..at + 4].try_into()?) };
    let addresses = [word(0)?, word(4)?, word(8)?];
    let took = path.client.enter(|| -> Result<Duration> {
        pin(placement.client)?;
        let sender = Program::xdp_redirect(if_nametoindex("eth0")?, addresses)?;
        let start = Instant::now();
        while start.elapsed() < time {
            sender.run_live(&frame, ROUND)?;
        }
        Ok(start.elapsed())
    })??;
    let arrived = received(&path.server)? - before;
    ensure!(arrived < 1 << 32, "{arrived} frames");
    let arrived = u32::try_from(arrived)?;
    Ok(if arrived < 64 {
        0.0
    } else {
        f64::from(arrived) / took.as_secs_f64()
    })
}
