//! Gives every network a number in the whole cluster, and takes back those of networks that are gone.
//!
//! The creation of a `NetworkNumber` is the claim: its name is the number, so the API server refuses a second one. A
//! number of a network that is gone rests before another network may get it, as a node may still use it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kni_api::{NetworkNumber, NetworkNumberSpec, network_number::LARGEST};
use kni_cluster::{Claim, Key, Networks, Tables, objects_by_uid};
use kni_crd::PodNetwork;
use kni_reflectors::version_of;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
};
use tokio::time::Instant;

use super::reconcile::{Context, Reconciler, unless_changed};

/// How long a released number rests before it is free.
pub(crate) const REST: Duration = Duration::from_hours(1);
/// The smallest number that is given. Lower ones are for operators.
const SMALLEST: u32 = 4096;
/// Maximum number of requests of one write.
const TRIES: usize = 8;
/// Maximum number of candidates that are compared with the taken numbers.
const CANDIDATES: u32 = 100_000;
/// A time of release that is later than now by more than this is not true: the clock was stepped back.
const LATER: Duration = Duration::from_mins(1);

/// The namespaces of the keys: a network may be called as a number is.
const NETWORKS: &str = "podnetworks";
const NUMBERS: &str = "networknumbers";

/// The controller.
#[derive(Debug)]
pub(super) struct NetworkNumbers {
    rest: Duration,
    /// When this term first saw each number released, by name and UID of the object. The clock may be stepped; this
    /// time is not.
    released: BTreeMap<(String, String), Instant>,
}

/// The change of one network, or of one number.
#[derive(Debug)]
pub(super) enum Write {
    /// Gives the network the first number that is free, in the order of [`candidate`].
    Create { network: String, uid: String },
    /// The number is not that of its network any more.
    Release(Arc<NetworkNumber>, Reason),
    /// The number has a wrong time of release.
    ReleaseAnew(Arc<NetworkNumber>),
    /// The number is that of its network after all.
    Restore(Arc<NetworkNumber>),
    /// The number has rested.
    Delete(Arc<NetworkNumber>, Reason),
}

/// Why a number is not that of its network any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// The network is gone. The cache may be older than the network, so this is checked again before a write.
    Gone,
    /// The network has another number.
    Second,
}

impl NetworkNumbers {
    /// With this time of rest.
    pub(super) const fn new(rest: Duration) -> Self {
        Self {
            rest,
            released: BTreeMap::new(),
        }
    }

    fn steps(&mut self, tables: &Tables, clock: Timestamp, now: Instant) -> Vec<(Key, Write)> {
        // Without a list, or without the kind, it is not known which networks have a number.
        if !tables.numbers.is_synced() || tables.numbers.is_absent() {
            return Vec::new();
        }
        let objects = objects_by_uid(tables);
        let networks: BTreeMap<&str, &PodNetwork> = tables
            .networks
            .rows()
            .values()
            .filter_map(|network| Some((network.metadata.uid.as_deref()?, network.as_ref())))
            .collect();
        let mut steps = creations(&networks, &objects);
        let mut released = BTreeMap::new();
        for (uid, claims) in &objects {
            let network = networks.get(uid);
            let winner = network.and_then(|network| winner(claims, &network.name_any(), uid));
            for claim in claims {
                // Its network may be one whose object cannot be decoded.
                let mut refused = tables.networks.refused().keys();
                let is_unclear = network.is_none() && refused.any(|key| key.name == claim.object.spec.network);
                let write = if is_unclear {
                    None
                } else if winner == Some(claim.number) {
                    let back = claim.object.released_at().is_some();
                    back.then(|| Write::Restore(Arc::clone(claim.object)))
                } else {
                    let reason = if network.is_some() {
                        Reason::Second
                    } else {
                        Reason::Gone
                    };
                    self.release(claim.object, reason, &mut released, (clock, now))
                };
                steps.extend(write.map(|write| (Key::new(NUMBERS, &claim.object.name_any()), write)));
            }
        }
        self.released = released;
        steps
    }

    /// What follows for a number that is not, or no longer, that of its network. `released` collects the new
    /// [`Self::released`].
    fn release(
        &self,
        object: &Arc<NetworkNumber>,
        reason: Reason,
        released: &mut BTreeMap<(String, String), Instant>,
        (clock, now): (Timestamp, Instant),
    ) -> Option<Write> {
        let object = Arc::clone(object);
        let Some(since) = object.released_at() else {
            return Some(Write::Release(object, reason));
        };
        let id = (object.name_any(), object.uid().unwrap_or_default());
        let seen = *self.released.get(&id).unwrap_or(&now);
        released.insert(id, seen);
        match self.rested(since.0, clock, now.saturating_duration_since(seen)) {
            Rested::Yes => Some(Write::Delete(object, reason)),
            Rested::NotYet => None,
            Rested::Later => Some(Write::ReleaseAnew(object)),
        }
    }

    /// Whether a number that this term has seen released for `seen` has rested: by the clock, and by the time of this
    /// term, which a step of the clock does not change.
    fn rested(&self, since: Timestamp, clock: Timestamp, seen: Duration) -> Rested {
        let by_clock = clock.duration_since(since);
        match Duration::try_from(by_clock) {
            Ok(by_clock) if by_clock >= self.rest && seen >= self.rest => Rested::Yes,
            Err(_) if by_clock.unsigned_abs() > LATER => Rested::Later,
            Ok(_) | Err(_) => Rested::NotYet,
        }
    }
}

/// See [`NetworkNumbers::rested`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rested {
    Yes,
    NotYet,
    /// The time of release is still to come: the clock was stepped back.
    Later,
}

/// The networks that have no number, also no released one.
fn creations(networks: &BTreeMap<&str, &PodNetwork>, objects: &BTreeMap<&str, Vec<Claim<'_>>>) -> Vec<(Key, Write)> {
    let mut steps = Vec::new();
    for (uid, network) in networks {
        let name = network.name_any();
        let has_one = objects
            .get(uid)
            .is_some_and(|claims| winner(claims, &name, uid).is_some());
        if !has_one && network.metadata.deletion_timestamp.is_none() {
            let key = Key::new(NETWORKS, &name);
            let uid = (*uid).to_owned();
            steps.push((key, Write::Create { network: name, uid }));
        }
    }
    steps
}

/// The number of a network among the objects that name its UID.
fn winner(claims: &[Claim<'_>], network: &str, uid: &str) -> Option<u32> {
    let own = claims.iter().filter(|claim| claim.object.is_of(network, uid));
    own.min_by_key(|claim| claim.rank()).map(|claim| claim.number)
}

/// The number that a network tries `attempt`-th: pseudo-random, so that after a restore of the API server's storage the
/// number of a network that was lost is not at once that of another one.
fn candidate(uid: &str, attempt: u32) -> u32 {
    // FNV-1a over the UID, and the finalizer of SplitMix64, which spreads similar values.
    let seed = uid.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut mixed = seed.wrapping_add(u64::from(attempt).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    let within = mixed % u64::from(LARGEST - SMALLEST + 1);
    SMALLEST + u32::try_from(within).unwrap_or(0)
}

impl Reconciler for NetworkNumbers {
    const NAME: &'static str = "network-numbers";
    type Write = Write;

    fn version(tables: &Tables) -> u64 {
        tables.networks.version() + tables.numbers.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, Write)> {
        self.steps(tables, Timestamp::now(), Instant::now())
    }

    async fn write(context: Context, _key: Key, write: Write) -> kube::Result<()> {
        match write {
            Write::Create { network, uid } => create(&context, &network, &uid).await,
            Write::Release(object, reason) => {
                if reason == Reason::Gone && is_network_there(&context, &object).await? {
                    return Ok(());
                }
                tracing::info!(
                    number = object.name_any(),
                    network = object.spec.network,
                    "released the number of a network"
                );
                set_release(&context, &object, Some(now())).await
            }
            Write::ReleaseAnew(object) => set_release(&context, &object, Some(now())).await,
            Write::Restore(object) => {
                tracing::info!(
                    number = object.name_any(),
                    network = object.spec.network,
                    "a released number is that of its network again"
                );
                set_release(&context, &object, None).await
            }
            Write::Delete(object, reason) => {
                if reason == Reason::Gone && is_network_there(&context, &object).await? {
                    return Ok(());
                }
                let api: Api<NetworkNumber> = Api::all(context.client.clone());
                let params = DeleteParams {
                    preconditions: Some(Preconditions {
                        uid: object.uid(),
                        resource_version: object.resource_version(),
                    }),
                    ..DeleteParams::default()
                };
                let deleted = api.delete(&object.name_any(), &params).await;
                if unless_changed(deleted)?.is_some() {
                    tracing::info!(
                        number = object.name_any(),
                        network = object.spec.network,
                        "a number has rested and is free"
                    );
                }
                Ok(())
            }
        }
    }
}

/// Whether the network that a number names exists, whatever the cache has.
async fn is_network_there(context: &Context, object: &NetworkNumber) -> kube::Result<bool> {
    let networks: Api<PodNetwork> = Api::all(context.client.clone());
    let found = networks.get_metadata_opt(&object.spec.network).await?;
    Ok(found.is_some_and(|found| found.metadata.uid.as_ref() == Some(&object.spec.network_uid)))
}

/// Claims a number. One that another network has is passed over; an object of this network, of a request whose answer
/// was lost, is its number.
async fn create(context: &Context, network: &str, uid: &str) -> kube::Result<()> {
    let api: Api<NetworkNumber> = Api::all(context.client.clone());
    let (free, since) = {
        let tables = context.cache.tables();
        let all = (0..CANDIDATES).map(|attempt| candidate(uid, attempt).to_string());
        let free = all.filter(|name| tables.numbers.get("", name).is_none());
        (free.take(TRIES).collect::<Vec<_>>(), tables.numbers.newest())
    };
    let mut refused = None;
    for name in free {
        let spec = NetworkNumberSpec {
            network: network.to_owned(),
            network_uid: uid.to_owned(),
        };
        let object = NetworkNumber::new(&name, spec);
        match api.create(&PostParams::default(), &object).await {
            Ok(object) => {
                tracing::info!(network, number = name, "a network has a number");
                remember(context, since, object);
                return Ok(());
            }
            Err(kube::Error::Api(status)) if status.code == 409 => {
                let found = api.get_opt(&name).await?;
                if let Some(found) = found.filter(|found| found.is_of(network, uid)) {
                    remember(context, since, found);
                    return Ok(());
                }
                refused = Some(kube::Error::Api(status));
            }
            Err(error) => return Err(error),
        }
    }
    tracing::warn!(network, "no free number was found for a network");
    refused.map_or(Ok(()), Err)
}

/// Records a written object before the watch reports it: the next plan must not give the network a second number.
fn remember(context: &Context, since: u64, mut object: NetworkNumber) {
    object.metadata.managed_fields = None;
    let (key, version) = (Key::new("", &object.name_any()), version_of(&object.metadata));
    context
        .cache
        .change_written(|tables| tables.numbers.put_written(key, since, version, Some(Arc::new(object))));
}

async fn set_release(context: &Context, object: &NetworkNumber, at: Option<Time>) -> kube::Result<()> {
    let api: Api<NetworkNumber> = Api::all(context.client.clone());
    let since = context.cache.tables().numbers.newest();
    let patch = Patch::Merge(serde_json::json!({
        "metadata": { "uid": object.uid(), "resourceVersion": object.resource_version() },
        "status": { "releasedAt": at },
    }));
    let patched = api
        .patch_status(&object.name_any(), &PatchParams::default(), &patch)
        .await;
    if let Some(written) = unless_changed(patched)? {
        remember(context, since, written);
    }
    Ok(())
}

/// The API server stores whole seconds.
fn now() -> Time {
    Time(Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use super::*;

    const HOUR: Duration = REST;

    fn network(tables: &mut Tables, name: &str, uid: &str, deleted: bool) {
        let deleted = deleted.then_some("2026-01-01T00:00:00Z");
        let object = serde_json::from_value(json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork",
            "metadata": {"name": name, "uid": uid, "deletionTimestamp": deleted},
            "spec": {"subnets": ["10.0.0.0/16"]},
        }));
        tables.networks.put(Key::new("", name), Some(Arc::new(object.unwrap())));
    }

    fn number(tables: &mut Tables, number: u32, (network, uid): (&str, &str), released: Option<&str>) {
        let status = released.map_or(Value::Null, |at| json!({"releasedAt": at}));
        let name = number.to_string();
        let object = serde_json::from_value(json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "NetworkNumber",
            "metadata": {"name": name, "uid": name, "creationTimestamp": format!("2026-01-01T00:00:{:02}Z", number % 60)},
            "spec": {"network": network, "networkUID": uid}, "status": status,
        }));
        tables.numbers.put(Key::new("", &name), Some(Arc::new(object.unwrap())));
    }

    fn tables() -> Tables {
        let mut tables = Tables::default();
        tables.numbers.begin();
        tables.numbers.complete();
        tables
    }

    /// The writes as short texts.
    fn steps(numbers: &mut NetworkNumbers, tables: &Tables, clock: &str, now: Instant) -> Vec<String> {
        let steps = numbers.steps(tables, clock.parse().unwrap(), now).into_iter();
        let shown = steps.map(|(key, write)| {
            let what = match write {
                Write::Create { network, uid } => format!("create for {network} {uid}"),
                Write::Release(_, reason) => format!("release {reason:?}"),
                Write::ReleaseAnew(_) => "release anew".to_owned(),
                Write::Restore(_) => "restore".to_owned(),
                Write::Delete(_, reason) => format!("delete {reason:?}"),
            };
            format!("{key}: {what}")
        });
        shown.collect()
    }

    const NOON: &str = "2026-01-02T12:00:00Z";

    #[test]
    fn every_network_gets_one_number_unless_it_is_being_deleted() {
        let (mut numbers, now) = (NetworkNumbers::new(HOUR), Instant::now());
        let mut tables = Tables::default();
        network(&mut tables, "7", "u1", false);
        network(&mut tables, "gone", "u2", true);
        assert!(
            steps(&mut numbers, &tables, NOON, now).is_empty(),
            "the list is not read"
        );
        tables.numbers.absent(std::time::Instant::now());
        assert!(
            steps(&mut numbers, &tables, NOON, now).is_empty(),
            "the kind is not served"
        );
        tables.numbers.served();
        assert_eq!(
            steps(&mut numbers, &tables, NOON, now),
            ["podnetworks/7: create for 7 u1"]
        );
        number(&mut tables, 7, ("7", "u1"), None);
        number(&mut tables, 8, ("gone", "u2"), None);
        assert!(steps(&mut numbers, &tables, NOON, now).is_empty(), "both keep theirs");
        network(&mut tables, "7", "u3", false);
        assert_eq!(
            steps(&mut numbers, &tables, NOON, now),
            ["podnetworks/7: create for 7 u3", "networknumbers/7: release Gone"],
            "a later network of the name"
        );
    }

    #[test]
    fn of_several_numbers_the_oldest_stays() {
        let (mut numbers, now) = (NetworkNumbers::new(HOUR), Instant::now());
        let mut tables = tables();
        network(&mut tables, "blue", "u1", false);
        number(&mut tables, 5003, ("blue", "u1"), None);
        number(&mut tables, 5002, ("blue", "u1"), None);
        // Forged: the UID of one network, the name of another one.
        number(&mut tables, 5001, ("red", "u1"), None);
        assert_eq!(
            steps(&mut numbers, &tables, NOON, now),
            [
                "networknumbers/5001: release Second",
                "networknumbers/5003: release Second"
            ]
        );
        number(&mut tables, 5003, ("blue", "u1"), Some(NOON));
        number(&mut tables, 5001, ("red", "u1"), Some(NOON));
        assert!(steps(&mut numbers, &tables, NOON, now).is_empty());
        tables.numbers.remove(&Key::new("", "5002"));
        assert_eq!(
            steps(&mut numbers, &tables, NOON, now),
            ["networknumbers/5003: restore"],
            "the network has no other one"
        );
    }

    #[test]
    fn a_number_rests_by_the_clock_and_by_the_time_of_the_term() {
        let (mut numbers, start) = (NetworkNumbers::new(HOUR), Instant::now());
        let mut tables = tables();
        number(&mut tables, 5000, ("blue", "u1"), Some(NOON));
        let later = |seconds| start + Duration::from_secs(seconds);
        let delete = ["networknumbers/5000: delete Gone"];
        let mut at = |tables: &Tables, clock, now| steps(&mut numbers, tables, clock, now);
        assert!(
            at(&tables, "2026-01-05T00:00:00Z", start).is_empty(),
            "the clock was stepped, or the term is new"
        );
        assert!(at(&tables, "2026-01-05T00:00:00Z", later(3599)).is_empty());
        assert!(
            at(&tables, "2026-01-02T12:59:59Z", later(3600)).is_empty(),
            "by the clock not yet"
        );
        assert_eq!(at(&tables, "2026-01-02T13:00:00Z", later(3600)), delete);
        assert_eq!(
            at(&tables, "2026-01-02T11:58:59Z", later(3600)),
            ["networknumbers/5000: release anew"],
            "the clock was stepped back"
        );
        assert!(at(&tables, "2026-01-02T11:59:30Z", later(3600)).is_empty());
        // The network is back: the rest begins again when it is gone once more.
        network(&mut tables, "blue", "u1", false);
        assert_eq!(
            at(&tables, "2026-01-05T00:00:00Z", later(3600)),
            ["networknumbers/5000: restore"]
        );
        tables.networks.remove(&Key::new("", "blue"));
        assert!(at(&tables, "2026-01-05T00:00:00Z", later(3601)).is_empty());
        assert_eq!(at(&tables, "2026-01-05T00:00:00Z", later(7201)), delete);
    }

    #[test]
    fn a_network_that_cannot_be_decoded_keeps_its_number() {
        let (mut numbers, now) = (NetworkNumbers::new(HOUR), Instant::now());
        let mut tables = tables();
        let refuse = |tables: &mut Tables| {
            tables
                .networks
                .refuse(Key::new("", "blue"), 1, "spec.zzz".to_owned(), |_| None);
        };
        refuse(&mut tables);
        number(&mut tables, 5000, ("blue", "u1"), None);
        number(&mut tables, 5001, ("red", "u2"), None);
        assert_eq!(
            steps(&mut numbers, &tables, NOON, now),
            ["networknumbers/5001: release Gone"]
        );
    }

    #[test]
    fn candidates_are_spread_and_never_low() {
        let first: BTreeSet<u32> = (0..2000)
            .map(|network| candidate(&format!("uid-{network}"), 0))
            .collect();
        assert!(first.len() >= 1995, "{} of 2000 differ", first.len());
        assert!(first.iter().all(|number| (SMALLEST..=LARGEST).contains(number)));
        let upper = first.iter().filter(|number| **number > LARGEST / 2).count();
        assert!((800..1200).contains(&upper), "{upper} of 2000 are in the upper half");
        let of_one: BTreeSet<u32> = (0..100).map(|attempt| candidate("u", attempt)).collect();
        assert_eq!(of_one.len(), 100);
        let adjacent = of_one.iter().zip(of_one.iter().skip(1)).filter(|(a, b)| *b - *a < 16);
        assert!(adjacent.count() < 5);
        assert_eq!(
            candidate("u", 3),
            candidate("u", 3),
            "a lost answer finds the same number again"
        );
    }
}
