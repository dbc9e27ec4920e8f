//! Ensures that a host port leads to one pod.

use std::{net::IpAddr, sync::Arc};

use kni_model::{AttachRequest, NetworkName, Phase, PortMapping, PortProtocol, Sandbox};

use crate::{
    error::{AttachError, ErrorKind, Subject},
    registry::State,
};

/// Refuses a request for the port of the tunnel between nodes: what other nodes send there is for all pods.
pub(super) fn refuse_tunnel(
    overlay_port: Option<u16>,
    network: Option<&NetworkName>,
    mappings: &[PortMapping],
    subject: &Subject,
) -> Result<(), AttachError> {
    let is_tunnel =
        |mapping: &&PortMapping| mapping.protocol == PortProtocol::Udp && Some(mapping.host_port) == overlay_port;
    let Some(mapping) = of_node(mappings).find(is_tunnel) else {
        return Ok(());
    };
    let network = network.map(|name| format!("network {name}: ")).unwrap_or_default();
    let reason = format!(
        "{network}host port {} is the port of the tunnel between nodes",
        describe(mapping)
    );
    Err(subject.invalid("port_mappings", reason))
}

/// Refuses a request for a port that another sandbox has, or that the request contains twice.
pub(super) fn refuse_taken(state: &State, request: &AttachRequest, subject: &Subject) -> Result<(), AttachError> {
    let requested: Vec<&PortMapping> = of_node(&request.port_mappings).collect();
    for (position, mapping) in requested.iter().enumerate() {
        let mut earlier = requested.iter().take(position);
        if earlier.any(|other| collide(mapping, other) && other.container_port != mapping.container_port) {
            let reason = format!("host port {} is mapped twice", describe(mapping));
            return Err(subject.invalid("port_mappings", reason));
        }
        if let Some(holder) = holder(state, request, mapping) {
            return Err(subject.error(ErrorKind::HostPortTaken {
                port: describe(mapping),
                holder: Subject::from(holder),
            }));
        }
    }
    Ok(())
}

/// A sandbox that is being detached holds no ports.
fn holder<'a>(state: &'a State, request: &AttachRequest, mapping: &PortMapping) -> Option<&'a Sandbox> {
    let mut others = state
        .sandboxes
        .values()
        .filter(|other| other.id != request.sandbox && other.phase != Phase::Deleting);
    let has_it = |other: &&Arc<Sandbox>| of_node(&other.port_mappings).any(|taken| collide(mapping, taken));
    others.find(has_it).map(Arc::as_ref)
}

fn of_node(mappings: &[PortMapping]) -> impl Iterator<Item = &PortMapping> {
    mappings.iter().filter(|mapping| mapping.host_port != 0)
}

fn collide(one: &PortMapping, other: &PortMapping) -> bool {
    one.protocol == other.protocol && one.host_port == other.host_port && overlap(one.host_ip, other.host_ip)
}

/// No address matches every address, the unspecified address every one of its family.
fn overlap(one: Option<IpAddr>, other: Option<IpAddr>) -> bool {
    match (one, other) {
        (None, _) | (_, None) => true,
        (Some(one), Some(other)) => {
            one == other || one.is_ipv4() == other.is_ipv4() && (one.is_unspecified() || other.is_unspecified())
        }
    }
}

fn describe(mapping: &PortMapping) -> String {
    let protocol = match mapping.protocol {
        PortProtocol::Tcp => "TCP",
        PortProtocol::Udp => "UDP",
        PortProtocol::Sctp => "SCTP",
    };
    let address = mapping
        .host_ip
        .map_or_else(|| "any address".to_owned(), |ip| ip.to_string());
    format!("{protocol} {} of {address}", mapping.host_port)
}

#[cfg(test)]
mod tests {
    use kni_model::PodRef;

    use super::*;

    fn mapping(protocol: PortProtocol, host_port: u16, host_ip: Option<&str>) -> PortMapping {
        PortMapping {
            protocol,
            container_port: 80,
            host_port,
            host_ip: host_ip.map(|ip| ip.parse().unwrap()),
        }
    }

    #[test]
    fn the_tunnel_keeps_its_port() {
        use PortProtocol::{Tcp, Udp};
        for (mapping, overlay_port, is_refused) in [
            (mapping(Udp, 4789, None), Some(4789), true),
            (mapping(Udp, 4789, Some("127.0.0.1")), Some(4789), true),
            (mapping(Tcp, 4789, None), Some(4789), false),
            (mapping(Udp, 4789, None), Some(8472), false),
            (mapping(Udp, 4789, None), None, false),
        ] {
            let subject = Subject::pod(PodRef {
                namespace: "team".to_owned(),
                name: "web".to_owned(),
                ..PodRef::default()
            });
            let blue = "blue".parse().unwrap();
            let answer = refuse_tunnel(overlay_port, Some(&blue), &[mapping], &subject);
            assert_eq!(answer.is_err(), is_refused, "{overlay_port:?}");
            let Err(error) = answer else { continue };
            for word in ["team/web", "port_mappings", "network blue", "UDP 4789"] {
                assert!(error.to_string().contains(word), "{word}: {error}");
            }
        }
    }

    #[test]
    fn ports_collide_where_a_packet_could_mean_both() {
        use PortProtocol::{Tcp, Udp};
        let all = mapping(Tcp, 80, None);
        for (one, other, collides) in [
            (&all, mapping(Tcp, 80, None), true),
            (&all, mapping(Udp, 80, None), false),
            (&all, mapping(Tcp, 81, None), false),
            (&all, mapping(Tcp, 80, Some("192.0.2.1")), true),
            (
                &mapping(Tcp, 80, Some("192.0.2.2")),
                mapping(Tcp, 80, Some("192.0.2.1")),
                false,
            ),
            (
                &mapping(Tcp, 80, Some("0.0.0.0")),
                mapping(Tcp, 80, Some("192.0.2.1")),
                true,
            ),
            (
                &mapping(Tcp, 80, Some("0.0.0.0")),
                mapping(Tcp, 80, Some("2001:db8::1")),
                false,
            ),
            (
                &mapping(Tcp, 80, Some("::")),
                mapping(Tcp, 80, Some("2001:db8::1")),
                true,
            ),
        ] {
            assert_eq!(collide(one, &other), collides, "{one:?} {other:?}");
            assert_eq!(collide(&other, one), collides, "{other:?} {one:?}");
        }
        assert_eq!(describe(&all), "TCP 80 of any address");
        assert_eq!(of_node(&[all, mapping(Tcp, 0, None)]).count(), 1);
    }
}
