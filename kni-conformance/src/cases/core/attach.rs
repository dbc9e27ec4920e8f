//! Checks attach: its effects in the namespace, its repetition, its failure, and where it finds the namespace.

use std::path::Path;

use kni_proto::kni::Isolation;

use crate::{
    error::{Failure, Result, require},
    links,
    sandbox::{NETNS_KEY, new_id},
    session::Session,
};

pub(super) async fn interface(session: &Session) -> Result<()> {
    let pod = session.pod("attached").await?;
    session.check_pod(&pod).await
}

pub(super) async fn repeated(session: &Session) -> Result<()> {
    let sandbox = session.sandbox("repeated").await?;
    let first = session.attach(sandbox.clone()).await?;
    let before = links::links(&sandbox.netns).await?.len();
    let second = session.attach(sandbox.clone()).await?;
    let (old, new) = (&first.addresses, &second.addresses);
    require!(
        old == new,
        "a repeated AttachInterface answers the addresses {new:?}, the first one answered {old:?}"
    );
    require!(
        first.interfaces == second.interfaces,
        "a repeated AttachInterface answers {:?}, the first one answered {:?}",
        second.interfaces,
        first.interfaces
    );
    let after = links::links(&sandbox.netns).await?.len();
    require!(
        before == after,
        "a repeated AttachInterface makes {after} interfaces of {before}"
    );
    session.check_pod(&second).await
}

pub(super) async fn missing_namespace(session: &Session) -> Result<()> {
    let mut sandbox = session.sandbox("absent").await?;
    let real = sandbox.path.clone();
    sandbox.path = format!("/run/kni-conformance-absent-{}", new_id());
    let before = session.host_pairs().await?;
    match session.client.attach(sandbox.attach_request()).await {
        Ok(answer) => {
            let interfaces = answer.ipconfigs;
            return Err(Failure::Wrong(format!(
                "AttachInterface into a missing namespace succeeds with {interfaces:?}"
            )));
        }
        // Refused, as it must be.
        Err(Failure::Call { .. }) => {}
        Err(other) => return Err(other),
    }
    let exists = Path::new(&sandbox.path).exists();
    require!(!exists, "a failed AttachInterface makes {}", sandbox.path);
    session.check_unknown(&sandbox.id).await?;
    session.remove(&sandbox).await?;
    session.check_host_pairs(&before).await?;
    // The teardown of the id must not have affected the namespace of the same pod.
    require!(Path::new(&real).exists(), "the teardown removed the namespace {real}");
    session.client.delete_path(&real).await?;
    session.check_path_gone(&real).await
}

pub(super) async fn from_extradata(session: &Session) -> Result<()> {
    let sandbox = session.sandbox("extradata").await?;
    let mut request = sandbox.attach_request();
    request.annotations.clear();
    let pod = session.attach_by(sandbox, request).await?;
    session.check_pod(&pod).await
}

pub(super) async fn from_isolation(session: &Session) -> Result<()> {
    let sandbox = session.sandbox("isolation").await?;
    let mut request = sandbox.attach_request();
    request.annotations.clear();
    request.extradata.remove(NETNS_KEY);
    request.isolation = Some(Isolation {
        path: sandbox.path.clone(),
        r#type: "namespace".to_owned(),
        ..Isolation::default()
    });
    let pod = session.attach_by(sandbox, request).await?;
    session.check_pod(&pod).await
}
