//! Decides when requests of one priority level are sent. Pure: the time is an argument.

use std::time::Duration;

use tokio::time::Instant;

/// Pause after the first answer that the API server is overloaded; each further one doubles it.
const SHORTEST: Duration = Duration::from_secs(2);

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// It is sent.
    Open,
    /// It is sent if no other one is on its way; else it waits for the answer to that one.
    Probe,
    /// It is not sent: there is none for so long.
    Closed(Duration),
}

/// What the answers to the requests of a level have shown. At the start nothing is known, so one request goes first.
#[derive(Debug, Default)]
pub(super) struct Level {
    open: bool,
    pause: Duration,
    /// There is no request until then.
    until: Option<Instant>,
}

impl Level {
    /// What happens to a request at `now`.
    pub(super) fn enter(&self, now: Instant) -> Entry {
        let wait = self
            .until
            .map_or(Duration::ZERO, |until| until.saturating_duration_since(now));
        match (self.open, wait.is_zero()) {
            (true, _) => Entry::Open,
            (false, true) => Entry::Probe,
            (false, false) => Entry::Closed(wait),
        }
    }

    /// Notes an answer. `wait` is how long the API server asks to wait, if it is overloaded; pauses are `longest` at
    /// most where it does not ask for more.
    pub(super) fn answered(&mut self, now: Instant, wait: Option<Duration>, (is_probe, longest): (bool, Duration)) {
        match wait {
            Some(wait) if self.open || is_probe => {
                self.open = false;
                self.pause = (self.pause * 2).max(SHORTEST).min(longest);
                // Agents that were refused together do not return together.
                let pause = self.pause.max(wait).mul_f64(fastrand::f64().mul_add(0.5, 1.0));
                self.until = Some(now + pause);
            }
            // Requests that were sent before the pause began.
            Some(wait) => self.until = self.until.max(Some(now + wait)),
            None if is_probe => {
                *self = Self {
                    open: true,
                    ..Self::default()
                }
            }
            None => {}
        }
    }
}
