//! Elects the agent that writes cluster-wide status, with a Lease (coordination.k8s.io/v1).

use std::time::Duration;

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use tokio::time::Instant;

/// Name of the Lease.
const NAME: &str = "kni-agent";
/// How long a Lease without renewals is valid, in seconds.
const DURATION_SECONDS: i32 = 15;
/// Interval at which the leader renews the Lease and other agents check it.
pub(super) const RENEW: Duration = Duration::from_secs(3);
/// A leader that could not renew it for this long stops acting, before another one may take over.
const GIVE_UP: Duration = Duration::from_secs(10);

/// One candidate of the election.
pub(super) struct Candidate {
    api: Api<Lease>,
    identity: String,
    /// When this agent last renewed it; `None` if it is not the leader.
    renewed: Option<Instant>,
    /// The last change of another holder, and when it was seen. Clocks of nodes differ, so only changes count.
    seen: Option<(Option<String>, Option<i64>, Instant)>,
}

impl Candidate {
    pub(super) fn new(client: &Client, namespace: &str, node: &str) -> Self {
        Self {
            api: Api::namespaced(client.clone(), namespace),
            // A restarted agent is a new candidate, because its state is gone.
            identity: format!("{node}_{:08x}", fastrand::u32(..)),
            renewed: None,
            seen: None,
        }
    }

    /// Whether this agent is the leader.
    pub(super) fn leads(&self) -> bool {
        self.renewed.is_some_and(|renewed| renewed.elapsed() < GIVE_UP)
    }

    /// Renews the Lease, or acquires it after it has expired.
    pub(super) async fn round(&mut self) {
        let started = Instant::now();
        match tokio::time::timeout(RENEW, self.try_hold()).await {
            Ok(Ok(true)) => {
                if self.renewed.is_none() {
                    tracing::info!(identity = self.identity, "this agent leads the cluster's agents");
                }
                self.renewed = Some(started);
            }
            Ok(Ok(false)) => self.renewed = None,
            Ok(Err(error)) => tracing::debug!(%error, "cannot renew the Lease"),
            Err(_elapsed) => tracing::debug!("cannot renew the Lease in time"),
        }
    }

    async fn try_hold(&mut self) -> Result<bool, kube::Error> {
        let Some(mut lease) = self.api.get_opt(NAME).await? else {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(NAME.to_owned()),
                    ..ObjectMeta::default()
                },
                spec: Some(self.spec(0)),
            };
            return unless_conflict(self.api.create(&PostParams::default(), &lease).await);
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        if holder != self.identity && !holder.is_empty() && !self.is_abandoned(&spec) {
            return Ok(false);
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
        unless_conflict(self.api.replace(NAME, &PostParams::default(), &lease).await)
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
        let patience =
            Duration::from_secs(u64::try_from(spec.lease_duration_seconds.unwrap_or(DURATION_SECONDS)).unwrap_or(15));
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

/// Whether the write succeeded; `false` if another candidate was faster.
fn unless_conflict<T>(done: Result<T, kube::Error>) -> Result<bool, kube::Error> {
    match done {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}

fn now() -> MicroTime {
    MicroTime(Timestamp::now())
}
