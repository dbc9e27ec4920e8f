//! Tests that the agent serves clients that send the path of its socket as `:authority`, as grpc-go does.

mod client;
mod grpc_go;
mod requests;

use anyhow::{Result, ensure};
use kni_integration::{
    Stage,
    agent::{KUBELET_SOCKET, SOCKET},
    kubelet::Sandbox,
};
use prost::Message as _;

pub(crate) const ATTACH: &str = "/kni.KNI/AttachInterface";
pub(crate) const QUERY: &str = "/kni.KNI/QueryPodNetwork";

/// The authorities of clients at the socket `path`: older grpc-go, newer grpc-go, all others.
pub(crate) fn authorities(path: &str) -> [String; 3] {
    [path.to_owned(), path.replace('/', "%2F"), "localhost".into()]
}

/// Both sockets with each of their authorities.
pub(crate) fn endpoints() -> Vec<(&'static str, String)> {
    let sockets = [SOCKET, KUBELET_SOCKET].into_iter();
    sockets
        .flat_map(|path| authorities(path).map(|name| (path, name)))
        .collect()
}

/// A sandbox before `AttachInterface`.
pub(crate) async fn sandbox(stage: &Stage, name: &str) -> Result<Sandbox> {
    let netns = stage.kubelet.create_network("team", name).await?;
    Ok(Sandbox::new("team", name, &netns))
}

/// The encoded `AttachInterface` of a sandbox.
pub(crate) fn attach(sandbox: &Sandbox) -> Vec<u8> {
    sandbox.attach_request().encode_to_vec()
}

/// Pads the message to `size` bytes with an unknown field: the agent limits the size of the known ones.
pub(crate) fn filled(mut message: Vec<u8>, size: usize) -> Vec<u8> {
    // Field 2047, length-delimited.
    message.extend([0xfa, 0x7f]);
    // The length is encoded for a mebibyte, regardless of the size.
    let fill = size.saturating_sub(message.len() + 3);
    let part = |shift: u32| u8::try_from(fill >> shift & 0x7f).expect("seven bits");
    message.extend([part(0) | 0x80, part(7) | 0x80, part(14)]);
    message.resize(message.len() + fill, 0x78);
    message
}

/// The addresses of `eth0` in a response to attach.
pub(crate) fn addresses(message: &[u8]) -> Result<Vec<String>> {
    let answer = kni_proto::kni::AttachInterfaceResponse::decode(message)?;
    Ok(answer
        .ipconfigs
        .get("eth0")
        .map(|config| config.ip.clone())
        .unwrap_or_default())
}

/// The addresses in the response of a successful attach.
pub(crate) fn attached(message: &[u8]) -> Result<Vec<String>> {
    let addresses = addresses(message)?;
    ensure!(addresses.len() == 2, "attached with {addresses:?}");
    Ok(addresses)
}
