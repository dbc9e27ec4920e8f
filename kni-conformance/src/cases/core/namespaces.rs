//! Checks the namespaces that are created.

use kni_proto::kni::CreateNetworkRequest;

use crate::{
    error::{Result, require},
    session::Session,
};

pub(super) async fn create_unique(session: &Session) -> Result<()> {
    let one = session.sandbox("twice").await?;
    let other = session.sandbox("twice").await?;
    require!(one.path != other.path, "two calls return the path {}", one.path);
    require!(
        !one.netns.is(&other.netns),
        "{} and {} are one namespace",
        one.path,
        other.path
    );
    Ok(())
}

/// A container runtime as client sends nothing, and names the namespace in the attach.
pub(super) async fn create_empty(session: &Session) -> Result<()> {
    let one = session.sandbox_of("empty", CreateNetworkRequest::default()).await?;
    let other = session.sandbox_of("empty", CreateNetworkRequest::default()).await?;
    require!(one.path != other.path, "two calls return the path {}", one.path);
    let pod = session.attach(other).await?;
    session.check_pod(&pod).await
}
