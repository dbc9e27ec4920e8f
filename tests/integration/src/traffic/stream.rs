//! Sends traffic in the background and counts losses.

use std::{
    collections::BTreeSet,
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpStream, UdpSocket},
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{setsockopt, sockopt},
};

use super::{Answer, probe::unspecified};
use crate::namespaces::Namespaces;

const INTERVAL: Duration = Duration::from_millis(1);
/// Time to wait for answers after the last request.
const LINGER: Duration = Duration::from_millis(500);
/// A TCP connection without an answer for this time counts as broken.
const TCP_PATIENCE: Duration = Duration::from_secs(10);

/// Lets a socket keep what arrives while its thread gets no CPU: the kernel's default is some 160 datagrams, and a busy
/// machine would look like a lossy network.
pub(super) fn keep_bursts(socket: &UdpSocket) -> std::io::Result<()> {
    const BYTES: usize = 8 << 20;
    Ok(setsockopt(socket, sockopt::RcvBufForce, &BYTES)?)
}

/// Numbered requests to a [`Servers`](super::Servers), one per millisecond, until stopped.
#[derive(Debug)]
pub struct Stream {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<StreamReport>>,
}

/// The results of a stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StreamReport {
    /// Requests sent.
    pub sent: u64,
    /// Distinct requests that were answered.
    pub answered: u64,
    /// The longest time between two answers.
    pub longest_silence: Duration,
    /// All identities that answered.
    pub identities: BTreeSet<String>,
    /// The reason for an early end.
    pub broken: Option<String>,
}

impl StreamReport {
    /// Requests without an answer.
    pub fn lost(&self) -> u64 {
        self.sent - self.answered
    }

    /// Panics unless there were requests, all of them were answered, and only by `identity`.
    #[track_caller]
    pub fn assert_whole(&self, identity: &str) {
        assert!(
            self.sent > 0 && self.lost() == 0 && self.broken.is_none(),
            "traffic was lost: {self:?}"
        );
        assert!(
            self.identities.iter().eq([identity]),
            "others than {identity} answered: {self:?}"
        );
    }
}

impl Stream {
    /// One datagram per request.
    pub fn udp(from: &Namespaces, to: SocketAddr) -> Result<Self> {
        let socket = from.enter(|| {
            let socket = UdpSocket::bind(SocketAddr::new(unspecified(to.is_ipv4()), 0))?;
            keep_bursts(&socket)?;
            socket.connect(to).map(|()| socket)
        })?;
        let socket = socket.with_context(|| format!("UDP from {} to {to}", from.name()))?;
        Ok(Self::run(move |stop| Asked::default().udp(&socket, stop)))
    }

    /// One connection for all requests, each of which waits for the previous answer.
    pub fn tcp(from: &Namespaces, to: SocketAddr) -> Result<Self> {
        let stream = from.enter(|| TcpStream::connect_timeout(&to, TCP_PATIENCE))?;
        let stream = stream.with_context(|| format!("TCP from {} to {to}", from.name()))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TCP_PATIENCE))?;
        Ok(Self::run(move |stop| Asked::default().tcp(stream, stop)))
    }

    fn run(ask: impl FnOnce(&AtomicBool) -> StreamReport + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        Self {
            stop,
            thread: Some(thread::spawn(move || ask(&told))),
        }
    }

    /// Stops the stream, waits for late answers, and returns the report.
    pub fn stop(mut self) -> StreamReport {
        self.stop.store(true, Ordering::Relaxed);
        self.thread
            .take()
            .expect("taken here only")
            .join()
            .expect("a stream does not panic")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

struct Asked {
    report: StreamReport,
    open: BTreeSet<u64>,
    last: Instant,
    stopped: bool,
}

impl Default for Asked {
    fn default() -> Self {
        Self {
            report: StreamReport::default(),
            open: BTreeSet::new(),
            last: Instant::now(),
            stopped: false,
        }
    }
}

impl Asked {
    fn next(&mut self) -> String {
        let number = self.report.sent;
        self.report.sent += 1;
        self.open.insert(number);
        number.to_string()
    }

    fn answer(&mut self, text: &str) {
        let Some(answer) = Answer::decode(text) else { return };
        if answer
            .request
            .parse()
            .is_ok_and(|number: u64| self.open.remove(&number))
        {
            self.report.answered += 1;
            self.silence();
            self.last = Instant::now();
            self.report.identities.insert(answer.identity);
        }
    }

    fn udp(mut self, socket: &UdpSocket, stop: &AtomicBool) -> StreamReport {
        let mut due = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            if Instant::now() >= due {
                due += INTERVAL;
                // A request that could not be sent counts as lost.
                drop(socket.send(self.next().as_bytes()));
            }
            self.listen(socket);
        }
        self.silence();
        self.stopped = true;
        let end = Instant::now() + LINGER;
        while !self.open.is_empty() && Instant::now() < end {
            self.listen(socket);
        }
        self.report
    }

    /// Receives available answers, waiting at most a millisecond. Uses poll, because read timeouts are rounded up to a
    /// tick.
    fn listen(&mut self, socket: &UdpSocket) {
        let mut sockets = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        let mut buffer = [0; 2048];
        if poll(&mut sockets, PollTimeout::from(1_u8)).is_ok_and(|ready| ready > 0)
            && let Ok(length) = socket.recv(&mut buffer)
        {
            self.answer(&String::from_utf8_lossy(&buffer[..length]));
        }
    }

    fn tcp(mut self, mut stream: TcpStream, stop: &AtomicBool) -> StreamReport {
        let reader = stream.try_clone();
        let mut reader = match reader {
            Ok(reader) => BufReader::new(reader),
            Err(e) => return self.broken(&e),
        };
        while !stop.load(Ordering::Relaxed) {
            let question = self.next();
            let mut line = String::new();
            let asked = stream.write_all(format!("{question}\n").as_bytes());
            let asked = asked.and_then(|()| reader.read_line(&mut line));
            match asked {
                Ok(0) => return self.broken(&"closed"),
                Ok(_) => self.answer(&line),
                Err(e) => return self.broken(&e),
            }
            thread::sleep(INTERVAL);
        }
        self.finished()
    }

    fn broken(mut self, why: &dyn std::fmt::Display) -> StreamReport {
        self.report.broken = Some(why.to_string());
        self.finished()
    }

    fn finished(mut self) -> StreamReport {
        self.silence();
        self.report
    }

    /// Records the time since the latest answer, unless all requests have been sent.
    fn silence(&mut self) {
        if !self.stopped {
            self.report.longest_silence = self.report.longest_silence.max(self.last.elapsed());
        }
    }
}
