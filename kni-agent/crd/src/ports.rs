//! Reads ports of policies and services.

use k8s_openapi::{api::networking::v1::NetworkPolicyPort, apimachinery::pkg::util::intstr::IntOrString};
use kni_model::policy::{PolicyPort, PortMatch};

use super::{
    invalid::{FieldError, at, shown},
    names::is_port_name,
};

pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
pub(super) const SCTP: u8 = 132;

/// Reads a protocol as its IANA number; the default is TCP.
pub(super) fn read_protocol(field: &str, name: Option<&str>) -> Result<u8, FieldError> {
    match name {
        None | Some("TCP") => Ok(TCP),
        Some("UDP") => Ok(UDP),
        Some("SCTP") => Ok(SCTP),
        Some(other) => Err(at(field, format!("{:?} is not TCP, UDP or SCTP", shown(other)))),
    }
}

/// Reads a port number, which must not be 0.
pub(super) fn read_port(field: &str, number: i32) -> Result<u16, FieldError> {
    match u16::try_from(number) {
        Ok(port) if port > 0 => Ok(port),
        Ok(_) | Err(_) => Err(at(field, format!("{number} is not in 1 to 65535"))),
    }
}

/// Reads one entry of a policy's `ports`.
pub(super) fn read_policy_port(field: &str, port: &NetworkPolicyPort) -> Result<PolicyPort, FieldError> {
    let protocol = read_protocol(&format!("{field}.protocol"), port.protocol.as_deref())?;
    let (port_field, end_field) = (format!("{field}.port"), format!("{field}.endPort"));
    let matched = match (&port.port, port.end_port) {
        (None, None) => PortMatch::Any,
        (None, Some(_)) => return Err(at(end_field, "needs a port, the first of the range")),
        (Some(IntOrString::Int(first)), end) => {
            let first = read_port(&port_field, *first)?;
            read_range(&end_field, first, end)?
        }
        (Some(IntOrString::String(_)), Some(_)) => {
            return Err(at(end_field, "needs a port that is a number, not a name"));
        }
        (Some(IntOrString::String(name)), None) if is_port_name(name) => PortMatch::Named(name.clone()),
        (Some(IntOrString::String(name)), None) => {
            let reason = format!(
                "{:?} is no port name: at most 15 of a-z, 0-9 and single '-' in between, at least one letter (a number \
                 has no quotes)",
                shown(name)
            );
            return Err(at(port_field, reason));
        }
    };
    Ok(PolicyPort {
        protocol,
        port: matched,
    })
}

/// The range from `first` to `end`; only `first` without an end.
pub(super) fn read_range(end_field: &str, first: u16, end: Option<i32>) -> Result<PortMatch, FieldError> {
    let last = end.map_or(Ok(first), |end| read_port(end_field, end))?;
    if last < first {
        return Err(at(end_field, format!("{last} is smaller than port {first}")));
    }
    Ok(PortMatch::Range(first, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<PolicyPort, FieldError> {
        read_policy_port("p", &serde_json::from_str(json).unwrap())
    }

    #[test]
    fn every_form_is_read() {
        for (json, protocol, port) in [
            ("{}", TCP, PortMatch::Any),
            (r#"{"protocol":"SCTP"}"#, SCTP, PortMatch::Any),
            (r#"{"port":80}"#, TCP, PortMatch::Range(80, 80)),
            (
                r#"{"protocol":"UDP","port":1,"endPort":65535}"#,
                UDP,
                PortMatch::Range(1, 65535),
            ),
            (r#"{"port":80,"endPort":80}"#, TCP, PortMatch::Range(80, 80)),
            (
                r#"{"port":"serve-80-tcp"}"#,
                TCP,
                PortMatch::Named("serve-80-tcp".to_owned()),
            ),
        ] {
            assert_eq!(read(json).unwrap(), PolicyPort { protocol, port }, "{json}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (json, field, why) in [
            (r#"{"protocol":"tcp"}"#, "p.protocol", "TCP, UDP or SCTP"),
            (r#"{"protocol":"ICMP","port":1}"#, "p.protocol", "\"ICMP\""),
            (r#"{"protocol":""}"#, "p.protocol", "TCP, UDP or SCTP"),
            (r#"{"port":0}"#, "p.port", "1 to 65535"),
            (r#"{"port":65536}"#, "p.port", "1 to 65535"),
            (r#"{"port":-1}"#, "p.port", "1 to 65535"),
            (r#"{"port":"80"}"#, "p.port", "no port name"),
            (r#"{"port":80,"endPort":79}"#, "p.endPort", "79 is smaller than port 80"),
            (r#"{"port":80,"endPort":65536}"#, "p.endPort", "1 to 65535"),
            (r#"{"port":"http","endPort":81}"#, "p.endPort", "number"),
            (r#"{"endPort":81}"#, "p.endPort", "needs a port"),
        ] {
            let (at, reason) = read(json).unwrap_err();
            assert_eq!(at, field, "{json}");
            assert!(reason.contains(why), "{json}: {reason}");
        }
    }
}
