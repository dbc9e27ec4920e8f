//! Parses the networks that a pod requests in its annotations.

use std::{collections::BTreeSet, net::IpAddr};

use serde::{Deserialize, Serialize};

use super::{IfName, MacAddr, NetworkName};

mod comma;
mod error;
mod json;
mod names;
#[cfg(test)]
mod tests;

pub use error::SelectionError;
pub use names::assign_interface_names;

pub use super::id::PRIMARY_IFNAME;

/// The annotation of the Network Plumbing Working Group: a comma list or a JSON list.
pub const NETWORKS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/networks";
/// KNI's annotation: a comma list.
pub const MULTI_NETWORK_ANNOTATION: &str = "kni.io/multi-network";
/// Maximum number of networks that a pod may join beside its primary one.
pub const MAX_NETWORKS: usize = 32;
/// Maximum length of one annotation, in bytes.
pub const MAX_ANNOTATION_BYTES: usize = 32 * 1024;

/// A network that a pod requests beside its primary one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkSelection {
    /// The network.
    pub network: NetworkName,
    /// Namespace given with the name. Networks are cluster-scoped, so it has no effect; it is accepted because tools
    /// write it, and kept so that it can be written back.
    pub namespace: Option<String>,
    /// Interface name inside the pod; without it, [`assign_interface_names`] chooses one.
    pub ifname: Option<IfName>,
    /// Requested addresses in the network, without prefix.
    pub ips: Vec<IpAddr>,
    /// Requested MAC address.
    pub mac: Option<MacAddr>,
    /// Whether the pod's default routes use this network. The annotation requests it with gateway addresses; the next
    /// hop itself is always the network's own link-local gateway.
    pub default_route: bool,
}

impl NetworkSelection {
    /// Parses both annotations of a pod; the selections of [`NETWORKS_ANNOTATION`] come first. Absent or blank
    /// annotations select nothing. Nothing is ignored: invalid or unsupported content is an error.
    pub fn parse_annotations<'a>(
        annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Result<Vec<Self>, SelectionError> {
        let (mut networks, mut multi) = ("", "");
        for (key, value) in annotations {
            match key.as_str() {
                NETWORKS_ANNOTATION => networks = value.trim(),
                MULTI_NETWORK_ANNOTATION => multi = value.trim(),
                _ => {}
            }
        }
        let mut found = parse_one(NETWORKS_ANNOTATION, networks, true)?;
        found.extend(parse_one(MULTI_NETWORK_ANNOTATION, multi, false)?);
        check_together(&found)?;
        Ok(found.into_iter().map(|item| item.selection).collect())
    }
}

/// A selection with its position in the annotation.
struct Located {
    annotation: &'static str,
    index: usize,
    text: String,
    selection: NetworkSelection,
}

impl Located {
    fn error(&self, field: &str, reason: impl Into<String>) -> SelectionError {
        SelectionError::item(self.annotation, self.index, &self.text, field, reason)
    }
}

fn parse_one(annotation: &'static str, value: &str, json_allowed: bool) -> Result<Vec<Located>, SelectionError> {
    if value.len() > MAX_ANNOTATION_BYTES {
        let reason = format!("{} bytes long, more than {MAX_ANNOTATION_BYTES}", value.len());
        return Err(SelectionError::whole(annotation, reason));
    }
    let found = if value.is_empty() {
        Vec::new()
    } else if value.starts_with(['[', '{', '"']) {
        if !json_allowed {
            return Err(SelectionError::whole(
                annotation,
                "is a comma list of network names, not JSON",
            ));
        }
        json::parse(annotation, value)?
    } else {
        comma::parse(annotation, value)?
    };
    Ok(found)
}

/// Checks the rules across items: their number, one name per interface, one default route.
fn check_together(found: &[Located]) -> Result<(), SelectionError> {
    if let Some(first_too_many) = found.get(MAX_NETWORKS) {
        return Err(first_too_many.error("", format!("a pod may join at most {MAX_NETWORKS} additional networks")));
    }
    let mut names = BTreeSet::new();
    let mut default_route = false;
    for item in found {
        if let Some(ifname) = &item.selection.ifname {
            names::check_explicit(ifname).map_err(|reason| item.error("interface", reason))?;
            if !names.insert(ifname) {
                return Err(item.error("interface", format!("interface {ifname} is requested twice")));
            }
        }
        if item.selection.default_route && std::mem::replace(&mut default_route, true) {
            return Err(item.error("default-route", "another network already holds the pod's default route"));
        }
    }
    Ok(())
}

/// Checks the optional namespace before a network name.
fn namespace(value: &str) -> Result<String, String> {
    match value.parse::<NetworkName>() {
        // A namespace name obeys the same rule as a network name: both are DNS-1123 labels.
        Ok(label) => Ok(label.into()),
        Err(invalid) => Err(format!("namespace {:?} is not valid: {}", invalid.value, invalid.rule)),
    }
}
