//! Parses the port mappings of the containers.

use kni_model::{PortMapping, PortProtocol};
use kni_proto::kni::{PortMapping as Wire, Protocol};

use super::error::Refusal;

/// Most port mappings of one pod.
const MAX_MAPPINGS: usize = 16 * 1024;

/// Checks all mappings, the unmapped ones (host port 0) included.
pub(super) fn mappings(wire: &[Wire]) -> Result<Vec<PortMapping>, Refusal> {
    if wire.len() > MAX_MAPPINGS {
        return Err(Refusal::new(
            "port_mappings",
            format!("{} entries, more than {MAX_MAPPINGS}", wire.len()),
        ));
    }
    wire.iter()
        .enumerate()
        .map(|(index, mapping)| one(index, mapping))
        .collect()
}

fn one(index: usize, wire: &Wire) -> Result<PortMapping, Refusal> {
    let refuse = |field: &str, reason: String| Refusal::new(format!("port_mappings[{index}].{field}"), reason);
    let port = |field: &str, value: i32| {
        u16::try_from(value).map_err(|_range| refuse(field, format!("{value} is not a port (0 to 65535)")))
    };
    let protocol = match Protocol::try_from(wire.protocol) {
        Ok(Protocol::Tcp) => PortProtocol::Tcp,
        Ok(Protocol::Udp) => PortProtocol::Udp,
        Ok(Protocol::Sctp) => PortProtocol::Sctp,
        Err(unknown) => {
            return Err(refuse(
                "protocol",
                format!("{} is none of TCP (0), UDP (1) and SCTP (2)", unknown.0),
            ));
        }
    };
    let host_ip = match wire.host_ip.as_str() {
        "" => None,
        given => Some(given.parse().map_err(|_not_an_address| {
            let quote: String = given.chars().take(64).collect();
            refuse("host_ip", format!("{quote:?} is not an address"))
        })?),
    };
    Ok(PortMapping {
        protocol,
        container_port: port("container_port", wire.container_port)?,
        host_port: port("host_port", wire.host_port)?,
        host_ip,
    })
}
