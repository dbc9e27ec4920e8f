//! Records what passes between the nodes, and reads packets and tunnels from it.

use std::{net::IpAddr, time::Duration};

use anyhow::Result;

use super::Cluster;
use crate::frames::PacketSocket;

/// UDP port of the tunnels.
pub const OVERLAY_PORT: u16 = 4789;

/// What passes the bridge between the nodes.
#[derive(Debug)]
pub struct Wire(Vec<PacketSocket>);

/// One packet on the wire: its IP packet.
pub fn ip_packet(frame: &[u8]) -> Option<(IpAddr, IpAddr, u8, &[u8])> {
    let (ethertype, packet) = (frame.get(12..14)?, frame.get(14..)?);
    match ethertype {
        [8, 0] => {
            let header = usize::from(packet.first()? & 15) * 4;
            let ip = |at: usize| Some(IpAddr::from(<[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?));
            Some((ip(12)?, ip(16)?, *packet.get(9)?, packet.get(header..)?))
        }
        [0x86, 0xdd] => {
            let ip = |at: usize| Some(IpAddr::from(<[u8; 16]>::try_from(packet.get(at..at + 16)?).ok()?));
            Some((ip(8)?, ip(24)?, *packet.get(6)?, packet.get(40..)?))
        }
        _ => None,
    }
}

/// The number of the virtual network and the inner frame of a tunnel packet's UDP datagram.
pub fn tunnelled(datagram: &[u8]) -> Option<(u32, &[u8])> {
    tunnelled_at(OVERLAY_PORT, datagram)
}

/// [`tunnelled`] of tunnels with another port.
pub fn tunnelled_at(tunnel: u16, datagram: &[u8]) -> Option<(u32, &[u8])> {
    let port = u16::from_be_bytes(datagram.get(2..4)?.try_into().ok()?);
    let header = datagram.get(8..16)?;
    (port == tunnel).then_some(())?;
    Some((
        u32::from_be_bytes([0, header[4], header[5], header[6]]),
        datagram.get(16..)?,
    ))
}

impl Wire {
    /// Records what passes the nodes' ports of the bridge from now on.
    pub fn open(cluster: &Cluster) -> Result<Self> {
        let ports = (1..=cluster.nodes.len()).map(|node| {
            let port = format!("port{}", node + 10);
            PacketSocket::open(cluster.fabric.inside(), &port)
        });
        Ok(Self(ports.collect::<Result<_>>()?))
    }

    /// Everything that has passed until now.
    pub fn frames(&self) -> Result<Vec<Vec<u8>>> {
        let mut frames = Vec::new();
        for socket in &self.0 {
            while let Some(frame) = socket.receive(Duration::from_millis(20), |_any| true)? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }
}
