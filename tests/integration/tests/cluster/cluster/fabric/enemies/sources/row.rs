//! Describes one row of the table: who sends in whose name, by which way, and what becomes of it.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    net::{SocketAddr, UdpSocket},
};

use anyhow::{Result, ensure};
use kni_integration::frames::{Link, PacketSocket};

use super::packet::{Packet, Shape, content};

/// Identifications of fragments in use, fewer than there are.
const IDENTIFICATIONS: u32 = 60_000;

/// A socket for whole frames, and their link header.
#[derive(Clone)]
pub(super) struct Out<'a> {
    pub(super) socket: &'a PacketSocket,
    pub(super) link: Link,
}

/// How the sender sends.
pub(super) enum Means<'a> {
    Frames(Out<'a>, Shape),
    /// Through the stack of its namespace.
    Socket(UdpSocket),
}

/// A counter of drops: the node, from 1 on, the program, and the reason.
pub(super) type Counter = (usize, String, String);

/// What becomes of all packets of a row: how often each of them is counted as dropped, or who receives them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Fate {
    pub(super) dropped: BTreeMap<Counter, u64>,
    pub(super) received: BTreeMap<String, u64>,
}

/// One row of the table.
pub(super) struct Row<'a> {
    pub(super) who: &'static str,
    pub(super) place: &'static str,
    pub(super) name: &'static str,
    pub(super) way: &'static str,
    pub(super) packet: Packet,
    pub(super) means: Means<'a>,
    /// Of a single packet.
    pub(super) expected: Fate,
}

impl Row<'_> {
    /// Sends a packet of the row with this number.
    pub(super) fn send(&self, row: usize, number: u32) -> Result<()> {
        let content = content(row, number);
        match &self.means {
            Means::Socket(socket) => {
                let (to, datagram) = self.packet.datagram(&content);
                socket.send_to(&datagram, SocketAddr::from(to))?;
            }
            Means::Frames(out, shape) => {
                let id = u16::try_from(number % IDENTIFICATIONS)?;
                let frames = self.packet.frames(&out.link, *shape, id, &content);
                let count = if matches!(shape, Shape::Fragments) { 2 } else { 1 };
                ensure!(frames.len() == count, "{} frames", frames.len());
                for frame in frames {
                    match out.socket.send(&frame) {
                        // A program dropped it.
                        Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => (),
                        sent => sent?,
                    }
                }
            }
        }
        Ok(())
    }
}

impl Fate {
    /// Each packet counts once in each of these counters.
    pub(super) fn dropped(counters: &[(usize, &str, &str)]) -> Self {
        let mut fate = Self::default();
        for (node, program, reason) in counters {
            let counter = (*node, (*program).to_owned(), (*reason).to_owned());
            *fate.dropped.entry(counter).or_default() += 1;
        }
        fate
    }

    /// The pod receives each packet.
    pub(super) fn received_by(pod: &str) -> Self {
        Self {
            dropped: BTreeMap::new(),
            received: [(pod.to_owned(), 1)].into(),
        }
    }

    /// The fate of so many packets.
    pub(super) fn times(&self, count: u32) -> Self {
        let mut all = self.clone();
        for number in all.dropped.values_mut().chain(all.received.values_mut()) {
            *number *= u64::from(count);
        }
        all
    }

    /// Whether this is what was expected: exactly so many received, and exactly so many in each of the counters. Other
    /// counters may count other packets.
    pub(super) fn fulfils(&self, expected: &Self) -> bool {
        let counts = |(counter, number)| self.dropped.get(counter).unwrap_or(&0) == number;
        self.received == expected.received && expected.dropped.iter().all(counts)
    }

    pub(super) fn shown(&self) -> Result<String> {
        let mut shown = format!("{} delivered", self.received.values().sum::<u64>());
        for (pod, number) in &self.received {
            write!(shown, ", {number} to {pod}")?;
        }
        for ((node, program, reason), number) in &self.dropped {
            write!(shown, ", {number} `{reason}` at `{program}` of node{node}")?;
        }
        Ok(shown)
    }
}
