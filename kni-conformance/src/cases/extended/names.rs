//! Checks other names of methods, unusual ids and names, and the requested prefix of paths.

use std::path::Path;

use kni_proto::kni::{AttachNetworkRequest, CreateNetworkRequest, DeleteNetworkRequest, DetachInterfaceRequest};
use prost::Message as _;

use crate::{
    client::{ATTACH, CREATE, call},
    error::{Failure, Result, require},
    sandbox::{NAMESPACE, Pod, addresses},
    session::Session,
    traffic,
};

pub(super) async fn isolation_domain(session: &Session) -> Result<()> {
    let mut kni = session.client.kni();
    let request = CreateNetworkRequest::default();
    let created = call("CreateIsolationDomain", CREATE, kni.create_isolation_domain(request)).await?;
    let sandbox = session.adopt("domain", created.netns_path).await?;
    let pod = session.attach(sandbox).await?;
    session.check_pod(&pod).await?;
    let delete = DeleteNetworkRequest {
        id: pod.sandbox.id.clone(),
        ..DeleteNetworkRequest::default()
    };
    call("DeleteIsolationDomain", CREATE, kni.delete_isolation_domain(delete)).await?;
    session.check_path_gone(&pod.sandbox.path).await?;
    session.check_bare(&pod.sandbox.netns).await
}

pub(super) async fn attach_network(session: &Session) -> Result<()> {
    let mut kni = session.client.kni();
    let sandbox = session.sandbox("network").await?;
    // The layout of v0.0.6, which is that of AttachInterface.
    let request = AttachNetworkRequest::decode(sandbox.attach_request().encode_to_vec().as_slice())
        .map_err(|error| Failure::Wrong(format!("the request of AttachNetwork: {error}")))?;
    let answer = call("AttachNetwork", ATTACH, kni.attach_network(request)).await?;
    let pod = Pod {
        addresses: addresses(&answer.ipconfigs)?,
        interfaces: answer.ipconfigs,
        sandbox,
    };
    session.check_pod(&pod).await?;
    let detach = DetachInterfaceRequest {
        id: pod.sandbox.id.clone(),
        ..DetachInterfaceRequest::default()
    };
    call("DetachNetwork", ATTACH, kni.detach_network(detach)).await?;
    session.check_unknown(&pod.sandbox.id).await?;
    session.check_bare(&pod.sandbox.netns).await
}

/// The prefix is in the folder that the server itself chooses, which exists and is of a suitable kind.
pub(super) async fn path_prefix(session: &Session) -> Result<()> {
    let usual = session.sandbox("prefix").await?.path;
    let folder = Path::new(&usual).parent().unwrap_or(Path::new("/run/netns"));
    let prefix = folder.join("conformance-");
    let prefix = prefix.to_string_lossy().into_owned();
    let request = CreateNetworkRequest {
        netns_path_prefix: prefix.clone(),
        ..CreateNetworkRequest::default()
    };
    let sandbox = session.sandbox_of("prefix", request).await?;
    if !sandbox.path.starts_with(&prefix) {
        let path = sandbox.path;
        return Err(Failure::NotOffered(format!("{path} does not begin with {prefix}")));
    }
    session.client.delete_path(&sandbox.path).await?;
    session.check_path_gone(&sandbox.path).await
}

pub(super) async fn odd_ids(session: &Session) -> Result<()> {
    let (one, other) = (session.pod("beside-one").await?, session.pod("beside-other").await?);
    let long = "x".repeat(300);
    for id in ["", "a", "a/b", "../../etc", " ", long.as_str()] {
        session.client.detach_id(id).await?;
        session.client.delete_id(id).await?;
        session.check_unknown(id).await?;
    }
    for path in ["/run/kni-conformance-absent", "relative", "/"] {
        session.client.delete_path(path).await?;
    }
    for pod in [&one, &other] {
        session.check_pod(pod).await?;
        session.check_query(pod).await?;
        let path = &pod.sandbox.path;
        require!(Path::new(path).exists(), "the teardown of others removed {path}");
    }
    traffic::check_both_ways(&one, &other).await?;
    Ok(())
}

/// The name of a sandbox in a container runtime: `pod_namespace_uid_attempt`.
pub(super) async fn long_names(session: &Session) -> Result<()> {
    let sandbox = session.sandbox("long").await?;
    let mut request = sandbox.attach_request();
    let pod_name = "p".repeat(253);
    let namespace = format!("{NAMESPACE}-{}", "n".repeat(63 - NAMESPACE.len() - 1));
    let name = format!("{pod_name}_{namespace}_{}_0", sandbox.uid);
    request.name.clone_from(&name);
    request.namespace.clone_from(&namespace);
    for (key, value) in [("name", &pod_name), ("namespace", &namespace)] {
        request.labels.insert(format!("io.kubernetes.pod.{key}"), value.clone());
    }
    let pod = session.attach_by(sandbox, request).await?;
    session.check_pod(&pod).await?;
    let id = &pod.sandbox.id;
    let detach = DetachInterfaceRequest {
        name: name.clone(),
        id: id.clone(),
        namespace: namespace.clone(),
        ..DetachInterfaceRequest::default()
    };
    session.client.detach(detach).await?;
    let delete = DeleteNetworkRequest {
        name,
        id: id.clone(),
        namespace,
        ..DeleteNetworkRequest::default()
    };
    session.client.delete(delete).await?;
    session.check_path_gone(&pod.sandbox.path).await
}
