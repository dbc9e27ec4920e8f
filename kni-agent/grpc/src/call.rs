//! Runs one call of a service to its end, survives its panic and writes one log line.

use std::{
    panic::AssertUnwindSafe,
    time::{Duration, Instant},
};

use futures::FutureExt as _;
use tonic::{Request, Response, Status, metadata::MetadataMap};

use super::{accept::Peer, status::one_line};

/// The log fields of a call. Contains no label and no annotation: their values may be secrets.
pub(super) struct Call {
    method: &'static str,
    /// Calls that change state are logged at level info, others at debug.
    changes: bool,
    pod: String,
    sandbox: String,
    client: Option<i32>,
    /// The trace context of the client (W3C Trace Context).
    traceparent: Option<String>,
}

impl Call {
    /// A read-only call.
    pub(super) fn query<T>(method: &'static str, request: &Request<T>) -> Self {
        let client = request.extensions().get::<Peer>().and_then(|peer| peer.pid);
        Self {
            method,
            changes: false,
            pod: String::new(),
            sandbox: String::new(),
            client,
            traceparent: traceparent(request.metadata()),
        }
    }

    /// A call that changes state.
    pub(super) fn change<T>(method: &'static str, request: &Request<T>) -> Self {
        Self {
            changes: true,
            ..Self::query(method, request)
        }
    }

    /// Sets the pod and the sandbox of the call, as the client sent them.
    pub(super) fn about(self, pod: impl std::fmt::Display, sandbox: &str) -> Self {
        Self {
            pod: one_line(&pod.to_string()),
            sandbox: one_line(sandbox),
            ..self
        }
    }

    /// Runs the work to its end, even if the client disconnects.
    pub(super) async fn run<T: Send + 'static>(
        self,
        work: impl Future<Output = Result<T, Status>> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let logged = async move {
            let started = Instant::now();
            // The panic hook has already logged the location and the message.
            let outcome = AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(|_panic| {
                Err(Status::internal(format!(
                    "{}: the agent failed; see its log",
                    self.method
                )))
            });
            self.log(started.elapsed(), outcome.as_ref().err());
            outcome
        };
        match kni_tasks::to_completion(logged).await {
            Ok(outcome) => outcome.map(Response::new),
            // Writing the log line has panicked.
            Err(panicked) => Err(Status::internal(panicked.to_string())),
        }
    }

    fn log(&self, took: Duration, failure: Option<&Status>) {
        let Self {
            method,
            pod,
            sandbox,
            client,
            traceparent,
            ..
        } = self;
        let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        match (failure, self.changes) {
            (Some(status), _) => {
                let (code, error) = (status.code(), status.message());
                tracing::warn!(
                    method,
                    pod,
                    sandbox,
                    client,
                    traceparent,
                    took_ms,
                    ?code,
                    error,
                    "call failed"
                );
            }
            (None, true) => tracing::info!(method, pod, sandbox, client, traceparent, took_ms, "call done"),
            (None, false) => tracing::debug!(method, pod, sandbox, client, traceparent, took_ms, "call done"),
        }
    }
}

/// The client's trace context, if it is valid: `00-<32 digits>-<16 digits>-<2 digits>`, in lowercase hexadecimal.
fn traceparent(metadata: &MetadataMap) -> Option<String> {
    let text = metadata.get("traceparent")?.to_str().ok()?;
    let lengths = text.split('-').map(str::len);
    let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b) || b == b'-';
    (lengths.eq([2, 32, 16, 2]) && text.bytes().all(digit)).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_trace_is_logged_as_one() {
        let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        for (value, logged) in [
            (trace, true),
            ("", false),
            ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", false),
            ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331", false),
            ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more", false),
            ("00-0af7651916cd43dd8448eb211c80319-cb7ad6b7169203331-01", false),
        ] {
            let mut metadata = MetadataMap::new();
            metadata.insert("traceparent", value.parse().unwrap());
            assert_eq!(traceparent(&metadata).is_some(), logged, "{value}");
        }
        assert_eq!(traceparent(&MetadataMap::new()), None);
    }
}
