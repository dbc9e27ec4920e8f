//! Connects to the agent: one unix socket, one deadline per call.

use std::{
    future::{Future, ready},
    io::{self, ErrorKind},
    path::Path,
    time::Duration,
};

use hyper_util::rt::TokioIo;
use kni_proto::runtime::runtime_client::RuntimeClient;
use tokio::{net::UnixStream, time::timeout};
use tonic::{
    Response, Status,
    transport::{Channel, Endpoint, Uri},
};
use tower::service_fn;

use crate::error::Error;

/// The agent answers from memory; a slower answer means that it hangs.
const DEADLINE: Duration = Duration::from_secs(10);

/// A full node's drop counters (endpoints x directions x reasons) exceed gRPC's default limit of 4 MiB.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// The agent's own service.
pub(crate) type Runtime = RuntimeClient<Channel>;

/// Connects to the agent that serves on `socket`.
pub(crate) async fn connect(socket: &Path) -> Result<Runtime, Error> {
    // Connected here and not by tonic's connector, whose errors hide the reason.
    let stream = UnixStream::connect(socket)
        .await
        .map_err(|error| no_connection(socket, error))?;
    let mut stream = Some(TokioIo::new(stream));
    // A lost connection is an error that the operator must see, so there is no reconnect.
    let connector =
        service_fn(move |_: Uri| ready(stream.take().ok_or_else(|| io::Error::from(ErrorKind::NotConnected))));
    // The path is not a valid authority, and the agent ignores the name.
    let channel = Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
        .map_err(|source| Error::Protocol {
            path: socket.to_owned(),
            source,
        })?;
    Ok(RuntimeClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES))
}

/// Waits for the answer to `call`; [`Error::Silent`] if the deadline passes.
pub(crate) async fn answer<T>(
    call: &'static str,
    reply: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Error> {
    answer_within(DEADLINE, call, reply).await
}

async fn answer_within<T>(
    limit: Duration,
    call: &'static str,
    reply: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Error> {
    match timeout(limit, reply).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(Error::of_call(call, &status)),
        Err(_) => Err(Error::Silent { call, limit }),
    }
}

fn no_connection(socket: &Path, source: io::Error) -> Error {
    let path = socket.to_owned();
    let kind = source.kind();
    if kind == ErrorKind::PermissionDenied {
        Error::NeedsRoot { path }
    } else if matches!(kind, ErrorKind::NotFound | ErrorKind::ConnectionRefused) {
        Error::NoAgent { path }
    } else {
        Error::Connect { path, source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(kind: ErrorKind) -> String {
        no_connection(Path::new("/run/kni/kni.sock"), io::Error::from(kind)).to_string()
    }

    #[test]
    fn connection_errors_say_what_to_do() {
        let nobody = "no agent is serving on /run/kni/kni.sock: is kni-agent running?";
        assert_eq!(text(ErrorKind::NotFound), nobody);
        assert_eq!(text(ErrorKind::ConnectionRefused), nobody);
        assert_eq!(
            text(ErrorKind::PermissionDenied),
            "permission denied on /run/kni/kni.sock: knictl needs root"
        );
        assert!(text(ErrorKind::InvalidInput).starts_with("cannot connect to /run/kni/kni.sock: "));
    }

    #[tokio::test]
    async fn silent_agent_is_told() {
        let limit = Duration::from_secs(1);
        let error = answer_within::<()>(limit, "GetStatus", std::future::pending())
            .await
            .unwrap_err();
        assert_eq!(error.to_string(), "GetStatus: the agent did not answer within 1 s");
    }

    #[test]
    fn refused_calls_name_the_call() {
        let error = Error::of_call("ListMaps", &Status::unimplemented(""));
        assert_eq!(
            error.to_string(),
            "the agent does not know ListMaps: is it of another version than knictl?"
        );
        let error = Error::of_call("ListMaps", &Status::internal("no bpffs"));
        assert_eq!(error.to_string(), "ListMaps failed: no bpffs (Internal)");
    }
}
