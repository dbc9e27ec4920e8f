//! Tests many concurrent sandboxes.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use kni_integration::{Manifest, require};
use tonic::Code;

use super::scene::{Scene, pod};

const COUNT: usize = 150;
/// How long a removal is repeated.
const REMOVAL: Duration = Duration::from_mins(2);

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_and_fifty_sandboxes_at_once_all_succeed() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let scene = Scene::start("containerd-burst", Manifest::overlapping()).await?;
    let before = scene.machine.at_rest()?;

    let start = Instant::now();
    let runs = (0..COUNT).map(|number| {
        let (scene, sandbox) = (&scene, pod(&format!("burst-{number}"), &[]));
        async move {
            let id = scene.cri.run_sandbox(&sandbox).await;
            id.with_context(|| format!("run sandbox {}", sandbox.name))
        }
    });
    let ids = try_join_all(runs).await?;
    println!("{COUNT} sandboxes ran after {:?}", start.elapsed());
    let addresses = try_join_all(ids.iter().map(|id| scene.cri.addresses(id))).await?;
    let addresses: BTreeSet<_> = addresses.into_iter().flatten().collect();
    assert_eq!(
        addresses.len(),
        2 * COUNT,
        "each has addresses of its own, of both families"
    );

    let start = Instant::now();
    try_join_all(ids.iter().map(|id| remove(&scene, id))).await?;
    println!("{COUNT} sandboxes were gone after {:?}", start.elapsed());
    scene.assert_as_before(&before);
    Ok(())
}

/// Removes a sandbox, and repeats it as a kubelet does: on a busy machine containerd gives up when its shim does not
/// answer within 2 s. Failures of the network have other messages and are not repeated.
async fn remove(scene: &Scene, id: &str) -> Result<()> {
    let start = Instant::now();
    loop {
        match scene.cri.remove_sandbox(id).await {
            Err(status)
                if status.code() == Code::DeadlineExceeded
                    && status.message().contains("failed to get pod sandbox container")
                    && start.elapsed() < REMOVAL =>
            {
                println!("repeated: {}", status.message());
            }
            done => return done.with_context(|| format!("remove sandbox {id}")),
        }
    }
}
