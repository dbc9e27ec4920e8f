//! GC: reports the runtime's remaining attachments to the agent.

use kni_proto::runtime::{CniAttachment, CollectGarbageRequest, runtime_client::RuntimeClient};

use crate::{
    client::{Client, Failure, Patience},
    config::Config,
    error::{CniError, ErrorCode},
};

/// A runtime that sends no list frees nothing: its libraries omit the list when they were given none.
pub(super) async fn run(client: Client<'_>, config: &Config) -> Result<(), CniError> {
    let Some(valid) = config.valid_attachments() else {
        return Ok(());
    };
    let attachments = valid.into_iter().map(|valid| CniAttachment {
        container_id: valid.container,
        ifname: valid.ifname,
    });
    let wanted = CollectGarbageRequest {
        cni_network: config.name.clone(),
        attachments: attachments.collect(),
        began_ns: since_boot_ns()?,
    };
    let patience = Patience {
        connect: config.timeouts.connect(),
        total: config.timeouts.gc(),
    };
    let collect = |channel| {
        let request = client.request(wanted.clone());
        async move { RuntimeClient::new(channel).collect_garbage(request).await }
    };
    let answer = client.call(patience, collect).await.map_err(|failure| match failure {
        Failure::Refused(status) => CniError::refused("CollectGarbage", &status),
        Failure::Absent(reason) | Failure::Unanswered(reason) => CniError::new(ErrorCode::TryAgainLater, reason),
    })?;
    match answer.errors.split_first() {
        None => Ok(()),
        Some((first, rest)) => Err(CniError::new(ErrorCode::GarbageLeft, first).details(rest.join("; "))),
    }
}

/// Latest time at which the runtime made its list: the clock is read in steps of 10 ms, rounded down, so that no
/// attachment completed later seems older.
fn since_boot_ns() -> Result<u64, CniError> {
    let text = std::fs::read_to_string("/proc/uptime").map_err(|error| CniError::io("/proc/uptime", &error))?;
    parse_uptime(&text).ok_or_else(|| CniError::new(ErrorCode::Io, format!("/proc/uptime reads {text:?}")))
}

fn parse_uptime(text: &str) -> Option<u64> {
    let (seconds, hundredths) = text.split_whitespace().next()?.split_once('.')?;
    let (seconds, hundredths): (u64, u64) = (seconds.parse().ok()?, hundredths.parse().ok()?);
    (hundredths < 100).then_some(seconds * 1_000_000_000 + hundredths * 10_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uptime_in_nanoseconds() {
        assert_eq!(parse_uptime("12345.67 23456.78\n"), Some(12_345_670_000_000));
        for odd in ["", "12", "a.b", "1.234"] {
            assert_eq!(parse_uptime(odd), None, "{odd}");
        }
        assert!(since_boot_ns().unwrap() > 0);
    }
}
