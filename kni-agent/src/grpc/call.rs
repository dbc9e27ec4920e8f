//! One call of a service: runs it apart from its connection, survives a panic, writes one log line.

use std::{
    panic::AssertUnwindSafe,
    time::{Duration, Instant},
};

use futures::FutureExt as _;
use tonic::{Request, Response, Status};

use super::{accept::Peer, status::one_line};

/// What a log line says about a call. Holds no label and no annotation: their values may be secrets.
pub(super) struct Call {
    method: &'static str,
    /// Calls that change something are logged at level info, others at debug.
    changes: bool,
    pod: String,
    sandbox: String,
    client: Option<i32>,
}

impl Call {
    /// A call that only asks.
    pub(super) fn query<T>(method: &'static str, request: &Request<T>) -> Self {
        let client = request.extensions().get::<Peer>().and_then(|peer| peer.pid);
        Self {
            method,
            changes: false,
            pod: String::new(),
            sandbox: String::new(),
            client,
        }
    }

    /// A call that changes something.
    pub(super) fn change<T>(method: &'static str, request: &Request<T>) -> Self {
        Self {
            changes: true,
            ..Self::query(method, request)
        }
    }

    /// Names what the call is about, as the client says it.
    pub(super) fn about(self, pod: impl std::fmt::Display, sandbox: &str) -> Self {
        Self {
            pod: one_line(&pod.to_string()),
            sandbox: one_line(sandbox),
            ..self
        }
    }

    /// Runs the work to its end, even if the client hangs up meanwhile.
    pub(super) async fn run<T: Send + 'static>(
        self,
        work: impl Future<Output = Result<T, Status>> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let task = tokio::spawn(async move {
            let started = Instant::now();
            // The panic hook has already told where and why.
            let outcome = AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(|_panic| {
                Err(Status::internal(format!(
                    "{}: the agent failed; see its log",
                    self.method
                )))
            });
            self.log(started.elapsed(), outcome.as_ref().err());
            outcome
        });
        match task.await {
            Ok(outcome) => outcome.map(Response::new),
            // It cannot have panicked, so the runtime is on its way down.
            Err(_cancelled) => Err(Status::unavailable("the agent is stopping: try again")),
        }
    }

    fn log(&self, took: Duration, failure: Option<&Status>) {
        let Self {
            method,
            pod,
            sandbox,
            client,
            ..
        } = self;
        let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        match (failure, self.changes) {
            (Some(status), _) => {
                let (code, error) = (status.code(), status.message());
                tracing::warn!(method, pod, sandbox, client, took_ms, ?code, error, "call failed");
            }
            (None, true) => tracing::info!(method, pod, sandbox, client, took_ms, "call done"),
            (None, false) => tracing::debug!(method, pod, sandbox, client, took_ms, "call done"),
        }
    }
}
