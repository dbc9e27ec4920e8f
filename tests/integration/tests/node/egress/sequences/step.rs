//! Chooses the next step at random among those that the current flows permit.

use anyhow::Result;
use kni_integration::frames::TcpFlags;

use super::{Key, OWN, RANGE, Run, STALE, THERE, Transport, wire::Way};

/// The kind of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    /// The first packet of a flow.
    Open,
    /// The first packet again, a SYN for TCP, before an answer.
    Repeat,
    /// A SYN of a pod that has lost its connection state.
    Anew,
    /// Another packet of the flow from its pod.
    More,
    /// A packet of the server.
    Answer,
    /// Both sides end a connection.
    Close,
    /// One side resets the connection.
    Reset,
    /// An ICMP error about the latest packet.
    Error,
    /// A packet of the server to an unused port.
    Unasked,
}

impl Step {
    pub(crate) const ALL: [Self; 9] = [
        Self::Open,
        Self::Repeat,
        Self::Anew,
        Self::More,
        Self::Answer,
        Self::Close,
        Self::Reset,
        Self::Error,
        Self::Unasked,
    ];
}

impl Run {
    /// Executes one step, and returns its kind.
    pub(super) fn step(&mut self) -> Result<Step> {
        let stale = self.live.iter().find(|(_, live)| live.used.elapsed() > STALE);
        if let Some((key, _)) = stale {
            // It would expire soon, and the model does not know when.
            let key = *key;
            self.send(key, TcpFlags::ACK)?;
            return Ok(Step::More);
        }
        let wanted = match self.rng.u8(..100) {
            0..40 => Step::Open,
            40..51 => Step::Repeat,
            51..52 => Step::Anew,
            52..58 => Step::More,
            58..76 => Step::Answer,
            76..88 => Step::Close,
            88..92 => Step::Reset,
            92..97 => Step::Error,
            _ => Step::Unasked,
        };
        self.take(wanted)
    }

    fn take(&mut self, wanted: Step) -> Result<Step> {
        let tcp = |key: &Key| key.way.transport == Transport::Tcp;
        let chosen = match wanted {
            Step::Open | Step::Unasked => None,
            Step::Close | Step::Anew => self.choose(&|run, key| tcp(key) && run.live[key].answered),
            Step::Repeat => self.choose(&|run, key| !run.live[key].answered),
            Step::Reset => self.choose(&|_, key| tcp(key)),
            Step::Error => self.choose(&|_, key| matches!(key.way.transport, Transport::Tcp | Transport::Udp)),
            Step::More | Step::Answer => self.choose(&|_, _| true),
        };
        match (wanted, chosen) {
            (Step::Repeat | Step::Anew, Some(key)) => self.send(key, TcpFlags::SYN)?,
            (Step::More, Some(key)) => self.send(key, TcpFlags::ACK)?,
            (Step::Answer, Some(key)) => {
                let first = !self.live[&key].answered;
                let flags = if first { TcpFlags::SYN_ACK } else { TcpFlags::ACK };
                self.answer(key, flags)?;
            }
            (Step::Close, Some(key)) => self.close(key)?,
            (Step::Reset, Some(key)) => self.reset(key)?,
            (Step::Error, Some(key)) => {
                let latest = self.live[&key].latest.clone();
                self.wire.unreachable(key, &latest)?;
            }
            (Step::Unasked, _) => {
                let way = self.way();
                let free: Vec<u16> = RANGE.filter(|port| !self.wire.was_used(way, *port)).collect();
                // No flow ever has a port outside of the range.
                let port = self.rng.choice(free).unwrap_or(RANGE.end() + 1);
                self.wire.unasked(way, port)?;
            }
            _ => return self.open(),
        }
        Ok(wanted)
    }

    /// Sends a packet from a random port of a random pod.
    fn open(&mut self) -> Result<Step> {
        let key = Key {
            pod: self.rng.usize(..self.wire.pods()),
            way: self.way(),
            own: self.rng.u16(OWN),
        };
        let (step, flags) = match self.live.get(&key) {
            None => (Step::Open, TcpFlags::SYN),
            Some(live) if live.answered => (Step::More, TcpFlags::ACK),
            Some(_) => (Step::Repeat, TcpFlags::SYN),
        };
        self.send(key, flags)?;
        Ok(step)
    }

    fn way(&mut self) -> Way {
        let transports = [
            Transport::Tcp,
            Transport::Tcp,
            Transport::Udp,
            Transport::Sctp,
            Transport::Echo,
        ];
        let transport = transports[self.rng.usize(..transports.len())];
        Way {
            v4: self.rng.bool(),
            transport,
            there: match transport {
                Transport::Echo => 0,
                Transport::Tcp | Transport::Udp | Transport::Sctp => THERE[self.rng.usize(..THERE.len())],
            },
        }
    }

    fn choose(&mut self, wanted: &dyn Fn(&Self, &Key) -> bool) -> Option<Key> {
        let keys: Vec<Key> = self.live.keys().filter(|key| wanted(self, key)).copied().collect();
        self.rng.choice(keys)
    }
}
