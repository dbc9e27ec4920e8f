//! Knows whether this replica can act: whether the API server sends it every kind that the controllers need.
//!
//! A replica that acts knows it from its watches. One that waits asks for one object of each kind, so that it is ready
//! before it is needed, and does not take the Lease from one that can act.

use std::time::Duration;

use kni_reflectors::{WatchState, refused_of_cluster};
use kube::Client;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

use crate::health::Heartbeat;

/// Interval at which the watches are looked at.
const ROUND: Duration = Duration::from_secs(1);
/// Interval of the questions while no kind is refused, and otherwise.
const ASK: Duration = Duration::from_mins(1);
const ASK_AGAIN: Duration = Duration::from_secs(5);
/// Time limit of the questions together.
const ANSWER: Duration = Duration::from_secs(30);
/// What lasts this long is logged.
const WARN: Duration = Duration::from_secs(10);
/// A replica that is refused a kind for so long leaves the Lease to another one.
const GIVE_UP: Duration = Duration::from_mins(1);

/// Kinds that are refused, each with the reason, and kinds that are not read yet.
type Kinds = (Vec<String>, Vec<&'static str>);

/// What is known. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Readiness {
    state: watch::Sender<State>,
    watches: WatchState,
}

/// What this replica can read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// Whether the API server has answered since the start.
    answered: bool,
    /// The kinds that it refuses to send, with the reasons, and since when.
    refused: Vec<String>,
    since: Option<Instant>,
    /// The kinds that were not read yet in this term.
    missing: Vec<String>,
}

impl State {
    fn noted(&self, refused: Vec<String>, missing: Vec<String>, now: Instant) -> Self {
        Self {
            answered: true,
            since: (!refused.is_empty()).then(|| self.since.unwrap_or(now)),
            refused,
            missing,
        }
    }

    /// Why the replica cannot act; `None` if it can.
    fn problem(&self) -> Option<String> {
        if !self.answered {
            return Some("the API server has not answered yet".to_owned());
        }
        let is_refused = |name: &str| self.refused.iter().any(|text| text.starts_with(&format!("{name}: ")));
        let missing = self.missing.iter().filter(|name| !is_refused(name));
        let missing = missing.map(|name| format!("{name}: not read yet"));
        let all: Vec<String> = self.refused.iter().cloned().chain(missing).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// Lists that take long are no reason to give the Lease up: another replica would have to read them, too.
    fn may_keep_the_lease(&self, now: Instant) -> bool {
        self.since
            .is_none_or(|since| now.saturating_duration_since(since) < GIVE_UP)
    }
}

impl Readiness {
    /// That of a replica with these watches.
    pub(crate) fn new(watches: WatchState) -> Self {
        Self {
            state: watch::Sender::new(State::default()),
            watches,
        }
    }

    /// How often watches have failed since the start.
    pub(crate) fn watch_failures(&self) -> u64 {
        self.watches.view().iter().map(|view| view.restarts).sum()
    }

    /// Why the replica cannot act; `None` if it can.
    pub(crate) fn problem(&self) -> Option<String> {
        self.state.borrow().problem()
    }

    /// Whether the replica may hold the Lease at `now`. To acquire it, it must be able to act.
    pub(crate) fn may_hold(&self, has_it: bool, now: Instant) -> bool {
        if has_it {
            self.state.borrow().may_keep_the_lease(now)
        } else {
            self.problem().is_none()
        }
    }

    /// Notifies of changes from now on.
    pub(crate) fn changes(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    /// Looks for as long as the process. `of_term` returns the kinds of this term that are refused, with the reasons,
    /// and those that are not read yet; `None` without a term.
    pub(crate) async fn follow(self, client: Client, of_term: impl Fn() -> Option<Kinds> + Send, heartbeat: Heartbeat) {
        let mut ask_at = Instant::now();
        let mut log = Log::default();
        loop {
            heartbeat.beat();
            if let Some((refused, missing)) = of_term() {
                self.note(refused, missing.into_iter().map(str::to_owned).collect());
                ask_at = Instant::now();
            } else if Instant::now() >= ask_at {
                match timeout(ANSWER, refused_of_cluster(&client)).await {
                    Ok(Ok(refused)) => self.note(refused, Vec::new()),
                    // What it would answer is not known; its last answer counts.
                    Ok(Err(error)) => tracing::debug!(%error, "cannot ask for each kind"),
                    Err(_elapsed) => tracing::debug!("cannot ask for each kind in time"),
                }
                let pause = if self.problem().is_none() { ASK } else { ASK_AGAIN };
                ask_at = Instant::now() + pause.mul_f64(fastrand::f64().mul_add(0.5, 0.75));
            }
            log.note(self.problem(), Instant::now());
            sleep(ROUND).await;
        }
    }

    fn note(&self, refused: Vec<String>, missing: Vec<String>) {
        self.state.send_if_modified(|state| {
            let new = state.noted(refused, missing, Instant::now());
            let changed = new != *state;
            *state = new;
            changed
        });
    }
}

/// What was logged last.
#[derive(Default)]
struct Log {
    since: Option<Instant>,
    warned: Option<String>,
}

impl Log {
    /// Logs each problem once, when it lasts; whether it does so now.
    fn note(&mut self, problem: Option<String>, now: Instant) -> bool {
        let Some(problem) = problem else {
            if self.warned.is_some() {
                tracing::info!("this replica can act again");
            }
            *self = Self::default();
            return false;
        };
        let lasts = now.saturating_duration_since(*self.since.get_or_insert(now)) >= WARN;
        let is_new = lasts && self.warned.as_ref() != Some(&problem);
        if is_new {
            tracing::warn!(problem, "this replica cannot act");
            self.warned = Some(problem);
        }
        is_new
    }
}

#[cfg(test)]
impl Readiness {
    /// That of a replica to which the API server refuses these kinds.
    pub(crate) fn for_tests(refused: &[&str]) -> Self {
        let readiness = Self::new(WatchState::default());
        readiness.note(refused.iter().map(|text| (*text).to_owned()).collect(), Vec::new());
        readiness
    }
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::*;

    fn texts(all: &[&str]) -> Vec<String> {
        all.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn a_replica_that_is_refused_a_kind_is_not_ready_and_leaves_the_lease_after_a_minute() {
        let readiness = Readiness::new(WatchState::default());
        let now = Instant::now();
        assert!(
            !readiness.may_hold(false, now) && readiness.may_hold(true, now),
            "nothing is known"
        );
        readiness.note(Vec::new(), Vec::new());
        assert!(readiness.may_hold(false, now) && readiness.problem().is_none());
        readiness.note(texts(&["pods: pods is forbidden"]), texts(&["pods", "nodes"]));
        let problem = readiness.problem().unwrap();
        assert_eq!(problem, "pods: pods is forbidden; nodes: not read yet");
        let later = Instant::now() + GIVE_UP;
        readiness.note(texts(&["pods: pods is forbidden"]), Vec::new());
        assert!(!readiness.may_hold(false, now));
        assert!(readiness.may_hold(true, now) && !readiness.may_hold(true, later));
        readiness.note(Vec::new(), texts(&["pods"]));
        assert!(readiness.problem().is_some());
        assert!(readiness.may_hold(true, later), "a list that takes long");
    }

    #[test]
    fn a_problem_that_lasts_is_logged_once() {
        let mut log = Log::default();
        let now = Instant::now();
        let problem = || Some("pods: not read yet".to_owned());
        assert!(!log.note(problem(), now));
        assert!(log.note(problem(), now + WARN));
        assert!(!log.note(problem(), now + WARN * 2));
        assert!(log.note(Some("nodes: not read yet".to_owned()), now + WARN * 2));
        assert!(!log.note(None, now + WARN * 3));
        assert!(!log.note(problem(), now + WARN * 3), "it has just begun");
    }

    /// A client of an API server that refuses a kind with this status.
    fn client(kind: &'static str, code: u16) -> Client {
        let service = tower::service_fn(move |request: Request<Body>| async move {
            let refused = request.uri().path().ends_with(&format!("/{kind}"));
            let object = if refused {
                json!({
                    "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "reason": "no",
                    "code": code,
                })
            } else {
                json!({"items": []})
            };
            let response = Response::builder().status(if refused { code } else { 200 });
            response.body(Body::from(object.to_string().into_bytes()))
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn a_replica_that_waits_asks_for_each_kind() {
        for kind in ["podnetworks", "pods", "nodes", "nodenetworks", "endpointslices"] {
            let refused = refused_of_cluster(&client(kind, 403)).await.unwrap();
            assert_eq!(refused, [format!("{kind}: no")]);
        }
        assert_eq!(
            refused_of_cluster(&client("networkmembers", 403)).await.unwrap(),
            ["networkmembers: no"]
        );
        let of_earlier_release = refused_of_cluster(&client("networkmembers", 404)).await.unwrap();
        assert!(of_earlier_release.is_empty(), "{of_earlier_release:?}");
        refused_of_cluster(&client("pods", 429)).await.unwrap_err();
    }
}
