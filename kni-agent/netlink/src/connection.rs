//! The conversation with rtnetlink: sends requests, matches the answers, turns refusals into errors.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "rtnetlink is open-ended: what was not asked for is skipped"
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
use netlink_sys::{AsyncSocket, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE};
use rtnetlink::proto::{ConnectionHandle, NetlinkCodec, from_socket_with_codec};
use tokio::{runtime, time::timeout};

use super::{
    Netns, Result,
    error::{Error, Place, Refusal},
};

/// The kernel answers at once, but may wait long for its own lock when hundreds of links come and go.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a listing is repeated that another one, or a change, disturbed.
const DUMP_TRIES: u32 = 50;
const DUMP_PAUSE: Duration = Duration::from_millis(2);
/// `NLMSGERR_ATTR_MSG`: the kernel's explanation in an acknowledgement.
const EXPLANATION: u16 = 1;

/// A connection to rtnetlink in one network namespace. Clones share it; the socket closes after the last one is
/// dropped. It keeps its namespace alive, so it must not be kept for a pod.
///
/// The kernel works inside `sendmsg`, up to tens of milliseconds: connections are driven by two threads of this module,
/// one for teardown and one for the rest, so that neither a worker of the caller's runtime nor an attach is held up.
/// The caller's runtime must have its timer enabled.
#[derive(Debug, Clone)]
pub struct Netlink {
    connection: ConnectionHandle<RouteNetlinkMessage>,
    /// A socket can serve one listing at a time (the kernel says EBUSY to a second one).
    listing: Arc<tokio::sync::Mutex<()>>,
    netns: Option<Arc<Path>>,
}

/// One request, the place that its error will name, and the refusals that are as good as success.
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
}

/// What the kernel said to one request.
#[derive(Default)]
struct Outcome {
    messages: Vec<RouteNetlinkMessage>,
    disturbed: bool,
    refusal: Option<Refusal>,
}

impl Netlink {
    /// Connects in the network namespace of the calling thread.
    pub fn new() -> Result<Self> {
        Self::connect(None, &DRIVER)
    }

    /// As [`Self::new`], for deleting links: whoever uses the other connections does not wait for it.
    pub fn for_teardown() -> Result<Self> {
        Self::connect(None, &TEARDOWN_DRIVER)
    }

    /// Connects inside `netns`; the handle itself may be used anywhere. Costs about 0.2 ms.
    pub async fn in_namespace(netns: &Netns) -> Result<Self> {
        let path = netns.shared_path();
        netns.run(move || Self::connect(Some(path), &DRIVER)).await?
    }

    /// The runtime that drives connections of the usual kind.
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
            listing: Arc::default(),
            netns,
        })
    }

    /// A place in this connection's namespace.
    pub(super) fn place(&self, operation: impl Into<std::borrow::Cow<'static, str>>) -> Place {
        Place::new(operation).netns(self.netns.clone())
    }

    /// Sends all requests in one datagram; the kernel carries them out in order, each on its own. The first refusal
    /// that is not forgiven is the result.
    pub(super) async fn apply(&self, requests: Vec<Request>) -> Result<()> {
        self.ask(requests).await.map(drop)
    }

    /// As [`Self::apply`], for requests that are answered; all answers in order.
    pub(super) async fn ask(&self, requests: Vec<Request>) -> Result<Vec<RouteNetlinkMessage>> {
        let mut judges = Vec::with_capacity(requests.len());
        let mut messages = Vec::with_capacity(requests.len());
        for request in requests {
            messages.push(envelope(request.message, request.flags | NLM_F_ACK));
            judges.push((request.place, request.forgive));
        }
        let Some((first, _)) = judges.first() else {
            return Ok(Vec::new());
        };
        let outcomes = self.exchange(first, messages).await?;
        let mut answers = Vec::new();
        for ((place, forgive), outcome) in judges.into_iter().zip(outcomes) {
            if let Some(refusal) = outcome.refusal.filter(|refusal| !forgive.contains(&refusal.errno)) {
                return Err(place.refused(refusal));
            }
            answers.extend(outcome.messages);
        }
        Ok(answers)
    }

    /// Lists objects, repeating until the listing is undisturbed.
    pub(super) async fn dump(&self, request: Request) -> Result<Vec<RouteNetlinkMessage>> {
        let Request {
            place,
            message,
            forgive,
            ..
        } = request;
        let _turn = self.listing.lock().await;
        for _try in 0..DUMP_TRIES {
            let outcomes = self
                .exchange(&place, vec![envelope(message.clone(), NLM_F_DUMP)])
                .await?;
            let outcome = outcomes.into_iter().next().unwrap_or_default();
            match outcome.refusal {
                None if !outcome.disturbed => return Ok(outcome.messages),
                Some(refusal) if forgive.contains(&refusal.errno) => return Ok(outcome.messages),
                // A listing whose caller went away is still running on this socket.
                None
                | Some(Refusal {
                    errno: libc::EBUSY | libc::EINTR,
                    ..
                }) => tokio::time::sleep(DUMP_PAUSE).await,
                Some(refusal) => return Err(place.refused(refusal)),
            }
        }
        let detail = ": the listing was disturbed again and again".to_owned();
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
        let wanted = messages.len();
        let mut answers = self
            .connection
            .request_batch(messages, SocketAddr::new(0, 0))
            .map_err(|_closed| ended())?;
        let collect = async {
            let mut outcomes = Vec::with_capacity(wanted);
            let mut current = Outcome::default();
            while outcomes.len() < wanted {
                let answer = answers.next().await?;
                current.disturbed |= answer.header.flags & NLM_F_DUMP_INTR != 0;
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
    fn take(&mut self, payload: NetlinkPayload<RouteNetlinkMessage>) -> bool {
        match payload {
            NetlinkPayload::InnerMessage(message) => {
                self.messages.push(message);
                return false;
            }
            NetlinkPayload::Error(error) if error.code.is_some() => {
                self.refusal = Some(Refusal {
                    errno: error.raw_code().abs(),
                    detail: explanation(&error),
                });
            }
            NetlinkPayload::Done(done) if done.code < 0 => {
                self.refusal = Some(Refusal {
                    errno: -done.code,
                    detail: String::new(),
                });
            }
            NetlinkPayload::Overrun(_) => self.disturbed = true,
            _ => {}
        }
        true
    }
}

fn envelope(message: RouteNetlinkMessage, flags: u16) -> NetlinkMessage<RouteNetlinkMessage> {
    let mut envelope = NetlinkMessage::from(message);
    envelope.header.flags = NLM_F_REQUEST | flags;
    envelope
}

/// The kernel's own words in a refusal, as `: words`. They follow the header of the refused request, which alone is
/// sent back (`NETLINK_CAP_ACK`).
fn explanation(error: &ErrorMessage) -> String {
    const REQUEST_HEADER: usize = 16;
    let attributes = error.header.get(REQUEST_HEADER..).unwrap_or_default();
    NlasIterator::new(attributes)
        .filter_map(std::result::Result::ok)
        .find(|attribute| attribute.kind() == EXPLANATION)
        .map(|attribute| {
            let words = String::from_utf8_lossy(attribute.value());
            format!(": {}", words.trim_end_matches('\0'))
        })
        .unwrap_or_default()
}

fn open_socket() -> io::Result<TokioSocket> {
    let socket = TokioSocket::new(NETLINK_ROUTE)?;
    let options = socket.socket_ref();
    options.set_cap_ack(true)?;
    options.set_ext_ack(true)?;
    // Filters of listings are honoured only by a strict socket; also, no attribute is silently ignored.
    options.set_netlink_get_strict_chk(true)?;
    Ok(socket)
}

/// A thread with a runtime that drives connections, started at its first use.
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
