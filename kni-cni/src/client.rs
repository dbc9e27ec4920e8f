//! Calls the agent: limits the time, retries while the agent is away, and reports exactly what is known of the outcome.

use std::{
    error::Error as _,
    path::Path,
    time::{Duration, Instant},
};

use tonic::{
    Code, Request, Response, Status,
    transport::{Channel, Endpoint},
};

use crate::environment::Environment;

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);
/// Longest value of the runtime's trace, in bytes (the W3C's limit of baggage).
const MAX_TRACE: usize = 8192;

/// Time limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// Until a ready agent answers, each time it was away.
    pub(crate) connect: Duration,
    /// For all attempts together.
    pub(crate) total: Duration,
}

/// The outcome of a call that did not succeed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// No agent received it.
    Absent(String),
    /// An agent may have performed it, or not, or may still perform it.
    Unanswered(String),
    /// The agent's answer.
    Refused(Status),
}

/// The agent's socket, and the trace context that each call carries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client<'a> {
    socket: &'a Path,
    environment: &'a Environment,
}

impl<'a> Client<'a> {
    pub(crate) fn new(socket: &'a Path, environment: &'a Environment) -> Self {
        Self { socket, environment }
    }

    /// A message with the runtime's trace context.
    pub(crate) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        for (key, value) in &self.environment.trace {
            // An invalid header value must not fail the call.
            if let (true, Ok(value)) = (value.len() <= MAX_TRACE, value.parse()) {
                request.metadata_mut().insert(*key, value);
            }
        }
        request
    }

    /// Makes a call; retries while the agent is away or requests a retry.
    pub(crate) async fn call<T, F>(&self, patience: Patience, call: impl Fn(Channel) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let start = Instant::now();
        let end = start + patience.total;
        let mut heard = false;
        // Start of the time in which the agent has been away, or not ready.
        let mut away = start;
        loop {
            let channel = match self.connect((away + patience.connect).min(end)).await {
                Ok(channel) => channel,
                Err(reason) if heard => return Err(Failure::Unanswered(reason)),
                Err(reason) => return Err(Failure::Absent(reason)),
            };
            let left = end.saturating_duration_since(Instant::now());
            let Ok(answer) = tokio::time::timeout(left, call(channel)).await else {
                let reason = format!("kni-agent does not answer within {} ms", patience.total.as_millis());
                return Err(Failure::Unanswered(reason));
            };
            let failure = match answer {
                Ok(response) => return Ok(response.into_inner()),
                Err(status) if is_lost(&status) => {
                    if !heard {
                        // The agent was there: the wait for the next one starts now.
                        away = Instant::now();
                    }
                    heard = true;
                    Failure::Unanswered(format!("the connection to kni-agent broke: {}", status.message()))
                }
                Err(status) if status.code() == Code::Unavailable => Failure::Refused(status),
                Err(status) => return Err(Failure::Refused(status)),
            };
            if Instant::now() + PAUSE >= (away + patience.connect).min(end) {
                return Err(failure);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn connect(&self, until: Instant) -> Result<Channel, String> {
        let uri = format!("unix://{}", self.socket.display());
        let endpoint = Endpoint::from_shared(uri).map_err(|error| self.unreachable(&error))?;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match tokio::time::timeout(left, endpoint.connect()).await {
                Ok(Ok(channel)) => return Ok(channel),
                Ok(Err(error)) if Instant::now() + PAUSE >= until => return Err(self.unreachable(&error)),
                Ok(Err(_later)) => tokio::time::sleep(PAUSE).await,
                Err(_elapsed) => return Err(format!("kni-agent at {} does not answer", self.socket.display())),
            }
        }
    }

    fn unreachable(&self, error: &dyn std::error::Error) -> String {
        let mut text = format!("kni-agent cannot be reached at {}", self.socket.display());
        let mut next = error.source();
        let mut last = error.to_string();
        while let Some(cause) = next {
            last = cause.to_string();
            next = cause.source();
        }
        text.push_str(": ");
        text.push_str(&last);
        text
    }
}

/// Whether the status comes from a lost connection instead of the agent.
fn is_lost(status: &Status) -> bool {
    status.source().is_some()
}

impl Failure {
    pub(crate) fn reason(&self) -> String {
        match self {
            Self::Absent(reason) | Self::Unanswered(reason) => reason.clone(),
            Self::Refused(status) => status.message().to_owned(),
        }
    }
}
