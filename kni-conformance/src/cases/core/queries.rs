//! Checks what the kubelet reads of the node and of pods.

use crate::{
    error::{Failure, Result, require},
    sandbox::new_id,
    session::Session,
};

/// The first network decides about the readiness of the node.
pub(super) async fn node_networks(session: &Session) -> Result<()> {
    let networks = session.client.networks().await?;
    let Some(first) = networks.first() else {
        return Err(Failure::Wrong("QueryNodeNetworks lists no network".to_owned()));
    };
    require!(
        first.ready,
        "the first network, {:?}, is not ready: {:?}",
        first.name,
        first.extradata
    );
    Ok(())
}

pub(super) async fn attached(session: &Session) -> Result<()> {
    let pod = session.pod("queried").await?;
    session.check_query(&pod).await?;
    session.check_query(&pod).await
}

/// The kubelet queries every sandbox that a pod ever had; one error fails the status of the pod.
pub(super) async fn unknown(session: &Session) -> Result<()> {
    session.check_unknown(&new_id()).await?;
    session.check_unknown("").await
}
