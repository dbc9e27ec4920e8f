//! Checks detach and delete: what they remove, what they leave alone, and that they may be repeated.

use std::path::Path;

use kni_proto::kni::DeleteNetworkRequest;

use crate::{
    error::{Result, require},
    sandbox::{NAMESPACE, new_id},
    session::Session,
    traffic,
};

pub(super) async fn detach(session: &Session) -> Result<()> {
    let pod = session.pod("detached").await?;
    let sandbox = &pod.sandbox;
    session.client.detach_id(&sandbox.id).await?;
    session.check_unknown(&sandbox.id).await?;
    session.check_bare(&sandbox.netns).await?;
    session.client.detach_id(&sandbox.id).await?;
    session.check_unknown(&sandbox.id).await
}

pub(super) async fn detach_unknown(session: &Session) -> Result<()> {
    let id = new_id();
    session.client.detach_id(&id).await?;
    session.client.detach_id(&id).await
}

pub(super) async fn delete(session: &Session) -> Result<()> {
    let pod = session.pod("deleted").await?;
    let sandbox = &pod.sandbox;
    session.client.detach_id(&sandbox.id).await?;
    session.client.delete_id(&sandbox.id).await?;
    session.check_path_gone(&sandbox.path).await?;
    session.client.delete_id(&sandbox.id).await?;
    session.client.detach_id(&sandbox.id).await?;
    session.check_unknown(&sandbox.id).await
}

pub(super) async fn delete_unknown(session: &Session) -> Result<()> {
    let id = new_id();
    session.client.delete_id(&id).await?;
    session.client.delete_id(&id).await
}

pub(super) async fn delete_attached(session: &Session) -> Result<()> {
    let pod = session.pod("attached").await?;
    let sandbox = &pod.sandbox;
    session.client.delete_id(&sandbox.id).await?;
    session.check_unknown(&sandbox.id).await?;
    session.check_path_gone(&sandbox.path).await?;
    session.check_bare(&sandbox.netns).await
}

pub(super) async fn delete_by_path(session: &Session) -> Result<()> {
    let sandbox = session.sandbox("unused").await?;
    session.client.delete_path(&sandbox.path).await?;
    session.check_path_gone(&sandbox.path).await?;
    session.client.delete_path(&sandbox.path).await
}

/// The kubelet detaches and deletes all earlier sandboxes of a pod again and again.
pub(super) async fn older_sandbox(session: &Session) -> Result<()> {
    let older = session.pod("restarted").await?;
    let newer = session.pod("restarted").await?;
    for _repetition in 0..2 {
        session.remove(&older.sandbox).await?;
        let named = DeleteNetworkRequest {
            id: older.sandbox.id.clone(),
            name: older.sandbox.name.clone(),
            namespace: NAMESPACE.to_owned(),
            ..DeleteNetworkRequest::default()
        };
        session.client.delete(named).await?;
    }
    session.check_path_gone(&older.sandbox.path).await?;
    let path = &newer.sandbox.path;
    require!(
        Path::new(path).exists(),
        "deleting the earlier sandbox removed {path} of the newer one"
    );
    session.check_query(&newer).await?;
    session.check_pod(&newer).await?;
    let other = session.pod("other").await?;
    traffic::check_both_ways(&newer, &other).await?;
    Ok(())
}
