//! Runs knictl in the pod of an agent, and forwards its output.

use clap::Parser as _;
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Status};
use kube::{Api, Client, api::AttachParams};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, BufReader, Lines},
    select,
};

use crate::{cli::Cli, commands::Outcome, error::Error, table::cut, terminal::Terminal};

/// The agent's container.
const CONTAINER: &str = "kni-agent";

/// Runs `knictl WORDS` in the pod until it ends, or `stop` resolves.
pub(super) async fn run(
    client: &Client,
    namespace: &str,
    pod: &str,
    words: &[String],
    terminal: &mut Terminal<'_>,
    stop: impl Future<Output = ()>,
) -> Result<Outcome, Error> {
    let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let command = std::iter::once("knictl").chain(words.iter().map(String::as_str));
    // The program in the pod writes into a pipe, so that its tables are not cut.
    let parsed = Cli::try_parse_from(command.clone());
    let is_table = parsed.is_ok_and(|cli| cli.command.is_table());
    let screen = terminal.width().filter(|_| is_table).unwrap_or(usize::MAX);
    let params = AttachParams::default().container(CONTAINER);
    let what = format!("running knictl in pod {namespace}/{pod}");
    let started = api.exec(pod, command, &params).await;
    let mut process = started.map_err(Error::of_request(what.clone()))?;
    let status = process.take_status();
    let mut out = process.stdout().map(lines);
    let mut err = process.stderr().map(lines);
    let mut stop = std::pin::pin!(stop);
    while out.is_some() || err.is_some() {
        select! {
            line = next(&mut out) => if let Some(line) = line? {
                terminal.text(&(cut(&line, screen) + "\n"))?;
            },
            line = next(&mut err) => if let Some(line) = line? {
                terminal.note(&line);
            },
            () = &mut stop => {
                process.abort();
                return Ok(Outcome::Done);
            }
        }
    }
    let ended = match status {
        Some(status) => status.await,
        None => None,
    };
    match ended {
        Some(status) => code(&status)
            .map(Outcome::Ended)
            .ok_or_else(|| Error::Node(said(&what, &status))),
        None => Err(Error::Node(format!("{what}: the connection ended"))),
    }
}

/// What knictl wrote to its standard error, as one line.
pub(super) fn remarks(err: &[u8]) -> String {
    let text = String::from_utf8_lossy(err);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.join("; ")
}

fn lines<R: AsyncRead + Unpin>(stream: R) -> Lines<BufReader<R>> {
    BufReader::new(stream).lines()
}

/// The next line; at its end the stream is removed, and `None` returned. Never resolves without a stream.
async fn next<R: AsyncRead + Unpin>(stream: &mut Option<Lines<BufReader<R>>>) -> Result<Option<String>, Error> {
    let Some(lines) = stream else {
        return std::future::pending().await;
    };
    let line = lines.next_line().await?;
    if line.is_none() {
        *stream = None;
    }
    Ok(line)
}

/// The exit code of a process, parsed from the API server's status.
fn code(status: &Status) -> Option<u8> {
    if status.status.as_deref() == Some("Success") {
        return Some(0);
    }
    let causes = status.details.as_ref().and_then(|details| details.causes.as_ref())?;
    let exit = causes
        .iter()
        .find(|cause| cause.reason.as_deref() == Some("ExitCode"))?;
    exit.message.as_deref()?.parse().ok()
}

fn said(what: &str, status: &Status) -> String {
    format!("{what}: {}", status.message.as_deref().unwrap_or("it failed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_remarks_become_one_line() {
        assert_eq!(remarks(b"error: no\n\n  Usage: knictl\n"), "error: no; Usage: knictl");
    }

    #[test]
    fn the_exit_code_is_read_from_the_causes() {
        let status = |text: &str| serde_json::from_str::<Status>(text).unwrap();
        assert_eq!(code(&status(r#"{"status":"Success"}"#)), Some(0));
        let failed = r#"{"status":"Failure","reason":"NonZeroExitCode","message":"it failed",
            "details":{"causes":[{"reason":"ExitCode","message":"2"}]}}"#;
        assert_eq!(code(&status(failed)), Some(2));
        let broken = status(r#"{"status":"Failure","message":"no such program"}"#);
        assert_eq!(code(&broken), None);
        assert_eq!(said("x", &broken), "x: no such program");
    }
}
