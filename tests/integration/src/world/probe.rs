//! Sends all requests of a pod concurrently, until no more of them are answered.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    pin::pin,
    rc::Rc,
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::Result;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpStream, UdpSocket},
    task::{JoinSet, LocalSet},
    time::{Instant, timeout_at},
};

use super::{
    sctp::{Packet, Sctp},
    serve::answer,
    table::{Outcome, Question, Table},
};
use crate::{namespaces::Namespaces, oracle::Protocol, traffic::new_token};

/// A question and its destination.
#[derive(Debug, Clone)]
pub(super) struct Probe {
    pub(super) question: Question,
    /// The destination address.
    pub(super) to: IpAddr,
    /// The expected server and its address.
    pub(super) name: String,
    pub(super) server: IpAddr,
}

impl Probe {
    fn expected(&self, token: &str) -> String {
        answer(&self.name, SocketAddr::new(self.server, self.question.port), token)
    }

    fn at(&self) -> SocketAddr {
        SocketAddr::new(self.to, self.question.port)
    }

    fn evaluate(&self, token: &str, answered: io::Result<String>) -> Outcome {
        match answered {
            Ok(text) if text == self.expected(token) => Outcome::Answered,
            Ok(text) => Outcome::Odd(format!("{text:?} instead of {:?}", self.expected(token))),
            Err(error) => Outcome::Odd(error.to_string()),
        }
    }
}

/// How long the probes of several pods wait for answers.
///
/// Answers that still arrive extend the wait: on a busy machine thousands of requests are not answered within the time
/// that one of them takes.
#[derive(Debug)]
pub(super) struct Patience {
    silence: Duration,
    deadline: Mutex<Instant>,
}

impl Patience {
    /// Probes end when no pod has received an answer for this time.
    pub(super) fn new(silence: Duration) -> Self {
        Self {
            silence,
            deadline: Mutex::new(Instant::now() + silence),
        }
    }

    fn deadline(&self) -> Instant {
        *self.deadline.lock().expect("no holder panics")
    }

    /// The answer, or nothing after the silence.
    async fn wait<T>(&self, answer: impl Future<Output = T>) -> Option<T> {
        let mut answer = pin!(answer);
        loop {
            let deadline = self.deadline();
            match timeout_at(deadline, &mut answer).await {
                Ok(answer) => {
                    *self.deadline.lock().expect("no holder panics") = Instant::now() + self.silence;
                    return Some(answer);
                }
                Err(_) if self.deadline() == deadline => return None,
                Err(_) => (),
            }
        }
    }
}

/// Runs all probes of one pod concurrently; missing answers count as silence.
pub(super) fn probe(from: &Namespaces, probes: Vec<Probe>, patience: &Arc<Patience>) -> Result<Table> {
    from.enter(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let local = LocalSet::new();
        let table = local.block_on(&runtime, ask(probes, patience));
        anyhow::Ok(table?)
    })?
}

async fn ask(probes: Vec<Probe>, patience: &Arc<Patience>) -> io::Result<Table> {
    let mut table: Table = probes.iter().map(|probe| (probe.question, Outcome::Silent)).collect();
    let token = Rc::new(new_token());
    let (by_sctp, others): (Vec<_>, Vec<_>) = probes
        .into_iter()
        .partition(|probe| probe.question.protocol == Protocol::Sctp);
    let mut tasks = JoinSet::new();
    tasks.spawn_local(sctp(by_sctp, Arc::clone(patience)));
    for probe in others {
        let (token, patience) = (Rc::clone(&token), Arc::clone(patience));
        tasks.spawn_local(async move {
            let one = async {
                match probe.question.protocol {
                    Protocol::Tcp => tcp(probe.at(), &token).await,
                    _ => udp(probe.at(), &token).await,
                }
            };
            let answered = patience.wait(one).await;
            let outcome = answered.map_or(Outcome::Silent, |answered| probe.evaluate(&token, answered));
            Ok(Table::from([(probe.question, outcome)]))
        });
    }
    while let Some(done) = tasks.join_next().await {
        table.extend(done.map_err(io::Error::other)??);
    }
    Ok(table)
}

async fn tcp(to: SocketAddr, token: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(to).await?;
    // Closes with RST, so that hundreds of thousands of probes leave no sockets in TIME_WAIT.
    stream.set_zero_linger()?;
    stream.write_all(format!("{token}\n").as_bytes()).await?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).await?;
    Ok(line.trim_end().to_owned())
}

async fn udp(to: SocketAddr, token: &str) -> io::Result<String> {
    let socket = UdpSocket::bind(SocketAddr::new(any(to.is_ipv4()), 0)).await?;
    // Connected: answers from other addresses are ignored.
    socket.connect(to).await?;
    socket.send(token.as_bytes()).await?;
    let mut buffer = vec![0; 2048];
    let length = socket.recv(&mut buffer).await?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

pub(super) fn any(v4: bool) -> IpAddr {
    if v4 {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    }
}

/// All SCTP probes of a pod share one raw socket per family and are distinguished by their ports.
async fn sctp(probes: Vec<Probe>, patience: Arc<Patience>) -> io::Result<Table> {
    let (four, six): (Vec<_>, Vec<_>) = probes.into_iter().partition(|probe| probe.question.v4);
    let (mut table, other) = tokio::try_join!(
        sctp_of(&four, Sctp::open(any(true))?, &patience),
        sctp_of(&six, Sctp::open(any(false))?, &patience)
    )?;
    table.extend(other);
    Ok(table)
}

async fn sctp_of(probes: &[Probe], socket: Sctp, patience: &Patience) -> io::Result<Table> {
    let (mut table, mut open) = (Table::new(), HashMap::new());
    let first_port = fastrand::u16(10_000..30_000);
    for (port, probe) in (first_port..).zip(probes) {
        let token = fastrand::u32(1..);
        let init = Packet {
            source_port: port,
            destination_port: probe.question.port,
            tag: 0,
            answer: false,
            initiate_tag: token,
            text: token.to_string(),
        };
        match socket.send(probe.to, &init) {
            Ok(()) => {
                open.insert(port, (probe, token));
            }
            Err(error) => {
                table.insert(probe.question, Outcome::Odd(error.to_string()));
            }
        }
    }
    while !open.is_empty() {
        let Some(received) = patience.wait(socket.receive()).await else {
            break;
        };
        let (from, packet) = received?;
        let Some((probe, token)) = open.get(&packet.destination_port).copied() else {
            continue;
        };
        if packet.answer && from == probe.to && packet.source_port == probe.question.port && packet.tag == token {
            open.remove(&packet.destination_port);
            table.insert(probe.question, probe.evaluate(&token.to_string(), Ok(packet.text)));
        }
    }
    Ok(table)
}
