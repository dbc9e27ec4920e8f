//! Sends a datagram every 10 ms and counts those without an answer.

use std::{
    collections::VecDeque,
    net::{Ipv6Addr, SocketAddr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use crate::{ask, options::Options};

const PERIOD: Duration = Duration::from_millis(10);
const REPORTS: Duration = Duration::from_secs(1);
/// A question without an answer after this time counts as lost: no queue on the path holds a datagram for seconds.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
struct Seen {
    answers: u64,
    lost: u64,
    /// Questions that could not even be sent.
    unsent: u64,
    /// Sent and not answered yet: number and time, the oldest first.
    open: VecDeque<(u64, Instant)>,
}

/// Asks until the process ends.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let server = ask::server(options)?;
    let socket = connect(server).map_err(|error| format!("{server}: {error}"))?;
    let (mut seen, mut reported) = (Seen::default(), Instant::now());
    for number in 0.. {
        let asked = Instant::now();
        match socket.send(number.to_string().as_bytes()) {
            Ok(_) => seen.open.push_back((number, asked)),
            Err(_refused) => seen.unsent += 1,
        }
        seen.receive(&socket, asked + PERIOD);
        if reported.elapsed() > REPORTS {
            seen.print();
            reported = Instant::now();
        }
        thread::sleep(PERIOD.saturating_sub(asked.elapsed()));
    }
    Ok(())
}

fn connect(server: SocketAddr) -> std::io::Result<UdpSocket> {
    let socket = match server {
        SocketAddr::V4(_) => UdpSocket::bind("0.0.0.0:0")?,
        SocketAddr::V6(_) => UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?,
    };
    socket.connect(server)?;
    socket.set_read_timeout(Some(Duration::from_millis(1)))?;
    Ok(socket)
}

impl Seen {
    /// Takes what has come until `deadline`.
    fn receive(&mut self, socket: &UdpSocket, deadline: Instant) {
        let mut buffer = [0; 512];
        while !self.open.is_empty() {
            match socket.recv(&mut buffer) {
                Ok(length) => self.answered(buffer.get(..length).unwrap_or_default()),
                // No answer yet, or an ICMP error for a lost question.
                Err(_) if Instant::now() >= deadline => break,
                Err(_) => {}
            }
        }
        while self.open.front().is_some_and(|(_, asked)| asked.elapsed() > PATIENCE) {
            self.open.pop_front();
            self.lost += 1;
        }
    }

    fn answered(&mut self, answer: &[u8]) {
        let text = String::from_utf8_lossy(answer);
        let number = text.split_whitespace().next_back().and_then(|word| word.parse().ok());
        let found = self.open.iter().position(|(open, _)| Some(*open) == number);
        if let Some(found) = found {
            self.open.remove(found);
            self.answers += 1;
        }
    }

    fn print(&self) {
        println!(
            "{{\"answers\":{},\"lost\":{},\"unsent\":{},\"open\":{}}}",
            self.answers,
            self.lost,
            self.unsent,
            self.open.len()
        );
    }
}
