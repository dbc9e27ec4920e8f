//! Stops parts of the control plane, and puts its data back.

use anyhow::{Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, api::DeleteParams};

use super::{
    super::{
        super::controllers::wait_for_holder,
        bed::{Bed, FRONT},
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

/// The data of the API server is put back to a state before the last Service.
pub(super) async fn restored(bed: &mut Bed) -> Result<()> {
    bed.cluster.save_data()?;
    bed.serve_at("late", &["remote"], true).await?;
    let newest = bed.cluster.resource_version().await?;
    bed.cluster.restore_data()?;
    bed.cluster.pass_resource_version(newest).await?;
    let [service, _] = bed.service("late", FRONT, &["remote"], true);
    ensure!(bed.cluster.get(&service).await?.is_none(), "the data is that of before");
    bed.is_right().await.map(drop)
}
