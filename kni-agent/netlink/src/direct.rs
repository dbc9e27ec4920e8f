//! Exchanges requests with rtnetlink on the calling thread, for steps that each wait for the one before.

use std::{borrow::Cow, path::Path, sync::Arc};

use netlink_packet_core::{NLM_F_ACK, NetlinkMessage};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::sys::{
    socket::{setsockopt, sockopt},
    time::TimeVal,
};

use super::{
    Result,
    connection::{ANSWER_TIMEOUT, Context, Outcome, Request, answers, set_options},
    error::{Error, Place, Refusal},
    netns::{Netns, on_own_thread},
};

/// Holds the longest answer: one link with its attributes.
const ANSWER_SIZE: usize = 32 * 1024;
/// Each message begins at a multiple of this (`NLMSG_ALIGNTO`).
const ALIGNMENT: usize = 4;
/// `struct nlmsghdr`.
const HEADER: usize = 16;

/// A connection to rtnetlink that the calling thread drives: an exchange costs its system calls and the kernel's work,
/// and no change of threads. The thread waits inside the kernel, so it must be one that may.
#[derive(Debug)]
pub struct DirectNetlink {
    socket: Socket,
    netns: Option<Arc<Path>>,
    /// Of the last request.
    sequence: u32,
    buffer: Vec<u8>,
}

/// The way from a thread of [`Netns::visit`] into the namespace.
#[derive(Debug)]
pub struct Entrance(Netns);

impl Entrance {
    /// Moves the calling thread into the namespace, where it stays, and connects to rtnetlink there.
    pub fn enter(&self) -> Result<DirectNetlink> {
        self.0.enter_here()?;
        DirectNetlink::connect(Some(self.0.shared_path()))
    }
}

impl Netns {
    /// Runs `work` on a thread of its own, which begins in the caller's namespace and may enter this one: for steps on
    /// both sides that each wait for the one before. Fails after 30 s; the work, which cannot be stopped inside the
    /// kernel, then continues.
    pub async fn visit<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Entrance) -> T + Send + 'static,
    {
        let place = Place::new("work in namespace").path(self.path());
        let entrance = Entrance(self.clone());
        let working = on_own_thread(&place, move || work(&entrance));
        let done = tokio::time::timeout(ANSWER_TIMEOUT, working).await;
        done.unwrap_or_else(|_elapsed| {
            Err(Error::Timeout {
                place: place.clone(),
                seconds: ANSWER_TIMEOUT.as_secs(),
            })
        })
    }
}

impl DirectNetlink {
    /// Connects in the network namespace of the calling thread.
    pub fn new() -> Result<Self> {
        Self::connect(None)
    }

    /// `netns` names the namespace in errors.
    fn connect(netns: Option<Arc<Path>>) -> Result<Self> {
        let place = || Place::new("connect to rtnetlink").netns(netns.clone());
        let open = || {
            let socket = Socket::new(NETLINK_ROUTE)?;
            set_options(&socket)?;
            let limit = TimeVal::new(i64::try_from(ANSWER_TIMEOUT.as_secs()).unwrap_or(i64::MAX), 0);
            setsockopt(&socket, sockopt::ReceiveTimeout, &limit)?;
            socket.connect(&SocketAddr::new(0, 0))?;
            Ok(socket)
        };
        let socket = open().map_err(|error: std::io::Error| place().refused(error))?;
        Ok(Self {
            socket,
            netns,
            sequence: 0,
            buffer: Vec::new(),
        })
    }

    /// Error contexts in this connection's namespace.
    pub(super) fn places(&self) -> impl Fn(Cow<'static, str>) -> Place + use<> {
        let netns = self.netns.clone();
        move |operation| Place::new(operation).netns(netns.clone())
    }

    /// As [`Netlink::apply`](super::Netlink).
    pub(super) fn apply(&mut self, requests: Vec<Request>) -> Result<()> {
        self.ask(requests).map(drop)
    }

    /// Sends all requests in one datagram, which the kernel performs in order and independently before `send` returns,
    /// and returns their answers in order. Fails with the first error that is not ignored. Only the last request asks
    /// for an acknowledgement: the kernel reports errors in any case (`netlink_rcv_skb`), and each acknowledgement
    /// costs a system call.
    pub(super) fn ask(&mut self, requests: Vec<Request>) -> Result<Vec<RouteNetlinkMessage>> {
        let mut contexts: Vec<Context> = Vec::with_capacity(requests.len());
        let mut datagram = Vec::new();
        let first = self.sequence.wrapping_add(1);
        let count = requests.len();
        for (index, request) in requests.into_iter().enumerate() {
            let (context, mut message) = request.split();
            if index + 1 < count {
                message.header.flags &= !NLM_F_ACK;
            }
            self.sequence = self.sequence.wrapping_add(1);
            message.header.sequence_number = self.sequence;
            message.finalize();
            let begin = datagram.len();
            datagram.resize(begin + message.buffer_len().next_multiple_of(ALIGNMENT), 0);
            if let Some(space) = datagram.get_mut(begin..) {
                message.serialize(space);
            }
            contexts.push(context);
        }
        let Some((place, _)) = contexts.first().cloned() else {
            return Ok(Vec::new());
        };
        self.socket
            .send(&datagram, 0)
            .map_err(|error| place.clone().refused(error))?;
        let outcomes = self.receive(&place, first, contexts.len())?;
        answers(contexts, outcomes)
    }

    /// Until the last request is answered.
    fn receive(&mut self, place: &Place, first: u32, count: usize) -> Result<Vec<Outcome>> {
        let mut outcomes: Vec<Outcome> = std::iter::repeat_with(Outcome::default).take(count).collect();
        loop {
            self.buffer.clear();
            // Not before the first request: some connections are kept for later.
            self.buffer.reserve(ANSWER_SIZE);
            let received = self.socket.recv(&mut self.buffer, 0);
            received.map_err(|error| {
                if error.kind() == std::io::ErrorKind::WouldBlock {
                    let (place, seconds) = (place.clone(), ANSWER_TIMEOUT.as_secs());
                    Error::Timeout { place, seconds }
                } else {
                    place.clone().refused(error)
                }
            })?;
            for answer in messages(&self.buffer) {
                let answer = NetlinkMessage::deserialize(answer).map_err(|error| {
                    place.clone().refused(Refusal {
                        errno: libc::EPROTO,
                        detail: format!(": {error}"),
                    })
                })?;
                let index = answer.header.sequence_number.wrapping_sub(first);
                let index = usize::try_from(index).unwrap_or(usize::MAX);
                // None for the answer to an earlier request that timed out.
                let Some(outcome) = outcomes.get_mut(index) else {
                    continue;
                };
                if outcome.take(answer.payload) && index + 1 == count {
                    return Ok(outcomes);
                }
            }
        }
    }
}

/// The messages of a datagram; an incomplete one at the end is left out.
fn messages(mut datagram: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let length: [u8; 4] = datagram.get(..HEADER)?.get(..4)?.try_into().ok()?;
        let length = usize::try_from(u32::from_ne_bytes(length)).ok()?;
        if length < HEADER {
            return None;
        }
        let message = datagram.get(..length)?;
        datagram = datagram.get(length.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
        Some(message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datagram_is_read_message_by_message_and_never_beyond_its_end() {
        let message = |length: u32| {
            let mut bytes = vec![0; usize::try_from(length).unwrap().next_multiple_of(ALIGNMENT)];
            bytes[..4].copy_from_slice(&length.to_ne_bytes());
            bytes
        };
        let two = [message(18), message(16)].concat();
        assert_eq!(messages(&two).map(<[u8]>::len).collect::<Vec<_>>(), [18, 16]);
        for forged in [0, 15, 17, u32::MAX] {
            let mut bytes = message(16);
            bytes[..4].copy_from_slice(&forged.to_ne_bytes());
            assert_eq!(messages(&bytes).count(), 0, "{forged}");
        }
        assert_eq!(messages(&[1, 2, 3]).count(), 0);
    }
}
