//! Edits a policy, a Service and a namespace by mistake, and takes the edit back.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Namespace;
use kni_api::NodeNetwork;
use kni_integration::{
    cluster::patience,
    traffic::{NoAnswer, tcp_get, udp_ask},
    wait,
};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;

use super::{
    super::{
        super::scene::{ANSWER, PORT, SILENCE, address},
        bed::{Bed, FRIENDS, FRONT, NETWORK, SOON, TEAM, TENANT, front_name, guard},
    },
    AWAY,
};

/// An address that is no range, in place of the peers: the last valid version of the policy is active.
pub(super) async fn mistyped(bed: &Bed) -> Result<()> {
    let mut typo = guard(FRIENDS);
    typo["spec"]["ingress"] = json!([{ "from": [{ "ipBlock": { "cidr": "192.0.2.1" } }] }]);
    bed.cluster.apply(&[typo]).await?;
    refused(bed, true).await?;
    tokio::time::sleep(AWAY).await;
    bed.cluster.apply(&[guard(FRIENDS)]).await?;
    refused(bed, false).await
}

/// Waits until each node reports that the policy is refused, or is not.
async fn refused(bed: &Bed, is_refused: bool) -> Result<()> {
    let api: Api<NodeNetwork> = Api::all(bed.cluster.client.clone());
    wait::until(&format!("refused on each node: {is_refused}"), patience(), async || {
        for node in api.list(&ListParams::default()).await? {
            let refused = node.status.context("no status")?.policies.refused;
            ensure!(
                refused.is_empty() != is_refused,
                "{:?}: {refused:?}",
                node.metadata.name
            );
        }
        Ok(true)
    })
    .await
    .map(drop)
}

/// The Service has another port for a while.
pub(super) async fn port_changed(bed: &Bed) -> Result<()> {
    for (port, other) in [(FRONT + 1, FRONT), (FRONT, FRONT + 1)] {
        for v4 in [true, false] {
            bed.cluster
                .apply(&bed.service(front_name(v4), port, &["remote"], v4))
                .await?;
            let (client, at) = (&bed.pod("client").inside, bed.front(v4).ip());
            wait::until(
                &format!("port {port} answers, and {other} does not"),
                patience(),
                async || {
                    udp_ask(client, at, port, ANSWER)?;
                    let closed = tcp_get(client, at, other, SILENCE);
                    ensure!(
                        matches!(closed, Err(NoAnswer::Refused | NoAnswer::Timeout)),
                        "{closed:?}"
                    );
                    Ok(true)
                },
            )
            .await?;
        }
    }
    Ok(())
}

/// The namespace loses the label that admits it to its network, which revokes, and has it back within the grace.
pub(super) async fn label_removed(bed: &Bed) -> Result<()> {
    let (client, server) = (bed.pod("client"), bed.pod("beside"));
    let answers = |timeout| udp_ask(&client.inside, address(server, true), PORT, timeout);
    label(bed, None).await?;
    wait::until("the traffic is stopped", patience(), async || {
        Ok(answers(SILENCE).is_err())
    })
    .await?;
    tokio::time::sleep(AWAY).await;
    label(bed, Some(NETWORK)).await?;
    wait::until("the traffic flows", patience(), async || {
        answers(SOON)?;
        Ok(true)
    })
    .await?;
    bed.is_right().await.map(drop)
}

async fn label(bed: &Bed, value: Option<&str>) -> Result<()> {
    let api: Api<Namespace> = Api::all(bed.cluster.client.clone());
    let patch = Patch::Merge(json!({ "metadata": { "labels": { TENANT: value } } }));
    api.patch(TEAM, &PatchParams::default(), &patch).await?;
    Ok(())
}
