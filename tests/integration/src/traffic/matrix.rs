//! Builds a connectivity matrix: the actual and the expected server of each address.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    thread,
    time::Duration,
};

use comfy_table::{Table, presets};

use super::{NoAnswer, Servers, new_token, ping, tcp_get_to, udp_ask_to};
use crate::namespaces::Namespaces;

/// Timeout of an expected answer on a busy machine. [`Stream`](super::Stream) counts losses.
const ANSWER: Duration = Duration::from_secs(5);

/// A probe over TCP, UDP and ping.
#[derive(Debug)]
pub struct Probe<'a> {
    /// The namespaces of the client.
    pub from: &'a Namespaces,
    /// The probed address.
    pub to: IpAddr,
    /// The identity that should answer; `None` for silence.
    pub expected: Option<&'a str>,
}

/// One result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The client.
    pub from: String,
    /// The probed address.
    pub to: IpAddr,
    /// "TCP", "UDP" or "ping".
    pub protocol: &'static str,
    /// The identity that should answer; `None` for silence.
    pub expected: Option<String>,
    /// The identity that answered, or the reason for the missing answer.
    pub got: Result<String, NoAnswer>,
    /// The servers that the request reached, with or without an answer.
    pub reached: Vec<String>,
}

impl Row {
    /// Whether the expected server answered, and no other one received the request; for silence, no server received it.
    pub fn as_expected(&self) -> bool {
        match &self.expected {
            Some(who) => self.got.as_ref() == Ok(who) && self.reached == [who.clone()],
            None => self.got.is_err() && self.reached.is_empty(),
        }
    }

    fn shown(&self) -> String {
        match &self.got {
            Ok(who) => who.clone(),
            Err(why) if self.reached.is_empty() => why.to_string(),
            Err(why) => format!("{why}, but reached {}", self.reached.join(" and ")),
        }
    }
}

/// The results of many probes. Displays as a table with a line per result.
#[derive(Debug, Clone, Default)]
pub struct Matrix {
    /// Three rows per probe.
    pub rows: Vec<Row>,
}

impl Matrix {
    /// Runs all probes concurrently. `servers` are all servers that might receive a request, including wrong ones; they
    /// all listen on `port`. No answer within `silence` is silence; one that is expected has more time.
    pub fn run(probes: &[Probe<'_>], servers: &[&Servers], port: u16, silence: Duration) -> Self {
        let rows = thread::scope(|scope| {
            let asked: Vec<_> = probes
                .iter()
                .map(|probe| scope.spawn(move || ask(probe, servers, port, silence)))
                .collect();
            asked
                .into_iter()
                .flat_map(|thread| thread.join().expect("a probe does not panic"))
                .collect()
        });
        Self { rows }
    }

    /// The rows that are not as expected.
    pub fn failures(&self) -> Vec<&Row> {
        self.rows.iter().filter(|row| !row.as_expected()).collect()
    }

    /// Panics with the table unless there are rows and all are as expected.
    #[track_caller]
    pub fn assert_expected(&self) {
        assert!(!self.rows.is_empty(), "an empty matrix proves nothing");
        assert!(
            self.failures().is_empty(),
            "{} rows are not as expected:\n{self}",
            self.failures().len()
        );
    }
}

impl fmt::Display for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header(["FROM", "TO", "EXPECTED", "TCP", "UDP", "PING"]);
        for question in self.rows.chunks(3) {
            let Some(first) = question.first() else { continue };
            let expected = first.expected.clone().unwrap_or_else(|| "silence".into());
            let mut cells = vec![first.from.clone(), first.to.to_string(), expected];
            let mark = |row: &Row| if row.as_expected() { "✓" } else { "✗" };
            cells.extend(question.iter().map(|row| format!("{} {}", mark(row), row.shown())));
            table.add_row(cells);
        }
        table.fmt(f)
    }
}

fn ask(probe: &Probe<'_>, servers: &[&Servers], port: u16, silence: Duration) -> Vec<Row> {
    let to = SocketAddr::new(probe.to, port);
    let timeout = if probe.expected.is_some() {
        silence.max(ANSWER)
    } else {
        silence
    };
    let tokens = [new_token(), new_token(), new_token()];
    let answers = thread::scope(|scope| {
        let tcp = scope.spawn(|| tcp_get_to(probe.from, to, &tokens[0], timeout).map(|answer| answer.identity));
        let udp = scope.spawn(|| udp_ask_to(probe.from, to, &tokens[1], timeout).map(|answer| answer.identity));
        // An echo reply does not identify its sender: the server that received the request has answered.
        let ping = ping(probe.from, probe.to, &tokens[2], timeout)
            .map(|()| reached(servers, &tokens[2], ANSWER).join(" and "));
        let threads = [tcp, udp].map(|thread| thread.join().expect("a probe does not panic"));
        threads.into_iter().chain([ping]).collect::<Vec<_>>()
    });
    let rows = ["TCP", "UDP", "ping"].into_iter().zip(&tokens).zip(answers);
    rows.map(|((protocol, token), got)| Row {
        from: probe.from.name().to_owned(),
        to: probe.to,
        protocol,
        expected: probe.expected.map(str::to_owned),
        reached: reached(servers, token, Duration::ZERO),
        got,
    })
    .collect()
}

fn reached(servers: &[&Servers], token: &str, wait: Duration) -> Vec<String> {
    let deadline = std::time::Instant::now() + wait;
    loop {
        let found: Vec<_> = servers
            .iter()
            .filter(|s| s.saw(token))
            .map(|s| s.identity().to_owned())
            .collect();
        if !found.is_empty() || std::time::Instant::now() >= deadline {
            return found;
        }
        thread::sleep(Duration::from_millis(1));
    }
}
