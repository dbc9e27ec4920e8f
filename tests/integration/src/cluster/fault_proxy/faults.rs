//! Decides which requests fail, and how: by rules, or at random.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use fastrand::Rng;
use http::Method;
use tokio::sync::watch;

/// Requests that a proxy remembers.
const MOST_KEPT: usize = 1000;

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The API server executes it, and the connection ends without an answer.
    DropReply,
    /// It is forwarded after a while.
    Delay(Duration),
    /// It is accepted and never answered.
    Hang,
    /// It is answered with this status and not forwarded.
    Answer(u16),
    /// The answer ends in the middle, after this time.
    Truncate(Duration),
}

impl Fault {
    const fn name(self) -> &'static str {
        match self {
            Self::DropReply => "reply dropped",
            Self::Delay(_) => "delayed",
            Self::Hang => "hung",
            Self::Answer(_) => "refused",
            Self::Truncate(_) => "truncated",
        }
    }
}

/// Requests that fail.
#[derive(Debug, Clone)]
pub struct Rule {
    /// The method; `None`: every one.
    pub method: Option<Method>,
    /// Part of path and query, such as `/podinterfaces/` or `watch=true`.
    pub part: String,
    /// What happens to them.
    pub fault: Fault,
}

impl Rule {
    /// Requests of every method.
    pub fn any(part: &str, fault: Fault) -> Self {
        Self {
            method: None,
            part: part.to_owned(),
            fault,
        }
    }

    /// Requests of one method.
    pub fn of(method: Method, part: &str, fault: Fault) -> Self {
        Self {
            method: Some(method),
            ..Self::any(part, fault)
        }
    }
}

/// The current faults of a proxy.
#[derive(Debug)]
pub struct Faults {
    state: Mutex<State>,
    /// Counts the changes; watches that are open at one end with [`Faults::cut`].
    cuts: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    rules: Vec<Rule>,
    random: Option<(Rng, f64)>,
    injected: BTreeMap<&'static str, usize>,
    /// The requests that failed since the rules were set; the first [`MOST_KEPT`].
    failed: Vec<String>,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            cuts: watch::Sender::new(0),
        }
    }
}

impl Faults {
    /// The first rule that matches a request counts; earlier rules are replaced.
    pub fn set(&self, rules: Vec<Rule>) {
        let mut state = self.state();
        state.rules = rules;
        state.failed.clear();
    }

    /// From now on every request fails with this probability, in a way that the seed decides.
    pub fn randomize(&self, seed: u64, probability: f64) {
        self.state().random = Some((Rng::with_seed(seed), probability));
    }

    /// No request fails any more. Those that hang are answered never.
    pub fn clear(&self) {
        let mut state = self.state();
        state.rules.clear();
        state.random = None;
    }

    /// Ends all open watches in the middle.
    pub fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// How many requests failed in which way.
    pub fn injected(&self) -> BTreeMap<&'static str, usize> {
        self.state().injected.clone()
    }

    /// Method, path and query of the requests that failed since the rules were set, in their order.
    pub fn failed(&self) -> Vec<String> {
        self.state().failed.clone()
    }

    pub(super) fn cuts(&self) -> watch::Receiver<u64> {
        self.cuts.subscribe()
    }

    pub(super) fn of(&self, method: &Method, path: &str) -> Option<Fault> {
        let mut state = self.state();
        let matches =
            |rule: &&Rule| rule.method.as_ref().is_none_or(|wanted| wanted == method) && path.contains(&rule.part);
        let ruled = state.rules.iter().find(matches).map(|rule| rule.fault);
        let fault = ruled.or_else(|| {
            state
                .random
                .as_mut()
                .and_then(|(rng, chance)| random(rng, *chance, method, path))
        })?;
        *state.injected.entry(fault.name()).or_default() += 1;
        if state.failed.len() < MOST_KEPT {
            state.failed.push(format!("{method} {path}"));
        }
        Some(fault)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn random(rng: &mut Rng, chance: f64, method: &Method, path: &str) -> Option<Fault> {
    if rng.f64() >= chance {
        return None;
    }
    let code = rng.choice([403, 404, 409, 429, 500]).unwrap_or(500);
    let pause = Duration::from_millis(rng.u64(0..400));
    let reads = *method == Method::GET;
    Some(match rng.u32(0..5) {
        0 => Fault::Delay(pause),
        1 => Fault::Hang,
        // A definition that is gone is a matter of its own: its objects are gone, too.
        2 if reads && code == 404 => Fault::Answer(500),
        2 => Fault::Answer(code),
        _ if path.contains("watch=true") => Fault::Truncate(pause),
        3 => Fault::DropReply,
        _ => Fault::Truncate(Duration::ZERO),
    })
}
