//! Stops parts of the control plane, and puts its data back.

use anyhow::{Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use kni_integration::cluster::objects;
use kube::{Api, api::DeleteParams};

use super::{
    super::{
        super::controllers::wait_for_holder,
        bed::{Bed, TEAM},
    },
    AWAY,
};

/// kni-controller is killed, and its Lease expires before another one acts.
pub(super) async fn controller_replaced(bed: &mut Bed) -> Result<()> {
    let last = bed.cluster.controllers.last_mut();
    last.expect("the cluster has one").kill()?;
    let started = bed.cluster.start_controller().await?.name.clone();
    wait_for_holder(&bed.cluster, &started).await?;
    // It acts: a pod that it has to confirm for other nodes is reached from there.
    bed.is_right().await.map(drop)
}

/// The Lease of kni-controller is deleted while it acts.
pub(super) async fn lease_deleted(bed: &mut Bed) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(bed.cluster.client.clone(), "kni-system");
    leases.delete("kni-controller", &DeleteParams::default()).await?;
    let name = bed
        .cluster
        .controllers
        .last()
        .expect("the cluster has one")
        .name
        .clone();
    wait_for_holder(&bed.cluster, &name).await
}

/// The API server is killed, and back after a while.
pub(super) async fn restarted(bed: &mut Bed) -> Result<()> {
    bed.cluster.kill_api_server()?;
    tokio::time::sleep(AWAY).await;
    bed.cluster.start_api_server()?;
    bed.is_right().await.map(drop)
}

/// The data of the API server is put back to a state before the last pod: its kubelet ends that pod.
pub(super) async fn restored(bed: &mut Bed) -> Result<()> {
    bed.cluster.save_data()?;
    let late = bed.cluster.run(&[objects::pod(TEAM, "late", "node1")]).await?;
    let newest = bed.cluster.resource_version().await?;
    bed.cluster.restore_data()?;
    bed.cluster.pass_resource_version(newest).await?;
    bed.cluster.remove(TEAM, &["late"]).await?;
    let kubelet = &bed.cluster.nodes[0].kubelet;
    kni_integration::wait::until("the pod has ended", kni_integration::patience(), async || {
        Ok(kubelet.pod(TEAM, "late").is_none())
    })
    .await?;
    ensure!(late.len() == 1);
    bed.is_right().await.map(drop)
}
