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

use crate::{health::Heartbeat, readiness::Readiness};

/// Name of the Lease.
pub(crate) const LEASE: &str = "kni-controller";
/// How long a Lease without renewals is valid, in seconds.
const DURATION_SECONDS: i32 = 15;
/// Interval at which the holder renews the Lease and other replicas check it.
const RENEW: Duration = Duration::from_secs(3);
/// Time limit of a request. A holder makes two attempts at least before it gives up.
const REQUEST: Duration = Duration::from_secs(5);
/// A holder that could not renew it for this long must not write any more: 5 seconds before another one may take over.
const GIVE_UP: Duration = Duration::from_secs(10);

/// A term that is renewed later than this after its time is over: its tables may be too old.
const LATE: Duration = Duration::from_secs(30);

/// A period in which no other replica holds the Lease. Writes pause while it is not renewed in time; watches do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Term {
    number: u64,
    /// Nothing is written from then on, unless the Lease is renewed.
    until: Instant,
}

/// One candidate of the election.
pub(crate) struct Election {
    api: Api<Lease>,
    identity: String,
    readiness: Readiness,
    term: watch::Sender<Option<Term>>,
    terms: u64,
    /// The last change of another holder, and when it was seen. Clocks of nodes differ, so only changes count.
    seen: Option<(Option<String>, Option<i64>, Instant)>,
    /// The resource version of the last renewal; 0 before the first.
    written: u64,
    /// The Lease as this replica has written it last, unless another one holds it: it is renewed by one request. Its
    /// version shows that no other replica has written it since.
    held: Option<Lease>,
    /// When the last write was sent.
    sent: Instant,
    /// How often watches had failed at the last renewal.
    failures: u64,
}

/// What a round has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// The Lease is renewed, and no other replica has held it since the last renewal.
    Still,
    /// The Lease is acquired.
    Anew,
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
    pub(crate) fn new(client: Client, namespace: &str, replica: &str, readiness: Readiness) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            // A restarted replica is a new candidate, because its state is gone.
            identity: format!("{replica}_{:08x}", fastrand::u32(..)),
            readiness,
            term: watch::Sender::new(None),
            terms: 0,
            seen: None,
            written: 0,
            held: None,
            sent: Instant::now(),
            failures: 0,
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
            let mut changes = self.readiness.changes();
            loop {
                tokio::select! {
                    _ = ticks.tick() => {}
                    _ = changes.changed() => {}
                }
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
        let has_it = self.term.borrow().is_some();
        if !self.readiness.may_hold(has_it, Instant::now()) {
            // Its requests may still be on their way, so the Lease is not handed over but expires.
            self.held = None;
            if self.term.send_replace(None).is_some() {
                tracing::warn!("this replica cannot read every kind; another one may act");
            }
            return;
        }
        match self.try_hold().await {
            Ok(Held::Still) => self.renewed(false),
            Ok(Held::Anew) => self.renewed(true),
            Ok(Held::AfterRestore) => {
                tracing::warn!("the API server's storage was restored to an earlier state; everything is read again");
                self.renewed(true);
            }
            Ok(Held::No) => {
                self.held = None;
                if self.term.send_replace(None).is_some() {
                    tracing::warn!("another replica acts now");
                }
            }
            Err(error) => tracing::warn!(%error, "cannot renew the Lease"),
        }
    }

    /// Extends the term, or begins another one: writes of the old one stay refused. A term that is renewed late
    /// continues if no other replica has acted and no watch has failed meanwhile: its tables are as new as if it had
    /// been in time, and an API server that is slow is not asked for everything again.
    fn renewed(&mut self, anew: bool) {
        let failures = self.readiness.watch_failures();
        let current = *self.term.borrow();
        let late = current.map(|term| Instant::now().saturating_duration_since(term.until));
        let continues = |late: Duration| late.is_zero() || (late < LATE && failures == self.failures);
        if anew || !late.is_some_and(continues) {
            self.terms += 1;
            tracing::info!(identity = self.identity, term = self.terms, "this replica acts");
        } else if let Some(late) = late.filter(|late| !late.is_zero()) {
            tracing::warn!(?late, "the Lease is renewed late; this replica acts again");
        }
        self.failures = failures;
        self.term.send_replace(Some(Term {
            number: self.terms,
            until: self.sent + GIVE_UP,
        }));
    }

    async fn try_hold(&mut self) -> Result<Held, kube::Error> {
        if let Some(mut lease) = self.held.clone() {
            lease.spec.get_or_insert_default().renew_time = Some(now());
            if self.replace(&lease).await? {
                return Ok(Held::Still);
            }
        }
        let Some(mut lease) = within(self.api.get_opt(LEASE)).await? else {
            return self.create().await;
        };
        let restored = version_of(&lease.metadata) < self.written;
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        let is_ours = holder == self.identity;
        if !is_ours && !holder.is_empty() && !self.is_abandoned(&spec) {
            return Ok(Held::No);
        }
        lease.spec = Some(LeaseSpec {
            acquire_time: if is_ours { spec.acquire_time } else { Some(now()) },
            ..self.spec(spec.lease_transitions.unwrap_or(0) + i32::from(!is_ours))
        });
        Ok(match (self.replace(&lease).await?, restored) {
            (false, _) => Held::No,
            (true, true) => Held::AfterRestore,
            (true, false) if is_ours => Held::Still,
            (true, false) => Held::Anew,
        })
    }

    async fn create(&mut self) -> Result<Held, kube::Error> {
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some(LEASE.to_owned()),
                ..ObjectMeta::default()
            },
            spec: Some(self.spec(0)),
        };
        let restored = self.written > 0;
        self.sent = Instant::now();
        let created = unless_changed(within(self.api.create(&PostParams::default(), &lease)).await)?;
        Ok(match (self.note_written(created), restored) {
            (false, _) => Held::No,
            (true, true) => Held::AfterRestore,
            (true, false) => Held::Anew,
        })
    }

    /// Writes the Lease if no other replica has written it since it was read.
    async fn replace(&mut self, lease: &Lease) -> Result<bool, kube::Error> {
        self.sent = Instant::now();
        let replaced = within(self.api.replace(LEASE, &PostParams::default(), lease)).await;
        Ok(self.note_written(unless_changed(replaced)?))
    }

    /// Notes the written Lease; whether it was written.
    fn note_written(&mut self, written: Option<Lease>) -> bool {
        self.written = written
            .as_ref()
            .map_or(self.written, |lease| version_of(&lease.metadata));
        self.held = written;
        self.held.is_some()
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
        unless_changed(self.api.replace(LEASE, &PostParams::default(), &lease).await).map(drop)
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

    /// Until when this replica may write unless the Lease is renewed; `None` if it may not.
    pub(crate) fn until(&self) -> Option<Instant> {
        let term = (*self.term.borrow()).filter(|term| term.number == self.number)?;
        (Instant::now() < term.until).then_some(term.until)
    }

    /// Whether the term has not ended. It may write nothing at the moment.
    pub(crate) fn lasts(&self) -> bool {
        self.term.borrow().is_some_and(|term| term.number == self.number)
    }

    /// Waits until the term has ended.
    pub(crate) async fn lost(&self) {
        let mut term = self.term.clone();
        loop {
            term.mark_unchanged();
            if !self.lasts() || term.changed().await.is_err() {
                return;
            }
        }
    }
}

/// The written object; `None` if another candidate was faster, or it is gone.
fn unless_changed<T>(done: kube::Result<T>) -> kube::Result<Option<T>> {
    match done {
        Ok(written) => Ok(Some(written)),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The answer, unless it takes too long.
async fn within<T>(request: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    let answer = tokio::time::timeout(REQUEST, request).await;
    answer.unwrap_or_else(|_elapsed| Err(kube::Error::Service("no answer in time".into())))
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

    /// That of a replica that holds the Lease until the end of the test.
    pub(crate) fn held_for_tests() -> Self {
        let until = Instant::now() + Duration::from_hours(1);
        let (_, term) = watch::channel(Some(Term { number: 0, until }));
        Self { term, number: 0 }
    }
}

#[cfg(test)]
mod tests;
