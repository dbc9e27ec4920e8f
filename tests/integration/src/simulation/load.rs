//! Changes the pods of a simulated cluster at a rate, and measures when the nodes know it.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval},
};

use super::{
    fleet::Observed,
    now,
    scene::{STAMP, Scene, namespace, network_of, node_name, pod},
};

/// How long a pod of the load lives.
const LIFE: Duration = Duration::from_secs(10);
/// One start of this many comes with a change of the labels of a pod that stays.
const RELABEL: usize = 5;

/// A state of a pod that nodes shall know: since when, by UID and stamp.
#[derive(Debug)]
pub(super) struct Change {
    id: String,
    /// When the API server had answered the request.
    at: f64,
    uid: String,
    expected: BTreeSet<usize>,
}

/// What the load changed.
#[derive(Debug, Default)]
pub(super) struct Changes {
    pub(super) starts: Vec<Change>,
    pub(super) relabels: Vec<Change>,
}

/// Seconds that something took: the median, the 99th percentile, the longest, and how many there were.
#[derive(Debug, Clone, Copy, Default)]
pub struct Latency {
    /// Half of them took at most this long.
    pub p50: f64,
    /// 99 of 100 took at most this long.
    pub p99: f64,
    /// The longest.
    pub most: f64,
    /// How many were measured.
    pub count: usize,
    /// How many did not end while it was measured.
    pub missing: usize,
}

impl Latency {
    /// The percentiles of these.
    pub(super) fn of(mut all: Vec<f64>, missing: usize) -> Self {
        all.sort_by(f64::total_cmp);
        let at = |share: usize| {
            let index = (all.len() * share).div_ceil(100).saturating_sub(1);
            all.get(index).copied().unwrap_or(f64::NAN)
        };
        Self {
            p50: at(50),
            p99: at(99),
            most: at(100),
            count: all.len(),
            missing,
        }
    }
}

/// Starts, ends and relabels pods for some time. The rate is that of starts; the requests of one do not wait for
/// others.
pub(super) async fn run(client: &Client, scene: &Scene, rate: f64, duration: Duration) -> Result<Changes> {
    let mut ticks = interval(Duration::from_secs_f64(1.0 / rate));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let end = Instant::now() + duration;
    let (mut starts, mut relabels, mut rest) = (JoinSet::new(), JoinSet::new(), JoinSet::new());
    let mut living: VecDeque<(Instant, usize, String)> = VecDeque::new();
    let mut unchanged = scene.standing.clone();
    fastrand::shuffle(&mut unchanged);
    let series = fastrand::u32(..);
    let mut number = 0;
    while Instant::now() < end {
        ticks.tick().await;
        let (node, network) = (fastrand::usize(..scene.nodes), network_of(number, scene.networks));
        let name = format!("load-{series:x}-{number}");
        living.push_back((Instant::now(), network, name.clone()));
        let object = pod(network, &name, node, &json!({ STAMP: "0" }));
        let expected = concerned(scene, network, node);
        let api: Api<Pod> = Api::namespaced(client.clone(), &namespace(network));
        starts.spawn(async move {
            let made = api
                .create(&PostParams::default(), &serde_json::from_value(object)?)
                .await?;
            change(made, "0", expected)
        });
        if number % RELABEL == 0
            && let Some(one) = unchanged.pop()
        {
            let api: Api<Pod> = Api::namespaced(client.clone(), &one.namespace);
            let expected = concerned(scene, one.network, one.node);
            let stamp = format!("{series:x}");
            relabels.spawn(async move {
                let labels = json!({ "metadata": { "labels": { STAMP: stamp } } });
                let made = api
                    .patch(&one.name, &PatchParams::default(), &Patch::Merge(&labels))
                    .await?;
                change(made, &stamp, expected)
            });
        }
        while living.front().is_some_and(|(since, ..)| since.elapsed() > LIFE) {
            if let Some((_, network, name)) = living.pop_front() {
                rest.spawn(end_pod(client.clone(), network, name));
            }
        }
        number += 1;
    }
    let changes = Changes {
        starts: starts.join_all().await.into_iter().collect::<Result<_>>()?,
        relabels: relabels.join_all().await.into_iter().collect::<Result<_>>()?,
    };
    drop(rest.join_all().await);
    Ok(changes)
}

/// Ends every pod of the load.
pub(super) async fn end_all(client: &Client, networks: usize) -> Result<()> {
    for network in 0..networks {
        let api: Api<Pod> = Api::namespaced(client.clone(), &namespace(network));
        let those = kube::api::ListParams::default().labels(&format!("{STAMP}=0"));
        let now = DeleteParams::default().grace_period(0);
        api.delete_collection(&now, &those).await.context("end pods")?;
    }
    Ok(())
}

/// Deletes a pod at once, as a kubelet does whose containers have ended.
pub(super) async fn end_pod(client: Client, network: usize, name: String) -> Result<()> {
    let api: Api<Pod> = Api::namespaced(client, &namespace(network));
    match api.delete(&name, &DeleteParams::default().grace_period(0)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The nodes that must learn of a change of a pod: those that follow its network, other than its own.
fn concerned(scene: &Scene, network: usize, node: usize) -> BTreeSet<usize> {
    let all = scene.followers.get(&network).into_iter().flatten().copied();
    all.filter(|other| *other != node).collect()
}

fn change(made: Pod, stamp: &str, expected: BTreeSet<usize>) -> Result<Change> {
    let uid = made.metadata.uid.context("no UID")?;
    Ok(Change {
        id: format!("{uid} {stamp}"),
        at: now(),
        uid,
        expected,
    })
}

/// The time from the request to the last concerned node that knows.
pub(super) fn visible(changes: &[Change], observed: &Observed) -> Latency {
    let mut missing = 0;
    let times = changes.iter().filter_map(|change| {
        let seen: BTreeMap<&str, f64> = observed
            .peers
            .get(&change.id)
            .into_iter()
            .flatten()
            .map(|(node, at)| (node.as_str(), *at))
            .collect();
        let times: Option<Vec<f64>> = change
            .expected
            .iter()
            .map(|node| Some(seen.get(node_name(*node).as_str())? - change.at))
            .collect();
        match times {
            // No other node has a pod in the network.
            Some(times) if times.is_empty() => None,
            Some(times) => times.into_iter().reduce(f64::max),
            None => {
                missing += 1;
                None
            }
        }
    });
    let times: Vec<f64> = times.collect();
    Latency::of(times, missing)
}

/// The time from the request to the attach on the pod's own node.
pub(super) fn attached(changes: &[Change], observed: &Observed) -> Latency {
    let times: Vec<f64> = changes
        .iter()
        .filter_map(|change| Some(observed.attached.get(&change.uid)? - change.at))
        .collect();
    let missing = changes.len() - times.len();
    Latency::of(times, missing)
}
