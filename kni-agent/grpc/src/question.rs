//! Converts and checks the requests of `kni.runtime.v1`.

use kni_model::{
    PodRef,
    flow_view::{Arrival, ExplainQuestion, FlowFilter, QuestionError},
};
use kni_proto::runtime::{Arrival as WireArrival, ExplainRequest, FlowFilter as WireFilter, GetPolicyRequest};

/// Longest text in a request, in bytes: two Kubernetes names, an interface and the separators.
const MAX_TEXT: usize = 253 + 1 + 253 + 1 + 15;

/// An absent filter selects all.
pub(super) fn flow_filter(wire: Option<WireFilter>) -> FlowFilter {
    let WireFilter {
        pod_namespace,
        pod_name,
        network,
        drops_only,
    } = wire.unwrap_or_default();
    FlowFilter {
        pod_namespace,
        pod_name,
        network,
        drops_only,
    }
}

/// Checks syntax only; the existence of pods, interfaces and networks is checked elsewhere.
pub(super) fn explain(wire: ExplainRequest) -> Result<ExplainQuestion, QuestionError> {
    let ExplainRequest {
        source,
        destination,
        protocol,
        port,
        network,
        length,
        arrival,
    } = wire;
    text("source", &source)?;
    text("destination", &destination)?;
    let number = protocol_number(&protocol)?;
    let port = u16::try_from(port).map_err(|_range| invalid("port", format!("{port} is not a port (0 to 65535)")))?;
    let has_ports = matches!(number, 6 | 17 | 132);
    if has_ports != (port != 0) {
        let reason = if has_ports {
            format!("{protocol} needs a destination port")
        } else {
            format!("{protocol} has no ports")
        };
        return Err(invalid("port", reason));
    }
    if network.len() > MAX_TEXT {
        return Err(invalid("network", "is too long".to_owned()));
    }
    Ok(ExplainQuestion {
        source,
        destination,
        protocol: number,
        port,
        network: Some(network).filter(|network| !network.is_empty()),
        length: match length {
            0 => None,
            bytes => Some(u16::try_from(bytes).map_err(|_range| {
                let reason = format!("{bytes} bytes are more than a packet has (65535)");
                invalid("length", reason)
            })?),
        },
        arrival: arrival.map(tunnel).transpose()?,
    })
}

fn tunnel(wire: WireArrival) -> Result<Arrival, QuestionError> {
    /// Numbers of virtual networks have 24 bits.
    const LIMIT: u32 = 1 << 24;
    let WireArrival { sender, number } = wire;
    text("sender", &sender)?;
    let address = sender.parse::<std::net::IpAddr>().map_err(|_not_one| {
        let reason = format!("{sender:?} is no address");
        invalid("sender", reason)
    })?;
    if number >= LIMIT {
        return Err(invalid("number", format!("{number} has more than 24 bits")));
    }
    Ok(Arrival {
        sender: address.to_canonical(),
        number,
    })
}

/// The pod of a policy request.
pub(super) fn pod(wire: GetPolicyRequest) -> Result<PodRef, QuestionError> {
    let GetPolicyRequest {
        pod_namespace,
        pod_name,
    } = wire;
    text("pod_namespace", &pod_namespace)?;
    text("pod_name", &pod_name)?;
    Ok(PodRef {
        namespace: pod_namespace,
        name: pod_name,
        uid: String::new(),
    })
}

fn protocol_number(word: &str) -> Result<u8, QuestionError> {
    let known = [("TCP", 6), ("UDP", 17), ("SCTP", 132), ("ICMP", 1), ("ICMPv6", 58)];
    let known = known.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(word));
    known
        .map(|(_, number)| number)
        .or_else(|| word.parse().ok().filter(|number| *number != 0))
        .ok_or_else(|| {
            let quote: String = word.chars().take(32).collect();
            invalid(
                "protocol",
                format!("{quote:?} is none of TCP, UDP, SCTP, ICMP and 1 to 255"),
            )
        })
}

fn text(field: &'static str, value: &str) -> Result<(), QuestionError> {
    if value.is_empty() {
        return Err(invalid(field, "is empty".to_owned()));
    }
    if value.len() > MAX_TEXT {
        return Err(invalid(
            field,
            format!("{} bytes long, more than {MAX_TEXT}", value.len()),
        ));
    }
    Ok(())
}

fn invalid(field: &'static str, reason: String) -> QuestionError {
    QuestionError::Invalid { field, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(protocol: &str, port: u32) -> Result<(u8, u16), String> {
        let wire = ExplainRequest {
            source: "x/a".to_owned(),
            destination: "10.0.0.1".to_owned(),
            protocol: protocol.to_owned(),
            port,
            network: String::new(),
            length: 0,
            arrival: None,
        };
        let question = explain(wire).map_err(|error| error.to_string())?;
        assert_eq!(question.network, None);
        Ok((question.protocol, question.port))
    }

    #[test]
    fn protocols_have_names_and_numbers() {
        assert_eq!(parsed("tcp", 80), Ok((6, 80)));
        assert_eq!(parsed("SCTP", 65535), Ok((132, 65535)));
        assert_eq!(parsed("icmp", 0), Ok((1, 0)));
        assert_eq!(parsed("ICMPv6", 0), Ok((58, 0)));
        assert_eq!(parsed("47", 0), Ok((47, 0)));
        assert_eq!(parsed("17", 53), Ok((17, 53)));
    }

    #[test]
    fn what_makes_no_sense_is_told_by_field() {
        for (protocol, port, expected) in [
            ("tcp", 0, "port: tcp needs a destination port"),
            ("icmp", 8, "port: icmp has no ports"),
            ("tcp", 65536, "port: 65536 is not a port (0 to 65535)"),
            ("0", 0, "protocol: \"0\" is none of TCP, UDP, SCTP, ICMP and 1 to 255"),
            ("256", 0, "protocol: \"256\" is none of"),
            ("", 0, "protocol: \"\" is none of"),
        ] {
            let error = parsed(protocol, port).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
        for (length, sender, number, expected) in [
            (
                70_000,
                "192.0.2.1",
                1,
                "length: 70000 bytes are more than a packet has (65535)",
            ),
            (0, "n2", 1, "sender: \"n2\" is no address"),
            (0, "", 1, "sender: is empty"),
            (0, "192.0.2.1", 1 << 24, "number: 16777216 has more than 24 bits"),
        ] {
            let error = explain(ExplainRequest {
                source: "10.0.0.1".to_owned(),
                destination: "10.0.0.2".to_owned(),
                protocol: "icmp".to_owned(),
                length,
                arrival: Some(WireArrival {
                    sender: sender.to_owned(),
                    number,
                }),
                ..ExplainRequest::default()
            });
            assert_eq!(error.unwrap_err().to_string(), expected);
        }
        let nobody = explain(ExplainRequest {
            destination: "x/a".to_owned(),
            ..ExplainRequest::default()
        });
        assert_eq!(nobody.unwrap_err().to_string(), "source: is empty");
        let long = pod(GetPolicyRequest {
            pod_namespace: "x".repeat(600),
            pod_name: "a".to_owned(),
        });
        assert_eq!(
            long.unwrap_err().to_string(),
            "pod_namespace: 600 bytes long, more than 523"
        );
    }
}
