//! Clients that put the socket's path into `:authority`, as grpc-go does, are served by the real agent.

mod grpc_go;
mod many;
mod shapes;
mod split;

use std::time::Duration;

use anyhow::{Result, ensure};
use kni_integration::{
    Stage,
    agent::{KUBELET_SOCKET, SOCKET},
    h2raw::{Connection, Reply},
    kubelet::Sandbox,
};
use prost::Message as _;

pub(crate) const ATTACH: &str = "/kni.KNI/AttachInterface";
pub(crate) const QUERY: &str = "/kni.KNI/QueryPodNetwork";
const TIMEOUT: Duration = Duration::from_secs(10);

/// What clients of the socket at `path` send: older grpc-go, newer grpc-go, everyone else.
pub(crate) fn authorities(path: &str) -> [String; 3] {
    [path.to_owned(), path.replace('/', "%2F"), "localhost".into()]
}

/// Both sockets with each of their authorities.
pub(crate) fn doors() -> Vec<(&'static str, String)> {
    let doors = [SOCKET, KUBELET_SOCKET].into_iter();
    doors
        .flat_map(|path| authorities(path).map(|name| (path, name)))
        .collect()
}

pub(crate) fn open(stage: &Stage, socket: &str) -> Result<Connection> {
    Connection::open(&stage.node, socket, TIMEOUT)
}

/// A sandbox that `AttachInterface` has not seen yet.
pub(crate) async fn sandbox(stage: &Stage, name: &str) -> Result<Sandbox> {
    let netns = stage.kubelet.create_network("team", name).await?;
    Ok(Sandbox::new("team", name, &netns))
}

/// The encoded `AttachInterface` of a sandbox.
pub(crate) fn attach(sandbox: &Sandbox) -> Vec<u8> {
    sandbox.attach_request().encode_to_vec()
}

/// The message with a field that no version knows, which makes it `size` bytes long: what the agent takes of the
/// known ones is limited.
pub(crate) fn filled(mut message: Vec<u8>, size: usize) -> Vec<u8> {
    // Field 2047, length-delimited.
    message.extend([0xfa, 0x7f]);
    // As many bytes of length as a mebibyte needs, whatever the size.
    let fill = size.saturating_sub(message.len() + 3);
    let part = |shift: u32| u8::try_from(fill >> shift & 0x7f).expect("seven bits");
    message.extend([part(0) | 0x80, part(7) | 0x80, part(14)]);
    message.resize(message.len() + fill, 0x78);
    message
}

/// The addresses of `eth0` in an answer to attach.
pub(crate) fn addresses(message: &[u8]) -> Result<Vec<String>> {
    let answer = kni_proto::kni::AttachInterfaceResponse::decode(message)?;
    Ok(answer
        .ipconfigs
        .get("eth0")
        .map(|config| config.ip.clone())
        .unwrap_or_default())
}

/// The addresses that a served attach answered.
pub(crate) fn served(reply: &Reply) -> Result<Vec<String>> {
    ensure!(
        reply.http_status == "200" && reply.grpc_status == Some(0),
        "answered {:?} {:?} {}",
        reply.http_status,
        reply.grpc_status,
        reply.grpc_message
    );
    let addresses = addresses(&reply.message)?;
    ensure!(addresses.len() == 2, "attached with {addresses:?}");
    Ok(addresses)
}
