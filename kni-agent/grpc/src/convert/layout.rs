//! Recognises which layout a request of `AttachNetwork` has, and reads it as one of `AttachInterface`.
//!
//! Both layouts have one method path. The fields 5 to 9 are `dns_config`, `port_mappings`, `labels`, `annotations` and
//! `extradata` from v0.0.6 on, and the fields 5 to 7 were `labels`, `annotations` and `extradata` before. No field
//! names the layout, but the shapes of their contents differ.

use std::{collections::BTreeMap, net::IpAddr};

use kni_model::PodRef;
use kni_proto::kni::{AttachInterfaceRequest, AttachNetworkRequest, DnsConfig, MapEntry, PortMapping};
use prost::{
    DecodeError, Message,
    encoding::{DecodeContext, WireType, decode_key, skip_field},
};

use super::{
    error::{Refusal, RequestError},
    extradata,
};

/// Prefix of the labels that the kubelet sets on a sandbox.
const KUBELET_LABELS: &str = "io.kubernetes.";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// Up to v0.0.5.
    Early,
    /// From v0.0.6 on.
    Current,
}

/// A request in either layout. One that no layout explains is refused, as is one with contents of both.
pub(crate) fn attach_network(request: AttachNetworkRequest) -> Result<AttachInterfaceRequest, RequestError> {
    let pod = PodRef::named(&request.namespace, &request.name);
    let id = request.id.clone();
    read(request).map_err(|refusal| refusal.of(&pod, &id))
}

fn read(request: AttachNetworkRequest) -> Result<AttachInterfaceRequest, Refusal> {
    let layout = layout(&request)?;
    let AttachNetworkRequest {
        name,
        id,
        namespace,
        isolation,
        dns_config_or_labels,
        port_mappings_or_annotations,
        labels_or_extradata,
        annotations,
        extradata,
    } = request;
    let common = AttachInterfaceRequest {
        name,
        id,
        namespace,
        isolation,
        ..AttachInterfaceRequest::default()
    };
    Ok(match layout {
        Layout::Early => AttachInterfaceRequest {
            labels: map("labels", &dns_config_or_labels)?,
            annotations: map("annotations", &port_mappings_or_annotations)?,
            extradata: map("extradata", &labels_or_extradata)?,
            ..common
        },
        Layout::Current => AttachInterfaceRequest {
            dns_config: dns_config(&dns_config_or_labels)?,
            port_mappings: port_mappings(&port_mappings_or_annotations)?,
            labels: map("labels", &labels_or_extradata)?,
            annotations: map("annotations", &annotations)?,
            extradata: map("extradata", &extradata)?,
            ..common
        },
    })
}

/// What speaks for each layout.
#[derive(Default)]
struct Evidence {
    early: Option<&'static str>,
    current: Option<&'static str>,
}

impl Evidence {
    fn decide(&self) -> Result<Option<Layout>, Refusal> {
        match (self.early, self.current) {
            (None, None) => Ok(None),
            (Some(_), None) => Ok(Some(Layout::Early)),
            (None, Some(_)) => Ok(Some(Layout::Current)),
            (Some(early), Some(current)) => {
                let reason = format!(
                    "contents of two layouts: {early}, as up to v0.0.5, and {current}, as from v0.0.6 on; call \
                     AttachInterface, which has one layout"
                );
                Err(Refusal::new("AttachNetworkRequest", reason))
            }
        }
    }
}

/// Without any evidence both layouts mean the same, except for entries of field 7, which are labels then.
fn layout(request: &AttachNetworkRequest) -> Result<Layout, Refusal> {
    let certain = shapes(request)?.decide()?;
    let found = certain.map_or_else(
        || contents(request).and_then(|hints| hints.decide()),
        |found| Ok(Some(found)),
    )?;
    Ok(found.unwrap_or(Layout::Current))
}

/// Properties that no request of the other layout can have.
fn shapes(request: &AttachNetworkRequest) -> Result<Evidence, Refusal> {
    let mut found = Evidence::default();
    if !request.annotations.is_empty() || !request.extradata.is_empty() {
        found.current = Some("the fields 8 and 9");
    }
    match request.dns_config_or_labels.as_slice() {
        [] => {}
        [only] => {
            let fields = fields(5, only)?;
            let count = |number| fields.iter().filter(|(found, _)| *found == number).count();
            if count(1) > 1 || count(2) > 1 || count(3) > 0 {
                found.current = Some("a DNSConfig in field 5");
            }
        }
        [_, _, ..] => found.early = Some("several labels in field 5"),
    }
    for item in &request.port_mappings_or_annotations {
        let fields = fields(6, item)?;
        let is_text = |(number, wire): &(u32, WireType)| *number < 3 && *wire == WireType::LengthDelimited;
        if fields.iter().any(is_text) {
            found.early = Some("annotations in field 6");
        } else if !fields.is_empty() {
            found.current = Some("port mappings in field 6");
        }
    }
    Ok(found)
}

/// Texts that make sense in one of the layouts only, where the shapes are those of both.
fn contents(request: &AttachNetworkRequest) -> Result<Evidence, Refusal> {
    let mut found = Evidence::default();
    if let [only] = request.dns_config_or_labels.as_slice() {
        let MapEntry { key, value } = decode("dns_config", only)?;
        if key.parse::<IpAddr>().is_ok() {
            found.current = Some("the address of a name server in field 5");
        } else if key.starts_with(KUBELET_LABELS) || !(key.is_empty() || value.is_empty()) {
            found.early = Some("a label in field 5");
        }
    }
    let items = request.labels_or_extradata.iter();
    let keys = items.map(|item| decode("labels", item).map(|MapEntry { key, .. }| key));
    let keys: Vec<String> = keys.collect::<Result<_, _>>()?;
    // Labels of the kubelet first: a pod's author may name a label like a key of extradata.
    if keys.iter().any(|key| key.starts_with(KUBELET_LABELS)) {
        found.current = Some("labels in field 7");
    } else if keys.iter().any(|key| extradata::is_attach_key(key)) {
        found.early = Some("extradata in field 7");
    }
    Ok(found)
}

/// Number and wire type of each field of an encoded message.
fn fields(number: u32, mut message: &[u8]) -> Result<Vec<(u32, WireType)>, Refusal> {
    let mut next = || -> Result<Option<(u32, WireType)>, DecodeError> {
        if message.is_empty() {
            return Ok(None);
        }
        let (tag, wire) = decode_key(&mut message)?;
        skip_field(wire, tag, &mut message, DecodeContext::default())?;
        Ok(Some((tag, wire)))
    };
    let mut found = Vec::new();
    while let Some(field) = next().map_err(|error| unreadable(&format!("field {number}"), &error))? {
        found.push(field);
    }
    Ok(found)
}

fn dns_config(items: &[Vec<u8>]) -> Result<Option<DnsConfig>, Refusal> {
    items.first().map(|item| decode("dns_config", item)).transpose()
}

fn port_mappings(items: &[Vec<u8>]) -> Result<Vec<PortMapping>, Refusal> {
    let each = items.iter().enumerate();
    each.map(|(index, item)| decode(&format!("port_mappings[{index}]"), item))
        .collect()
}

fn map(field: &str, items: &[Vec<u8>]) -> Result<BTreeMap<String, String>, Refusal> {
    let each = items.iter().map(|item| decode(field, item));
    each.map(|entry| entry.map(|MapEntry { key, value }| (key, value)))
        .collect()
}

fn decode<M: Message + Default>(field: &str, item: &[u8]) -> Result<M, Refusal> {
    M::decode(item).map_err(|error| unreadable(field, &error))
}

fn unreadable(field: &str, error: &DecodeError) -> Refusal {
    Refusal::new(field, format!("cannot be decoded: {error}"))
}

#[cfg(test)]
mod tests;
