//! Checks host ports from the host itself and from another pod.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use kni_proto::kni::{PortMapping, Protocol};

use super::node::{FEATURES_KEY, features_of_first};
use crate::{
    error::{During as _, Failure, Result},
    links,
    namespace::Netns,
    sandbox::Pod,
    session::Session,
    traffic,
};

const CONTAINER_PORT: u16 = 7080;
/// Below the usual range of ports that clients receive.
const HOST_PORTS: std::ops::Range<u16> = 20_000..30_000;
const FEATURE: &str = "host-ports";

pub(super) async fn tcp(session: &Session) -> Result<()> {
    check(session, Protocol::Tcp).await
}

pub(super) async fn udp(session: &Session) -> Result<()> {
    check(session, Protocol::Udp).await
}

/// A pod with a host port must be reachable there from the host or from another pod. A server that does not list the
/// feature, and whose ports lead nowhere, does not offer it.
async fn check(session: &Session, protocol: Protocol) -> Result<()> {
    let host_port = fastrand::u16(HOST_PORTS);
    let sandbox = session.sandbox("host-port").await?;
    let mut request = sandbox.attach_request();
    request.port_mappings = vec![PortMapping {
        protocol: protocol.into(),
        container_port: CONTAINER_PORT.into(),
        host_port: host_port.into(),
        host_ip: String::new(),
    }];
    let pod = session.attach_by(sandbox, request).await?;
    let client = session.pod("host-port-client").await?;
    let mut reasons = Vec::new();
    for address in host_addresses(session).await? {
        if pod.address(address.is_ipv4()).is_none() {
            continue;
        }
        for (from, netns) in [("the host", &session.host), ("a pod", &client.sandbox.netns)] {
            let to = SocketAddr::new(address, host_port);
            match reaches(netns, to, &pod, protocol).await? {
                Ok(()) => return Ok(()),
                Err(error) => reasons.push(format!("{to} from {from}: {error}")),
            }
        }
    }
    let reasons = reasons.join("; ");
    let listed = features_of_first(session).await?;
    if listed.iter().any(|feature| feature == FEATURE) {
        return Err(Failure::Wrong(format!("the port does not lead to the pod: {reasons}")));
    }
    Err(Failure::NotOffered(format!(
        "{FEATURE} is not in {FEATURES_KEY:?}, and no port leads to the pod"
    )))
}

async fn reaches(client: &Netns, to: SocketAddr, pod: &Pod, protocol: Protocol) -> Result<io::Result<()>> {
    let any: IpAddr = if to.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let (inside, at) = (&pod.sandbox.netns, SocketAddr::new(any, CONTAINER_PORT));
    if protocol == Protocol::Udp {
        let server = traffic::bind_udp(inside, at).await.during("bind in the pod")?;
        return Ok(traffic::reaches_udp(client, to, &server).await);
    }
    let server = traffic::listen(inside, at).await?;
    Ok(traffic::reaches_tcp(client, to, &server).await)
}

/// Addresses of the host that its pods can use.
async fn host_addresses(session: &Session) -> Result<Vec<IpAddr>> {
    let links = links::links(&session.host).await?;
    let addresses = links.iter().flat_map(|link| &link.addresses);
    let mut usable: Vec<IpAddr> = addresses
        .filter(|address| address.usable && !address.ip.is_loopback())
        .map(|address| address.ip)
        .collect();
    usable.sort_unstable();
    usable.dedup();
    Ok(usable)
}
