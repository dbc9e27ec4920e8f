//! Waits for conditions, with deadlines.

use std::{
    env, fmt, thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Error, Result, ensure};

/// The patience on a machine of the reference speed.
const PATIENCE: Duration = Duration::from_mins(1);
/// The variable with the slowness of the machine, which `cargo xtask test` measures.
const SLOWNESS: &str = "KNI_SLOWNESS";

/// How long to wait for an event that must happen: a minute on a machine of the reference speed, more on a slower one.
///
/// It costs nothing when the event happens. A shorter wait would turn a busy machine into a failed test.
pub fn patience() -> Duration {
    PATIENCE.mul_f64(slowness())
}

/// How much slower this machine is than the reference, from 1 to 8; 1 if it was not measured.
pub fn slowness() -> f64 {
    let measured = env::var(SLOWNESS).ok().and_then(|text| text.parse::<f64>().ok());
    measured
        .filter(|factor| factor.is_finite())
        .unwrap_or(1.0)
        .clamp(1.0, 8.0)
}

/// A wait that ran out: the context of the last check's error, which the wait returns.
///
/// `cargo xtask test` recognises a failed test by this text as one that may be tried again, because a slow machine is
/// one of the possible causes. An error without it is a wrong result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exhausted {
    /// How long the wait lasted.
    pub patience: Duration,
}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waited {:?} in vain", self.patience)
    }
}

/// The first pause between two checks; each following one is twice as long, up to [`LONGEST`].
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(20);

/// Calls `look` until it succeeds. Its errors cause another check; the last one is returned after `patience`, with
/// the context [`Exhausted`].
pub async fn eventually<T, F: Future<Output = Result<T>>>(
    patience: Duration,
    mut look: impl FnMut() -> F,
) -> Result<T> {
    let mut pauses = Pauses::until(patience);
    loop {
        let start = Instant::now();
        match look().await {
            Ok(found) => return Ok(found),
            Err(why) => tokio::time::sleep(pauses.after(why, start.elapsed())?).await,
        }
    }
}

/// [`eventually`] for synchronous tests.
pub fn eventually_sync<T>(patience: Duration, mut look: impl FnMut() -> Result<T>) -> Result<T> {
    let mut pauses = Pauses::until(patience);
    loop {
        let start = Instant::now();
        match look() {
            Ok(found) => return Ok(found),
            Err(why) => thread::sleep(pauses.after(why, start.elapsed())?),
        }
    }
}

/// Checks until `done`; returns the duration.
pub async fn until<F: Future<Output = Result<bool>>>(
    what: &str,
    patience: Duration,
    mut done: impl FnMut() -> F,
) -> Result<Duration> {
    let start = Instant::now();
    let done = eventually(patience, || {
        let done = done();
        async {
            ensure!(done.await?, "not yet");
            Ok(())
        }
    });
    done.await.with_context(|| format!("until {what}"))?;
    Ok(start.elapsed())
}

/// Checks until there is a value.
pub async fn until_some<T, F: Future<Output = Result<Option<T>>>>(
    what: &str,
    patience: Duration,
    mut look: impl FnMut() -> F,
) -> Result<T> {
    let found = eventually(patience, || {
        let found = look();
        async { found.await?.context("not yet") }
    });
    found.await.with_context(|| format!("until {what}"))
}

/// Checks until the list of differences is empty; returns the duration. The error lists the differences at the
/// deadline.
pub async fn until_right<F: Future<Output = Result<Vec<String>>>>(
    what: &str,
    patience: Duration,
    mut wrong: impl FnMut() -> F,
) -> Result<Duration> {
    let start = Instant::now();
    let right = eventually(patience, || {
        let wrong = wrong();
        async {
            let lines = wrong.await?;
            ensure!(lines.is_empty(), "wrong is:\n{}", lines.join("\n"));
            Ok(())
        }
    });
    right.await.with_context(|| format!("until {what}"))?;
    Ok(start.elapsed())
}

/// Checks for this time that the list of differences stays empty.
pub async fn remains_right<F: Future<Output = Result<Vec<String>>>>(
    what: &str,
    time: Duration,
    mut wrong: impl FnMut() -> F,
) -> Result<()> {
    let start = Instant::now();
    loop {
        let lines = wrong().await.with_context(|| what.to_owned())?;
        let after = start.elapsed();
        ensure!(
            lines.is_empty(),
            "{what}: after {after:?} wrong is:\n{}",
            lines.join("\n")
        );
        if after >= time {
            return Ok(());
        }
        tokio::time::sleep(LONGEST * 5).await;
    }
}

struct Pauses {
    patience: Duration,
    deadline: Instant,
    next: Duration,
}

impl Pauses {
    fn until(patience: Duration) -> Self {
        Self {
            patience,
            deadline: Instant::now() + patience,
            next: SHORTEST,
        }
    }

    /// The pause after a check that took `took`: at least as long, so that expensive checks leave CPU time to the
    /// system under test. Returns the error `why` once the deadline has passed.
    fn after(&mut self, why: Error, took: Duration) -> Result<Duration> {
        if Instant::now() >= self.deadline {
            let patience = self.patience;
            return Err(why.context(Exhausted { patience }));
        }
        let pause = self.next.max(took);
        self.next = LONGEST.min(self.next * 2);
        Ok(pause)
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn the_first_success_ends_it_and_the_last_error_is_reported() {
        let mut looks = 0;
        let found = eventually_sync(Duration::from_secs(5), || {
            looks += 1;
            if looks < 4 {
                bail!("look {looks}");
            }
            Ok(looks)
        });
        assert_eq!(found.expect("the fourth look finds it"), 4);
        let patience = Duration::from_millis(5);
        let error = eventually_sync(patience, || {
            looks += 1;
            Err::<(), _>(anyhow::anyhow!("look {looks}"))
        });
        let error = error.expect_err("there is nothing to find");
        assert_eq!(format!("{error:#}"), format!("waited 5ms in vain: look {looks}"));
        assert_eq!(error.downcast_ref::<Exhausted>(), Some(&Exhausted { patience }));
    }
}
