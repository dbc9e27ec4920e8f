//! Decides when requests of one priority level are sent. Pure: the time is an argument.

use std::time::Duration;

use tokio::time::Instant;

/// How long an agent sends nothing after refusals.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pauses {
    /// After the first one; each further one doubles it.
    pub(super) shortest: Duration,
    /// At most, also if the API server asks for more.
    pub(super) longest: Duration,
}

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

/// What the answers to the requests of a level have shown.
#[derive(Debug, Default)]
pub(super) struct Level {
    state: State,
    pause: Duration,
}

#[derive(Debug, Default, Clone, Copy)]
enum State {
    /// Nothing is known: at the start, or because something else was refused or interrupted. One request goes first.
    #[default]
    Unsure,
    /// A request was accepted.
    Open,
    /// A request was refused. There is none until then, and one goes first.
    Closed(Instant),
}

impl Level {
    /// What happens to a request at `now`.
    pub(super) fn enter(&self, now: Instant) -> Entry {
        match self.state {
            State::Open => Entry::Open,
            State::Closed(until) if now < until => Entry::Closed(until - now),
            State::Unsure | State::Closed(_) => Entry::Probe,
        }
    }

    /// What was accepted before shows nothing any more.
    pub(super) fn unconfirm(&mut self) {
        if matches!(self.state, State::Open) {
            self.state = State::Unsure;
        }
    }

    /// Notes that the request that went first was accepted.
    pub(super) fn accepted(&mut self) {
        *self = Self {
            state: State::Open,
            pause: Duration::ZERO,
        };
    }

    /// Notes a refusal, with which the API server asked to wait. `went_first`: it answers the request that went first.
    pub(super) fn refused(&mut self, now: Instant, wait: Duration, (went_first, pauses): (bool, Pauses)) {
        let wait = wait.min(pauses.longest);
        let until = match self.state {
            // The request was sent before the pause began.
            State::Closed(until) if !went_first => until.max(now + wait),
            State::Unsure | State::Open | State::Closed(_) => {
                self.pause = (self.pause * 2).max(pauses.shortest).min(pauses.longest);
                // Agents that were refused together do not return together.
                now + self.pause.max(wait).mul_f64(fastrand::f64().mul_add(0.5, 1.0))
            }
        };
        self.state = State::Closed(until);
    }
}
