//! Checks that requests are served whatever name of the server they contain.

use kni_proto::kni::{
    AttachInterfaceResponse, CreateNetworkRequest, CreateNetworkResponse, DeleteNetworkRequest, DetachInterfaceRequest,
    QueryPodNetworkRequest, QueryPodNetworkResponse,
};
use prost::Message;

use crate::{
    client,
    error::{During as _, Failure, Result, require},
    sandbox::{NAMESPACE, addresses},
    session::{Session, attached},
    wire::{Answer, Call},
};

/// What clients send: current libraries for a `unix:` target, and grpc-go of two ages for a bare path.
const AUTHORITIES: [&str; 3] = ["localhost", "/tmp/kni.sock", "%2Ftmp%2Fkni.sock"];

pub(super) async fn check(session: &Session) -> Result<()> {
    for authority in AUTHORITIES {
        let life = life(session, authority).await;
        life.map_err(|failure| failure.about(&format!(":authority {authority}")))?;
    }
    Ok(())
}

/// All calls of a pod's life.
async fn life(session: &Session, authority: &str) -> Result<()> {
    let create = CreateNetworkRequest {
        name: "authority".to_owned(),
        namespace: NAMESPACE.to_owned(),
        ..CreateNetworkRequest::default()
    };
    let created: CreateNetworkResponse = call(session, "CreateNetwork", authority, &create).await?;
    let sandbox = session.adopt("authority", created.netns_path).await?;
    let id = sandbox.id.clone();
    let answer: AttachInterfaceResponse =
        call(session, "AttachInterface", authority, &sandbox.attach_request()).await?;
    attached(&sandbox.netns).await?;
    let query = QueryPodNetworkRequest {
        id: id.clone(),
        ..QueryPodNetworkRequest::default()
    };
    let queried: QueryPodNetworkResponse = call(session, "QueryPodNetwork", authority, &query).await?;
    let (answered, queried) = (addresses(&answer.ipconfigs)?, addresses(&queried.ipconfigs)?);
    require!(
        answered == queried,
        "QueryPodNetwork answers {queried:?}, AttachInterface answered {answered:?}"
    );
    let detach = DetachInterfaceRequest {
        id: id.clone(),
        ..DetachInterfaceRequest::default()
    };
    call::<()>(session, "DetachInterface", authority, &detach).await?;
    let delete = DeleteNetworkRequest {
        id,
        ..DeleteNetworkRequest::default()
    };
    call::<()>(session, "DeleteNetwork", authority, &delete).await?;
    session.check_path_gone(&sandbox.path).await
}

async fn call<R: Message + Default>(
    session: &Session,
    method: &'static str,
    authority: &str,
    request: &impl Message,
) -> Result<R> {
    let sent = Call::send(&session.socket, method, authority, &request.encode_to_vec()).await;
    let answer = sent.during(method)?.answer(client::ATTACH).await.during(method)?;
    let Answer {
        http,
        status,
        reason,
        message,
    } = answer;
    require!(
        http == "200" && status == "0",
        "{method} is answered with HTTP status {http:?}, gRPC status {status:?} {reason}"
    );
    R::decode(message.as_slice()).map_err(|error| Failure::Wrong(format!("the answer to {method}: {error}")))
}
