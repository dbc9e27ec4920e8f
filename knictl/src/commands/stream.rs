//! Follows a stream of the agent until the reader or a signal ends it.

use std::{future::Future, pin::pin};

use tokio::select;
use tonic::{Response, Status, Streaming};

use crate::{client::answer, commands::Outcome, error::Error, terminal::Terminal};

/// Writes `text` of each message when it arrives, until `stop` or until the agent ends the stream.
pub(crate) async fn follow<M>(
    call: &'static str,
    opened: impl Future<Output = Result<Response<Streaming<M>>, Status>>,
    text: impl Fn(M) -> Result<String, Error>,
    terminal: &mut Terminal<'_>,
    stop: impl Future<Output = ()>,
) -> Result<Outcome, Error> {
    let watched = async {
        let mut messages = answer(call, opened).await?;
        while let Some(message) = messages
            .message()
            .await
            .map_err(|status| Error::of_call(call, &status))?
        {
            terminal.text(&text(message)?)?;
        }
        terminal.note("The agent ended the stream.");
        Ok(Outcome::Done)
    };
    select! {
        () = pin!(stop) => Ok(Outcome::Done),
        ended = watched => ended,
    }
}
