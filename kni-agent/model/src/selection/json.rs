//! Parses the JSON list of network selection elements. Keys that are not implemented are refused by name, not ignored.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, de::IgnoredAny};
use serde_path_to_error::Segment;

use super::{Located, NetworkSelection, SelectionError, namespace};

/// One element as written. `null` means absent, as in the Go programs that write these.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Element {
    name: String,
    namespace: Option<String>,
    ips: Option<Vec<String>>,
    mac: Option<String>,
    interface: Option<String>,
    default_route: Option<Vec<String>>,
    cni_args: Option<IgnoredAny>,
    infiniband_guid: Option<IgnoredAny>,
    bandwidth: Option<IgnoredAny>,
    #[serde(rename = "portMappings")]
    port_mappings: Option<IgnoredAny>,
    ipam_claim_reference: Option<IgnoredAny>,
}

/// A field of the element and the error in it.
type FieldError = (&'static str, String);

pub(super) fn parse(annotation: &'static str, value: &str) -> Result<Vec<Located>, SelectionError> {
    let mut reader = serde_json::Deserializer::from_str(value);
    let elements: Vec<Element> =
        serde_path_to_error::deserialize(&mut reader).map_err(|error| locate(annotation, &error))?;
    reader
        .end()
        .map_err(|error| SelectionError::whole(annotation, format!("not a JSON list: {error}")))?;
    elements
        .into_iter()
        .enumerate()
        .map(|(index, element)| {
            let text = element.name.clone();
            let selection = convert(element)
                .map_err(|(field, reason)| SelectionError::item(annotation, index, &text, field, reason))?;
            Ok(Located {
                annotation,
                index,
                text,
                selection,
            })
        })
        .collect()
}

fn locate(annotation: &'static str, error: &serde_path_to_error::Error<serde_json::Error>) -> SelectionError {
    let mut index = None;
    let mut field = String::new();
    for segment in error.path() {
        match segment {
            Segment::Seq { index: i } if index.is_none() => index = Some(*i),
            // Only positions below the item's own fields, such as `ips[0]`.
            Segment::Seq { .. } => field.push_str(&segment.to_string()),
            Segment::Map { key } => field.push_str(key),
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    match index {
        Some(index) => SelectionError::item(annotation, index, "", &field, error.inner().to_string()),
        None => SelectionError::whole(annotation, format!("not a JSON list of networks: {}", error.inner())),
    }
}

fn convert(element: Element) -> Result<NetworkSelection, FieldError> {
    refuse_unsupported(&element)?;
    let ips = element.ips.unwrap_or_default();
    let gateways = element.default_route.unwrap_or_default();
    for gateway in &gateways {
        gateway
            .parse::<IpAddr>()
            .map_err(|error| ("default-route", format!("{gateway:?}: {error}")))?;
    }
    Ok(NetworkSelection {
        network: element.name.parse().map_err(|error| ("name", format!("{error}")))?,
        namespace: element
            .namespace
            .as_deref()
            .map(namespace)
            .transpose()
            .map_err(|error| ("namespace", error))?,
        definition: None,
        ifname: element
            .interface
            .map(|name| name.parse())
            .transpose()
            .map_err(|error| ("interface", format!("{error}")))?,
        ips: ips.iter().map(|ip| address(ip)).collect::<Result<_, _>>()?,
        mac: element
            .mac
            .map(|mac| mac.parse())
            .transpose()
            .map_err(|error| ("mac", format!("{error}")))?,
        default_route: !gateways.is_empty(),
    })
}

fn refuse_unsupported(element: &Element) -> Result<(), FieldError> {
    let unsupported = [
        ("cni-args", &element.cni_args),
        ("infiniband-guid", &element.infiniband_guid),
        ("bandwidth", &element.bandwidth),
        ("portMappings", &element.port_mappings),
        ("ipam-claim-reference", &element.ipam_claim_reference),
    ];
    match unsupported.into_iter().find(|(_, value)| value.is_some()) {
        Some((field, _)) => Err((field, "not supported".to_owned())),
        None => Ok(()),
    }
}

/// Parses an address with or without prefix length; the prefix is checked and dropped, because pods have host routes.
fn address(text: &str) -> Result<IpAddr, FieldError> {
    let parsed = if text.contains('/') {
        text.parse::<IpNet>()
            .map(|net| net.addr())
            .map_err(|error| error.to_string())
    } else {
        text.parse::<IpAddr>().map_err(|error| error.to_string())
    };
    parsed.map_err(|error| ("ips", format!("{text:?}: {error}")))
}
