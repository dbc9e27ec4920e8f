//! Matches the ports of a rule.

use k8s_openapi::{api::networking::v1::NetworkPolicyPort, apimachinery::pkg::util::intstr::IntOrString};

use super::{NamedPort, Protocol};

/// Whether the entry matches a port of the receiver; `named` are the ports of the receiving pod, empty if it is not a
/// pod.
pub(super) fn matches(entry: &NetworkPolicyPort, named: &[NamedPort], protocol: Protocol, port: u16) -> bool {
    if entry.protocol.as_deref().unwrap_or("TCP") != protocol.name() {
        return false;
    }
    match (&entry.port, entry.end_port) {
        (None, _) => true,
        (Some(IntOrString::Int(only)), None) => i32::from(port) == *only,
        (Some(IntOrString::Int(first)), Some(last)) => (*first..=last).contains(&i32::from(port)),
        (Some(IntOrString::String(name)), _) => named
            .iter()
            .any(|known| known.name == *name && known.protocol == protocol && known.port == port),
    }
}
