//! Sends traffic in the background and counts losses.

use std::{
    collections::BTreeSet,
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpStream, UdpSocket},
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{setsockopt, sockopt},
};

use super::{Answer, probe::unspecified};
use crate::{eventually_sync, namespaces::Namespaces, patience};

/// The shortest time between two requests.
const INTERVAL: Duration = Duration::from_millis(1);
/// Requests that wait for their answers at the same time: a server without a CPU gets no more of them.
const WINDOW: u64 = 8;
/// The time between two requests while the answers of a whole window are missing: after a loss, or without a path.
const STALLED: Duration = Duration::from_millis(10);
/// End marks that must be answered, one after the other, before a missing answer is a loss. One would do on one CPU; a
/// packet of another CPU's queue may come later than the mark.
const MARKS: u32 = 16;
/// The time between them, which passes only where an answer is missing.
const BETWEEN_MARKS: Duration = Duration::from_millis(50);
/// What an end mark has instead of a number.
const MARK: &str = "end-";

/// Lets a socket keep what arrives while its thread gets no CPU: the kernel's default is some 160 datagrams, and a busy
/// machine would look like a lossy network.
pub(super) fn keep_bursts(socket: &UdpSocket) -> std::io::Result<()> {
    const BYTES: usize = 8 << 20;
    Ok(setsockopt(socket, sockopt::RcvBufForce, &BYTES)?)
}

/// Numbered requests to a [`Servers`](super::Servers) in a closed loop, at most one per millisecond, until stopped.
#[derive(Debug)]
pub struct Stream {
    notices: Arc<Notices>,
    thread: Option<JoinHandle<StreamReport>>,
}

/// What a stream and its thread report to each other.
#[derive(Debug, Default)]
struct Notices {
    /// No more requests.
    stop: AtomicBool,
    /// The report is not needed.
    abandon: AtomicBool,
    asked: AtomicU64,
    answered: AtomicU64,
}

impl Notices {
    fn running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn wanted(&self) -> bool {
        !self.abandon.load(Ordering::Relaxed)
    }
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
        let socket = connected(from, to)?;
        Ok(Self::run(move |notices| Asked::new(notices).udp(&socket, WINDOW)))
    }

    /// One datagram per millisecond to an address that must not answer: it waits for nothing, and has no report.
    pub fn unanswered(from: &Namespaces, to: SocketAddr) -> Result<Self> {
        let socket = connected(from, to)?;
        Ok(Self::run(move |notices| Asked::new(notices).udp(&socket, u64::MAX)))
    }

    /// One connection for all requests, each of which waits for the previous answer.
    pub fn tcp(from: &Namespaces, to: SocketAddr) -> Result<Self> {
        let stream = from.enter(|| TcpStream::connect_timeout(&to, patience()))?;
        let stream = stream.with_context(|| format!("TCP from {} to {to}", from.name()))?;
        stream.set_nodelay(true)?;
        // A connection without an answer for ten seconds, scaled by the machine, counts as broken: TCP itself would
        // hide an interruption of minutes.
        stream.set_read_timeout(Some(patience() / 6))?;
        Ok(Self::run(move |notices| Asked::new(notices).tcp(stream)))
    }

    fn run(ask: impl FnOnce(&Notices) -> StreamReport + Send + 'static) -> Self {
        let notices = Arc::new(Notices::default());
        let of_thread = Arc::clone(&notices);
        Self {
            notices,
            thread: Some(thread::spawn(move || ask(&of_thread))),
        }
    }

    /// How many requests have been made so far.
    pub fn asked(&self) -> u64 {
        self.notices.asked.load(Ordering::Relaxed)
    }

    /// How many requests have been answered so far.
    pub fn answered(&self) -> u64 {
        self.notices.answered.load(Ordering::Relaxed)
    }

    /// Waits for so many more answers, or until the stream is broken, as its report shows then.
    pub fn wait_for_answers(&self, more: u64) -> Result<()> {
        let enough = self.answered() + more;
        eventually_sync(patience(), || {
            let broken = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
            let answered = self.answered();
            ensure!(broken || answered >= enough, "{answered} of {enough} answers");
            Ok(())
        })
    }

    /// Stops the stream, waits until its last request is answered, and returns the report: what has no answer then is
    /// lost.
    pub fn stop(mut self) -> StreamReport {
        self.notices.stop.store(true, Ordering::Relaxed);
        self.thread
            .take()
            .expect("taken here only")
            .join()
            .expect("a stream does not panic")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.notices.abandon.store(true, Ordering::Relaxed);
        self.notices.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn connected(from: &Namespaces, to: SocketAddr) -> Result<UdpSocket> {
    let socket = from.enter(|| {
        let socket = UdpSocket::bind(SocketAddr::new(unspecified(to.is_ipv4()), 0))?;
        keep_bursts(&socket)?;
        socket.connect(to).map(|()| socket)
    })?;
    socket.with_context(|| format!("UDP from {} to {to}", from.name()))
}

struct Asked<'a> {
    notices: &'a Notices,
    report: StreamReport,
    open: BTreeSet<u64>,
    /// The end marks that were answered.
    marks: u32,
    last: Instant,
    stopped: bool,
}

impl<'a> Asked<'a> {
    fn new(notices: &'a Notices) -> Self {
        Self {
            notices,
            report: StreamReport::default(),
            open: BTreeSet::new(),
            marks: 0,
            last: Instant::now(),
            stopped: false,
        }
    }

    fn next(&mut self) -> String {
        let number = self.report.sent;
        self.report.sent += 1;
        self.notices.asked.store(self.report.sent, Ordering::Relaxed);
        self.open.insert(number);
        number.to_string()
    }

    fn answer(&mut self, text: &str) {
        let Some(answer) = Answer::decode(text) else { return };
        if answer.request == self.mark() {
            self.marks += 1;
        } else if answer
            .request
            .parse()
            .is_ok_and(|number: u64| self.open.remove(&number))
        {
            self.report.answered += 1;
            self.notices.answered.store(self.report.answered, Ordering::Relaxed);
            self.silence();
            self.last = Instant::now();
        } else {
            return;
        }
        self.report.identities.insert(answer.identity);
    }

    /// The end mark that is answered next.
    fn mark(&self) -> String {
        format!("{MARK}{}", self.marks)
    }

    /// Whether the answers of all the last requests are missing.
    fn is_stalled(&self, window: u64) -> bool {
        let sent = self.report.sent;
        sent >= window && self.open.range(sent - window..).count() as u64 == window
    }

    fn udp(mut self, socket: &UdpSocket, window: u64) -> StreamReport {
        let mut asked = None::<Instant>;
        while self.notices.running() {
            let pause = if self.is_stalled(window) { STALLED } else { INTERVAL };
            if asked.is_none_or(|asked| asked.elapsed() >= pause) {
                asked = Some(Instant::now());
                // A request that could not be sent counts as lost.
                drop(socket.send(self.next().as_bytes()));
            }
            self.listen(socket);
        }
        self.silence();
        self.stopped = true;
        self.end(socket);
        self.report
    }

    /// Sends end marks, each until it is answered, as long as answers are missing.
    fn end(&mut self, socket: &UdpSocket) {
        let deadline = Instant::now() + patience();
        let mut asked = None::<Instant>;
        while self.notices.wanted() && !self.open.is_empty() && self.marks < MARKS {
            if Instant::now() >= deadline {
                self.report.broken = Some(format!("{} of {MARKS} end marks were answered", self.marks));
                return;
            }
            if asked.is_none_or(|asked| asked.elapsed() >= BETWEEN_MARKS) {
                asked = Some(Instant::now());
                drop(socket.send(self.mark().as_bytes()));
            }
            self.listen(socket);
        }
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

    fn tcp(mut self, mut stream: TcpStream) -> StreamReport {
        let reader = stream.try_clone();
        let mut reader = match reader {
            Ok(reader) => BufReader::new(reader),
            Err(e) => return self.broken(&e),
        };
        while self.notices.running() {
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
