//! Monitors one TCP connection with a question every 10 ms.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use crate::{ask, options::Options};

const PERIOD: Duration = Duration::from_millis(10);
const REPORTS: Duration = Duration::from_secs(1);
/// How long an answer may take before the connection counts as broken.
const PATIENCE: Duration = Duration::from_secs(10);

/// What was seen so far.
#[derive(Debug, Default)]
struct Seen {
    answers: u64,
    /// Answers that were not to the question.
    wrong: u64,
    /// Connections that were made; one, if all is well.
    connections: u64,
    /// Connections that broke, or could not be made.
    broken: u64,
    /// The longest time from a question to its answer.
    longest: Duration,
    /// The last error.
    error: String,
}

impl Seen {
    fn print(&self) {
        // The error is the system's text, which holds nothing that JSON would have to escape.
        println!(
            "{{\"answers\":{},\"wrong\":{},\"connections\":{},\"broken\":{},\"longest_ms\":{},\"error\":\"{}\"}}",
            self.answers,
            self.wrong,
            self.connections,
            self.broken,
            self.longest.as_millis(),
            self.error
        );
    }
}

/// Asks until SIGTERM.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let server = ask::server(options)?;
    stop::on_signal().map_err(|e| e.to_string())?;
    let mut seen = Seen::default();
    let mut reported = Instant::now();
    while !stop::is_asked() {
        if let Err(error) = watch(server, &mut seen, &mut reported) {
            seen.broken += 1;
            seen.error = error.to_string();
            thread::sleep(PERIOD);
        }
    }
    seen.print();
    Ok(())
}

/// One connection, until it breaks or the end is asked for.
fn watch(server: SocketAddr, seen: &mut Seen, reported: &mut Instant) -> std::io::Result<()> {
    let stream = TcpStream::connect_timeout(&server, PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    seen.connections += 1;
    let (mut out, mut answers) = (&stream, BufReader::new(&stream));
    let mut number = 0_u64;
    while !stop::is_asked() {
        let asked = Instant::now();
        out.write_all(format!("{number}\n").as_bytes())?;
        let mut answer = String::new();
        if answers.read_line(&mut answer)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        seen.longest = seen.longest.max(asked.elapsed());
        seen.answers += 1;
        if answer.split_whitespace().next_back() != Some(number.to_string().as_str()) {
            seen.wrong += 1;
        }
        number += 1;
        if reported.elapsed() > REPORTS {
            seen.print();
            *reported = Instant::now();
        }
        thread::sleep(PERIOD.saturating_sub(asked.elapsed()));
    }
    Ok(())
}

/// A flag that SIGTERM sets; calls that wait are taken up again.
mod stop {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

    static ASKED: AtomicBool = AtomicBool::new(false);

    extern "C" fn ask(_signal: i32) {
        ASKED.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_asked() -> bool {
        ASKED.load(Ordering::Relaxed)
    }

    pub(super) fn on_signal() -> nix::Result<()> {
        let action = SigAction::new(SigHandler::Handler(ask), SaFlags::SA_RESTART, SigSet::empty());
        for signal in [Signal::SIGTERM, Signal::SIGINT] {
            // SAFETY: the handler stores to an atomic and does nothing else.
            unsafe { sigaction(signal, &action) }?;
        }
        Ok(())
    }
}
