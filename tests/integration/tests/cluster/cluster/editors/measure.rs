//! Measures whether the victims are as before: streams, Services, policies, new pods, objects.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Pod, eventually,
    traffic::{Stream, tcp_get},
};
use serde_json::json;

use super::{
    super::scene::{ANSWER, PORT, identity},
    scene::Scene,
    state::{self, State},
};

/// Answers of a stream that show that it continues.
const ANSWERS: u64 = 20;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Check {
    Stream,
    Service,
    NewPods,
    Policies,
    Objects,
}

/// The streams of both victims during one row.
pub(super) struct Streams(Vec<(Stream, String)>);

impl Streams {
    pub(super) fn start(scene: &Scene, tcp: bool) -> Result<Self> {
        let start = |victim: &super::victim::Victim| Ok((victim.stream(tcp)?, identity(&victim.backends[0])));
        Ok(Self(scene.victims.iter().map(start).collect::<Result<_>>()?))
    }

    /// Whether they continue.
    pub(super) fn continue_now(&self) -> Result<()> {
        self.0
            .iter()
            .try_for_each(|(stream, _)| stream.wait_for_answers(ANSWERS))
    }

    /// Ends them: whether no message was lost.
    pub(super) fn stop(self) -> Result<()> {
        for (stream, identity) in self.0 {
            let report = stream.stop();
            let whole = report.sent >= ANSWERS && report.lost() == 0 && report.broken.is_none();
            ensure!(whole && report.identities.iter().eq([&identity]), "{report:?}");
        }
        Ok(())
    }
}

/// The state with which all others are compared.
pub(super) struct Baseline(State);

impl Baseline {
    pub(super) async fn read(scene: &Scene) -> Result<Self> {
        Ok(Self(state::read(&scene.cluster, &scene.victims).await?))
    }
}

/// Checks that fail, each with its reason.
pub(super) type Red = Vec<(Check, String)>;

/// The checks that fail when each has this long to hold.
pub(super) async fn red(
    scene: &Scene,
    baseline: &Baseline,
    (streams, checks): (Streams, &[Check]),
    limit: Duration,
) -> Result<Red> {
    let mut red = Red::new();
    for check in checks {
        let held = match check {
            Check::Stream => continue,
            Check::Service => eventually(limit, async || are_served(scene)).await,
            Check::NewPods => are_extensible(scene, limit, &json!({})).await,
            Check::Policies => eventually(limit, async || are_policed(scene).await).await,
            Check::Objects => eventually(limit, async || are_equal(scene, baseline).await).await,
        };
        red.extend(held.err().map(|error| (*check, format!("{error:#}"))));
    }
    let held = streams.continue_now().and_then(|()| streams.stop());
    red.extend(held.err().map(|error| (Check::Stream, format!("{error:#}"))));
    Ok(red)
}

/// The victims' Services, and a host outside that answers a pod of the default network itself.
pub(super) fn are_served(scene: &Scene) -> Result<()> {
    scene.victims.iter().try_for_each(super::victim::Victim::is_served)?;
    let from = &scene.victims[1].friend;
    let answer = tcp_get(&from.inside, Scene::outside_address(), PORT, ANSWER).context("the host outside")?;
    ensure!(
        answer.identity == scene.outside.identity(),
        "{} answers at the host outside",
        answer.identity
    );
    Ok(())
}

/// The victims' policies. A pod of an editor in the default network has the labels of the friend there.
pub(super) async fn are_policed(scene: &Scene) -> Result<()> {
    let [first, second] = &scene.victims;
    let probe: &Pod = &scene.editors[0].probe;
    first.is_policed(&scene.cluster, &[]).await?;
    second.is_policed(&scene.cluster, &[probe]).await
}

/// New pods of both victims, with these annotations.
pub(super) async fn are_extensible(scene: &Scene, limit: Duration, annotations: &serde_json::Value) -> Result<()> {
    let [first, second] = &scene.victims;
    let cluster = &scene.cluster;
    let both = tokio::join!(
        first.is_extensible(cluster, limit, annotations),
        second.is_extensible(cluster, limit, annotations)
    );
    both.0.and(both.1)
}

pub(super) async fn are_equal(scene: &Scene, baseline: &Baseline) -> Result<()> {
    let now = state::read(&scene.cluster, &scene.victims).await?;
    let found = state::differences(&baseline.0, &now);
    ensure!(found.is_empty(), "{}", found.join("; "));
    Ok(())
}
