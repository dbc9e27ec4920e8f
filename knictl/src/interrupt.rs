//! Detects the end of a stream's use: a signal, or a reader that closed the output.

use std::{fs::File, future::pending, io, os::fd::AsFd};

use tokio::{
    io::Interest,
    net::unix::pipe::Sender,
    select,
    signal::unix::{SignalKind, signal},
};

/// Returns on SIGINT, SIGTERM, or when the reader of standard output closes it. Signals keep their default effect until
/// the first poll.
pub(crate) async fn interrupted() {
    select! {
        () = signalled(SignalKind::interrupt()) => {}
        () = signalled(SignalKind::terminate()) => {}
        () = abandoned(io::stdout()) => {}
    }
}

async fn signalled(kind: SignalKind) {
    match signal(kind) {
        Ok(mut arrivals) => {
            arrivals.recv().await;
        }
        // Without a handler the signal ends the process by its default effect.
        Err(_) => pending().await,
    }
}

/// Returns when the reader closes the pipe, which a write alone would notice only at the next event. Never returns for
/// files and other outputs that cannot be watched.
async fn abandoned(output: impl AsFd) {
    let Ok(pipe) = watched(output) else {
        return pending().await;
    };
    if pipe.ready(Interest::ERROR).await.is_err() {
        pending::<()>().await;
    }
}

fn watched(output: impl AsFd) -> io::Result<Sender> {
    // Unchecked keeps the pipe in blocking mode, which other writers of the pipe rely on; nothing is written through
    // this end.
    Sender::from_file_unchecked(File::from(output.as_fd().try_clone_to_owned()?))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn closed_pipe_is_noticed() {
        let (reader, writer) = io::pipe().unwrap();
        let mut waiting = std::pin::pin!(abandoned(&writer));
        timeout(Duration::from_millis(50), &mut waiting)
            .await
            .expect_err("the reader is there");
        drop(reader);
        timeout(Duration::from_secs(5), waiting)
            .await
            .expect("the reader is gone");
    }

    #[tokio::test]
    async fn file_is_never_abandoned() {
        let file = tempfile::tempfile().unwrap();
        timeout(Duration::from_millis(50), abandoned(&file))
            .await
            .expect_err("a file has no reader");
    }
}
