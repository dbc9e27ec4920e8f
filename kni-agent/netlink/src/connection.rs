//! Exchanges requests and answers with rtnetlink and turns refusals into errors.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "rtnetlink is open-ended: other messages are skipped"
)]

use std::{
    future::pending,
    io,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use futures::StreamExt;
use netlink_packet_core::{
    ErrorMessage, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload, NlasIterator,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{AsyncSocket, Socket, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE};
use rtnetlink::proto::{ConnectionHandle, NetlinkCodec, from_socket_with_codec};
use tokio::{runtime, time::timeout};

use super::{
    Netns, Result,
    error::{Error, Place, Refusal},
};

/// The kernel usually answers at once, but may wait long for its own lock while hundreds of links are created or
/// deleted.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Retries of a dump that another one, or a change, interrupted.
const DUMP_TRIES: u32 = 50;
const DUMP_PAUSE: Duration = Duration::from_millis(2);
/// `NLMSGERR_ATTR_MSG`: the kernel's message in an acknowledgement.
const MESSAGE_ATTRIBUTE: u16 = 1;

/// A connection to rtnetlink in one network namespace. Clones share it; the socket closes after the last one is
/// dropped. It keeps its namespace alive, so do not store it for a pod.
///
/// The kernel works inside `sendmsg`, up to tens of milliseconds: two threads of this module drive the connections, one
/// for teardown and one for the rest, so that neither a worker of the caller's runtime nor an attach is delayed. The
/// caller's runtime must have its timer enabled.
#[derive(Debug, Clone)]
pub struct Netlink {
    connection: ConnectionHandle<RouteNetlinkMessage>,
    /// A socket serves one dump at a time (EBUSY for a second one).
    dumping: Arc<tokio::sync::Mutex<()>>,
    netns: Option<Arc<Path>>,
}

/// One request, the context of its error, and the errors that count as success.
pub(super) struct Request {
    pub(super) place: Place,
    pub(super) message: RouteNetlinkMessage,
    pub(super) flags: u16,
    pub(super) forgive: &'static [i32],
}

impl Request {
    pub(super) fn new(place: Place, message: RouteNetlinkMessage, flags: u16) -> Self {
        Self {
            place,
            message,
            flags,
            forgive: &[],
        }
    }

    pub(super) fn forgive(mut self, errnos: &'static [i32]) -> Self {
        self.forgive = errnos;
        self
    }

    /// The message, which asks for an acknowledgement, and its context.
    pub(super) fn split(self) -> (Context, NetlinkMessage<RouteNetlinkMessage>) {
        let message = envelope(self.message, self.flags | NLM_F_ACK);
        ((self.place, self.forgive), message)
    }
}

/// The kernel's answer to one request.
#[derive(Default)]
pub(super) struct Outcome {
    messages: Vec<RouteNetlinkMessage>,
    interrupted: bool,
    refusal: Option<Refusal>,
}

/// Where a request was sent, and the errors that count as success.
pub(super) type Context = (Place, &'static [i32]);

impl Netlink {
    /// Connects in the network namespace of the calling thread.
    pub fn new() -> Result<Self> {
        Self::connect(None, &DRIVER)
    }

    /// As [`Self::new`], for deleting links, so that other connections do not wait for deletions.
    pub fn for_teardown() -> Result<Self> {
        Self::connect(None, &TEARDOWN_DRIVER)
    }

    /// Connects inside `netns`; the handle itself may be used anywhere. Costs about 0.2 ms.
    pub async fn in_namespace(netns: &Netns) -> Result<Self> {
        let path = netns.shared_path();
        netns.run(move || Self::connect(Some(path), &DRIVER)).await?
    }

    /// The runtime that drives connections other than teardown.
    pub(super) fn driver() -> io::Result<runtime::Handle> {
        DRIVER.handle()
    }

    fn connect(netns: Option<Arc<Path>>, driver: &Driver) -> Result<Self> {
        let place = || Place::new("connect to rtnetlink").netns(netns.clone());
        let driver = driver.handle().map_err(|error| place().refused(error))?;
        let _in_driver = driver.enter();
        let socket = open_socket().map_err(|error| place().refused(error))?;
        let (mut connection, handle, _unsolicited) = from_socket_with_codec::<_, _, NetlinkCodec>(socket);
        connection.set_forward_ack(true);
        connection.set_forward_done(true);
        driver.spawn(connection);
        Ok(Self {
            connection: handle,
            dumping: Arc::default(),
            netns,
        })
    }

    /// An error context in this connection's namespace.
    pub(super) fn place(&self, operation: impl Into<std::borrow::Cow<'static, str>>) -> Place {
        Place::new(operation).netns(self.netns.clone())
    }

    /// Sends all requests in one datagram; the kernel performs them in order and independently. Fails with the first
    /// error that is not ignored.
    pub(super) async fn apply(&self, requests: Vec<Request>) -> Result<()> {
        self.ask(requests).await.map(drop)
    }

    /// As [`Self::apply`], for requests with answers; returns all answers in order.
    pub(super) async fn ask(&self, requests: Vec<Request>) -> Result<Vec<RouteNetlinkMessage>> {
        let (contexts, messages): (Vec<Context>, Vec<_>) = requests.into_iter().map(Request::split).unzip();
        let Some((first, _)) = contexts.first() else {
            return Ok(Vec::new());
        };
        let outcomes = self.exchange(first, messages).await?;
        answers(contexts, outcomes)
    }

    /// Lists objects, repeating until the dump is consistent.
    pub(super) async fn dump(&self, request: Request) -> Result<Vec<RouteNetlinkMessage>> {
        let Request {
            place,
            message,
            forgive,
            ..
        } = request;
        let _turn = self.dumping.lock().await;
        for _try in 0..DUMP_TRIES {
            let outcomes = self
                .exchange(&place, vec![envelope(message.clone(), NLM_F_DUMP)])
                .await?;
            let outcome = outcomes.into_iter().next().unwrap_or_default();
            match outcome.refusal {
                None if !outcome.interrupted => return Ok(outcome.messages),
                Some(refusal) if forgive.contains(&refusal.errno) => return Ok(outcome.messages),
                // A dump whose caller was dropped is still running on this socket.
                None
                | Some(Refusal {
                    errno: libc::EBUSY | libc::EINTR,
                    ..
                }) => tokio::time::sleep(DUMP_PAUSE).await,
                Some(refusal) => return Err(place.refused(refusal)),
            }
        }
        let detail = ": every dump was interrupted".to_owned();
        Err(place.refused(Refusal {
            errno: libc::EAGAIN,
            detail,
        }))
    }

    async fn exchange(
        &self,
        place: &Place,
        messages: Vec<NetlinkMessage<RouteNetlinkMessage>>,
    ) -> Result<Vec<Outcome>> {
        let ended = || Error::Ended {
            place: place.clone(),
            what: "the rtnetlink connection",
        };
        let count = messages.len();
        let mut answers = self
            .connection
            .request_batch(messages, SocketAddr::new(0, 0))
            .map_err(|_closed| ended())?;
        let collect = async {
            let mut outcomes = Vec::with_capacity(count);
            let mut current = Outcome::default();
            while outcomes.len() < count {
                let answer = answers.next().await?;
                current.interrupted |= answer.header.flags & NLM_F_DUMP_INTR != 0;
                if current.take(answer.payload) {
                    outcomes.push(std::mem::take(&mut current));
                }
            }
            Some(outcomes)
        };
        match timeout(ANSWER_TIMEOUT, collect).await {
            Ok(outcomes) => outcomes.ok_or_else(ended),
            Err(_elapsed) => Err(Error::Timeout {
                place: place.clone(),
                seconds: ANSWER_TIMEOUT.as_secs(),
            }),
        }
    }
}

impl Outcome {
    /// Adds one message of the answer; true if it was the last one.
    pub(super) fn take(&mut self, payload: NetlinkPayload<RouteNetlinkMessage>) -> bool {
        match payload {
            NetlinkPayload::InnerMessage(message) => {
                self.messages.push(message);
                return false;
            }
            NetlinkPayload::Error(error) if error.code.is_some() => {
                self.refusal = Some(Refusal {
                    errno: error.raw_code().abs(),
                    detail: kernel_message(&error),
                });
            }
            NetlinkPayload::Done(done) if done.code < 0 => {
                self.refusal = Some(Refusal {
                    errno: -done.code,
                    detail: String::new(),
                });
            }
            NetlinkPayload::Overrun(_) => self.interrupted = true,
            _ => {}
        }
        true
    }
}

/// The answers to all requests in order, or the first error that is not ignored.
pub(super) fn answers(contexts: Vec<Context>, outcomes: Vec<Outcome>) -> Result<Vec<RouteNetlinkMessage>> {
    let mut answers = Vec::new();
    for ((place, forgive), outcome) in contexts.into_iter().zip(outcomes) {
        if let Some(refusal) = outcome.refusal.filter(|refusal| !forgive.contains(&refusal.errno)) {
            return Err(place.refused(refusal));
        }
        answers.extend(outcome.messages);
    }
    Ok(answers)
}

fn envelope(message: RouteNetlinkMessage, flags: u16) -> NetlinkMessage<RouteNetlinkMessage> {
    let mut envelope = NetlinkMessage::from(message);
    envelope.header.flags = NLM_F_REQUEST | flags;
    envelope
}

/// The kernel's message in a refusal, with a leading `: `. It follows the header of the refused request, the only part
/// that the kernel returns (`NETLINK_CAP_ACK`).
fn kernel_message(error: &ErrorMessage) -> String {
    const REQUEST_HEADER: usize = 16;
    let attributes = error.header.get(REQUEST_HEADER..).unwrap_or_default();
    NlasIterator::new(attributes)
        .filter_map(std::result::Result::ok)
        .find(|attribute| attribute.kind() == MESSAGE_ATTRIBUTE)
        .map(|attribute| {
            let message = String::from_utf8_lossy(attribute.value());
            format!(": {}", message.trim_end_matches('\0'))
        })
        .unwrap_or_default()
}

fn open_socket() -> io::Result<TokioSocket> {
    let socket = TokioSocket::new(NETLINK_ROUTE)?;
    set_options(socket.socket_ref())?;
    Ok(socket)
}

pub(super) fn set_options(socket: &Socket) -> io::Result<()> {
    socket.set_cap_ack(true)?;
    socket.set_ext_ack(true)?;
    // Only a strict socket applies the filters of dumps; it also rejects unknown attributes.
    socket.set_netlink_get_strict_chk(true)
}

/// A thread with a runtime that drives connections, started on first use.
struct Driver {
    name: &'static str,
    handle: Mutex<Option<runtime::Handle>>,
}

static DRIVER: Driver = Driver::new("rtnetlink");
static TEARDOWN_DRIVER: Driver = Driver::new("rtnl-teardown");

impl Driver {
    const fn new(name: &'static str) -> Self {
        Self {
            name,
            handle: Mutex::new(None),
        }
    }

    fn handle(&self) -> io::Result<runtime::Handle> {
        let mut handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = handle.as_ref() {
            return Ok(running.clone());
        }
        let runtime = runtime::Builder::new_current_thread().enable_io().build()?;
        let started = runtime.handle().clone();
        thread::Builder::new()
            .name(self.name.to_owned())
            .spawn(move || runtime.block_on(pending::<()>()))?;
        *handle = Some(started.clone());
        Ok(started)
    }
}
