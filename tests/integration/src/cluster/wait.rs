//! Waiting for conditions, with deadlines.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

const LOOK: Duration = Duration::from_millis(20);

/// Looks until `done` says so; how long that took. Errors of `done` are no reason to stop before the deadline, as
/// the API server may be away.
pub async fn until(what: &str, patience: Duration, mut done: impl AsyncFnMut() -> Result<bool>) -> Result<Duration> {
    let start = Instant::now();
    until_some(what, patience, async || Ok(done().await?.then_some(()))).await?;
    Ok(start.elapsed())
}

/// Looks until there is something.
pub async fn until_some<T>(
    what: &str,
    patience: Duration,
    mut look: impl AsyncFnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = Instant::now() + patience;
    loop {
        let last = look().await;
        if let Ok(Some(found)) = last {
            return Ok(found);
        }
        if Instant::now() > deadline {
            let why = last.err().map(|error| format!(": {error:#}")).unwrap_or_default();
            bail!("waited {patience:?} in vain until {what}{why}");
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Looks until nothing is wrong; how long that took. The error is what was wrong at the deadline.
pub async fn until_right(
    what: &str,
    patience: Duration,
    mut wrong: impl AsyncFnMut() -> Result<Vec<String>>,
) -> Result<Duration> {
    let start = Instant::now();
    loop {
        let last = wrong().await;
        if matches!(&last, Ok(lines) if lines.is_empty()) {
            return Ok(start.elapsed());
        }
        if start.elapsed() > patience {
            match last {
                Ok(lines) => bail!(
                    "waited {patience:?} in vain until {what}; wrong is:\n{}",
                    lines.join("\n")
                ),
                Err(error) => return Err(error.context(format!("waited {patience:?} in vain until {what}"))),
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}
