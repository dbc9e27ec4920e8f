//! Parses the annotation with the named ports of the containers, which the kubelet does not send.

use std::collections::BTreeMap;

use kni_model::policy::ContainerPort;
use serde::Deserialize;

use super::error::Refusal;

/// A JSON list in the form of the pod's `spec.containers[].ports`.
const ANNOTATION: &str = "kni.dev/container-ports";
/// Most entries, unnamed ones included.
const MAX_PORTS: usize = 1024;
/// Longest name (Kubernetes: `IANA_SVC_NAME`).
const MAX_NAME: usize = 15;
/// Longest value that an error repeats, in characters.
const MAX_QUOTE: usize = 64;

/// An entry. Unknown fields, such as `hostPort`, are ignored.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    #[serde(default)]
    name: String,
    container_port: u32,
    #[serde(default)]
    protocol: Option<String>,
}

/// Parses the annotation; absent or blank it names nothing. Entries without a name are checked and left out.
pub(super) fn named(annotations: &BTreeMap<String, String>) -> Result<Vec<ContainerPort>, Refusal> {
    let Some(text) = annotations.get(ANNOTATION).map(|text| text.trim()) else {
        return Ok(Vec::new());
    };
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let entries: Vec<Entry> =
        serde_json::from_str(text).map_err(|error| refuse("", format!("is no JSON list of ports: {error}")))?;
    if entries.len() > MAX_PORTS {
        return Err(refuse("", format!("{} entries, more than {MAX_PORTS}", entries.len())));
    }
    let mut ports: Vec<ContainerPort> = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let port = one(index, entry)?;
        if port.name.is_empty() {
            continue;
        }
        if ports.iter().any(|other| other.name == port.name) {
            return Err(refuse(
                &format!("[{index}].name"),
                format!("{:?} is used twice", port.name),
            ));
        }
        ports.push(port);
    }
    Ok(ports)
}

fn one(index: usize, entry: &Entry) -> Result<ContainerPort, Refusal> {
    let refuse = |field: &str, reason: String| refuse(&format!("[{index}].{field}"), reason);
    let port = u16::try_from(entry.container_port).ok().filter(|port| *port != 0);
    let port = port.ok_or_else(|| {
        refuse(
            "containerPort",
            format!("{} is not a port (1 to 65535)", entry.container_port),
        )
    })?;
    let protocol = match entry.protocol.as_deref() {
        None | Some("TCP") => 6,
        Some("UDP") => 17,
        Some("SCTP") => 132,
        Some(other) => {
            let reason = format!("{:?} is none of TCP, UDP and SCTP", quote(other));
            return Err(refuse("protocol", reason));
        }
    };
    if !valid_name(&entry.name) {
        let reason = format!(
            "{:?} is no port name: at most {MAX_NAME} of a-z, 0-9 and '-', with a letter, without '-' at an end or twice",
            quote(&entry.name)
        );
        return Err(refuse("name", reason));
    }
    Ok(ContainerPort {
        name: entry.name.clone(),
        protocol,
        port,
    })
}

/// Whether Kubernetes accepts the name (RFC 6335); an empty one is valid.
fn valid_name(name: &str) -> bool {
    name.is_empty()
        || (name.len() <= MAX_NAME
            && name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            && name.bytes().any(|b| b.is_ascii_lowercase())
            && !name.starts_with('-')
            && !name.ends_with('-')
            && !name.contains("--"))
}

fn quote(text: &str) -> String {
    text.chars().take(MAX_QUOTE).collect()
}

fn refuse(place: &str, reason: String) -> Refusal {
    Refusal::new(format!("annotations[{ANNOTATION:?}]{place}"), reason)
}
