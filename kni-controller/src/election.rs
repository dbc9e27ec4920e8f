//! Elects the replica that acts, with a Lease (coordination.k8s.io/v1), in a task that waits for nothing else.

use std::time::Duration;

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kni_reflectors::version_of;
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};

use crate::health::Heartbeat;

/// Name of the Lease.
pub(crate) const LEASE: &str = "kni-controller";
/// How long a Lease without renewals is valid, in seconds.
const DURATION_SECONDS: i32 = 15;
/// Interval at which the holder renews the Lease and other replicas check it.
const RENEW: Duration = Duration::from_secs(3);
/// A holder that could not renew it for this long must not write any more: 5 seconds before another one may take over.
const GIVE_UP: Duration = Duration::from_secs(10);

/// A period in which this replica holds the Lease without interruption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Term {
    number: u64,
    /// The end, unless the Lease is renewed.
    until: Instant,
}

/// One candidate of the election.
pub(crate) struct Election {
    api: Api<Lease>,
    identity: String,
    term: watch::Sender<Option<Term>>,
    terms: u64,
    /// The last change of another holder, and when it was seen. Clocks of nodes differ, so only changes count.
    seen: Option<(Option<String>, Option<i64>, Instant)>,
    /// The resource version of the last renewal; 0 before the first.
    written: u64,
}

/// What a round has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// The Lease is renewed.
    Yes,
    /// The Lease is renewed, but the last renewal is lost: the API server's storage was restored to an earlier state.
    /// No watch has to show that, so everything must be read again.
    AfterRestore,
    /// Another replica holds it.
    No,
}

/// What the other tasks know of the election. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Leadership {
    term: watch::Receiver<Option<Term>>,
    /// The number of the term that this value is about.
    number: u64,
}

impl Election {
    /// A candidate that does not run yet. `client` must not be one that depends on the election.
    pub(crate) fn new(client: Client, namespace: &str, replica: &str) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            // A restarted replica is a new candidate, because its state is gone.
            identity: format!("{replica}_{:08x}", fastrand::u32(..)),
            term: watch::Sender::new(None),
            terms: 0,
            seen: None,
            written: 0,
        }
    }

    /// How other tasks learn the result.
    pub(crate) fn leadership(&self) -> Leadership {
        Leadership {
            term: self.term.subscribe(),
            number: 0,
        }
    }

    /// Acquires and renews the Lease until `stop` resolves; then gives it up, after `stopped` resolves.
    pub(crate) async fn run(
        mut self,
        heartbeat: Heartbeat,
        stop: impl Future<Output = ()>,
        stopped: impl Future<Output = ()>,
    ) {
        let renewing = async {
            let mut ticks = interval(RENEW);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                heartbeat.beat();
                self.round().await;
            }
        };
        tokio::select! {
            () = renewing => {}
            () = stop => {}
        }
        stopped.await;
        if self.term.send_replace(None).is_some()
            && let Err(error) = self.give_up().await
        {
            tracing::info!(%error, "the Lease is not given up; it expires");
        }
    }

    async fn round(&mut self) {
        let started = Instant::now();
        match tokio::time::timeout(RENEW, self.try_hold()).await {
            Ok(Ok(Held::Yes)) => self.renewed(started),
            Ok(Ok(Held::AfterRestore)) => {
                tracing::warn!("the API server's storage was restored to an earlier state; everything is read again");
                self.term.send_replace(None);
                self.renewed(started);
            }
            Ok(Ok(Held::No)) => {
                if self.term.send_replace(None).is_some() {
                    tracing::warn!("another replica acts now");
                }
            }
            Ok(Err(error)) => tracing::warn!(%error, "cannot renew the Lease"),
            Err(_elapsed) => tracing::warn!("cannot renew the Lease in time"),
        }
    }

    /// Extends the term, or begins another one where the last one has ended: writes of the old one stay refused.
    fn renewed(&mut self, started: Instant) {
        let current = *self.term.borrow();
        let continues = current.is_some_and(|term| Instant::now() < term.until);
        if !continues {
            self.terms += 1;
            tracing::info!(identity = self.identity, term = self.terms, "this replica acts");
        }
        self.term.send_replace(Some(Term {
            number: self.terms,
            until: started + GIVE_UP,
        }));
    }

    async fn try_hold(&mut self) -> Result<Held, kube::Error> {
        let Some(mut lease) = self.api.get_opt(LEASE).await? else {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(LEASE.to_owned()),
                    ..ObjectMeta::default()
                },
                spec: Some(self.spec(0)),
            };
            let created = unless_conflict(self.api.create(&PostParams::default(), &lease).await)?;
            return Ok(self.note_written(created, self.written > 0));
        };
        let restored = version_of(&lease.metadata) < self.written;
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        if holder != self.identity && !holder.is_empty() && !self.is_abandoned(&spec) {
            return Ok(Held::No);
        }
        let transitions = spec.lease_transitions.unwrap_or(0) + i32::from(holder != self.identity);
        lease.spec = Some(LeaseSpec {
            acquire_time: if holder == self.identity {
                spec.acquire_time
            } else {
                Some(now())
            },
            ..self.spec(transitions)
        });
        let replaced = unless_conflict(self.api.replace(LEASE, &PostParams::default(), &lease).await)?;
        Ok(self.note_written(replaced, restored))
    }

    /// Notes the written Lease, if the write succeeded. `restored` is whether the last renewal was lost.
    fn note_written(&mut self, written: Option<Lease>, restored: bool) -> Held {
        let Some(lease) = written else {
            return Held::No;
        };
        self.written = version_of(&lease.metadata);
        if restored { Held::AfterRestore } else { Held::Yes }
    }

    /// Lets another replica take over at once.
    async fn give_up(&self) -> Result<(), kube::Error> {
        let Some(mut lease) = self.api.get_opt(LEASE).await? else {
            return Ok(());
        };
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_deref() != Some(&self.identity) {
            return Ok(());
        }
        spec.holder_identity = None;
        unless_conflict(self.api.replace(LEASE, &PostParams::default(), &lease).await).map(drop)
    }

    fn spec(&self, transitions: i32) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(DURATION_SECONDS),
            acquire_time: Some(now()),
            renew_time: Some(now()),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }

    fn is_abandoned(&mut self, spec: &LeaseSpec) -> bool {
        let renewed = spec.renew_time.as_ref().map(|time| time.0.as_microsecond());
        let seconds = spec.lease_duration_seconds.unwrap_or(DURATION_SECONDS);
        let patience = Duration::from_secs(u64::try_from(seconds).unwrap_or(15));
        match &self.seen {
            Some((holder, last, since)) if *holder == spec.holder_identity && *last == renewed => {
                since.elapsed() > patience
            }
            Some(_) | None => {
                self.seen = Some((spec.holder_identity.clone(), renewed, Instant::now()));
                false
            }
        }
    }
}

impl Leadership {
    /// Waits until this replica holds the Lease; returns the leadership of that term.
    pub(crate) async fn won(&self) -> Self {
        let mut term = self.term.clone();
        loop {
            let current = *term.borrow_and_update();
            if let Some(current) = current.filter(|current| Instant::now() < current.until) {
                return Self {
                    term: self.term.clone(),
                    number: current.number,
                };
            }
            if term.changed().await.is_err() {
                // The election has ended: there is no other term.
                return std::future::pending().await;
            }
        }
    }

    /// Whether this replica holds the Lease, in whichever term.
    pub(crate) fn is_held(&self) -> bool {
        self.term.borrow().is_some_and(|term| Instant::now() < term.until)
    }

    /// The end of the term unless the Lease is renewed; `None` once it has ended.
    pub(crate) fn until(&self) -> Option<Instant> {
        let term = (*self.term.borrow()).filter(|term| term.number == self.number)?;
        (Instant::now() < term.until).then_some(term.until)
    }

    /// Waits until the term has ended.
    pub(crate) async fn lost(&self) {
        let mut term = self.term.clone();
        loop {
            term.mark_unchanged();
            let Some(until) = self.until() else { return };
            tokio::select! {
                () = tokio::time::sleep_until(until) => {}
                changed = term.changed() => if changed.is_err() { return },
            }
        }
    }
}

/// The written object; `None` if another candidate was faster.
fn unless_conflict<T>(done: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
    match done {
        Ok(written) => Ok(Some(written)),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
        Err(error) => Err(error),
    }
}

fn now() -> MicroTime {
    MicroTime(Timestamp::now())
}

#[cfg(test)]
impl Leadership {
    /// That of a replica that never holds the Lease.
    pub(crate) fn for_tests() -> Self {
        let (_, term) = watch::channel(None);
        Self { term, number: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leadership(number: u64) -> (watch::Sender<Option<Term>>, Leadership) {
        let (sender, term) = watch::channel(None);
        (sender, Leadership { term, number })
    }

    fn term(number: u64, until: Instant) -> Term {
        Term { number, until }
    }

    #[tokio::test]
    async fn a_term_that_is_not_renewed_ends_in_time() {
        let (sender, leadership) = leadership(1);
        let (begin, ms) = (Instant::now(), Duration::from_millis);
        sender.send_replace(Some(term(1, begin + ms(20))));
        let lost = leadership.lost();
        sender.send_replace(Some(term(1, begin + ms(60))));
        lost.await;
        assert!(begin.elapsed() >= ms(60), "it was renewed");
        assert_eq!(leadership.until(), None);
        assert!(!leadership.is_held());
    }

    #[test]
    fn writes_end_before_another_replica_may_begin() {
        let expires = Duration::from_secs(u64::try_from(DURATION_SECONDS).unwrap());
        assert!(GIVE_UP + Duration::from_secs(5) <= expires);
        assert!(RENEW * 2 < GIVE_UP, "one failed renewal changes nothing");
    }

    #[tokio::test]
    async fn another_term_is_not_this_one() {
        let (sender, candidate) = leadership(0);
        sender.send_replace(Some(term(1, Instant::now() + GIVE_UP)));
        let first = candidate.won().await;
        assert!(first.until().is_some());
        sender.send_replace(Some(term(2, Instant::now() + GIVE_UP)));
        assert_eq!(first.until(), None, "its tables may be old");
        assert!(first.is_held(), "the replica does, in another term");
        first.lost().await;
        assert!(candidate.won().await.until().is_some());
    }
}
