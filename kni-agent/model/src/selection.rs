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
/// The annotation of Multus that names the network of the primary interface, in either format of
/// [`NETWORKS_ANNOTATION`].
pub const DEFAULT_NETWORK_ANNOTATION: &str = "v1.multus-cni.io/default-network";
/// KNI's annotation: a comma list.
pub const MULTI_NETWORK_ANNOTATION: &str = "kni.io/multi-network";
/// Maximum number of networks that a pod may join beside its primary one.
pub const MAX_NETWORKS: usize = 32;
/// Maximum length of one annotation, in bytes.
pub const MAX_ANNOTATION_BYTES: usize = 32 * 1024;

/// The networks that a pod's annotations select.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selections {
    /// That of the primary interface, by [`DEFAULT_NETWORK_ANNOTATION`].
    pub primary: Option<NetworkSelection>,
    /// The additional ones; those of [`NETWORKS_ANNOTATION`] come first.
    pub additional: Vec<NetworkSelection>,
}

/// A network that a pod requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkSelection {
    /// The network.
    pub network: NetworkName,
    /// Namespace given with the name: that of a definition of another tool. Networks themselves have none.
    pub namespace: Option<String>,
    /// The definition, as `namespace/name`, that the name has turned out to be; `network` is the one it refers to.
    pub definition: Option<String>,
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
    /// Parses the annotations of a pod. Absent ones and blank lists select nothing. Nothing is ignored: invalid or
    /// unsupported content is an error.
    pub fn parse_annotations<'a>(
        annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Result<Selections, SelectionError> {
        let (mut networks, mut multi, mut primary) = ("", "", None);
        for (key, value) in annotations {
            match key.as_str() {
                NETWORKS_ANNOTATION => networks = value.trim(),
                MULTI_NETWORK_ANNOTATION => multi = value.trim(),
                DEFAULT_NETWORK_ANNOTATION => primary = Some(value.trim()),
                _ => {}
            }
        }
        let mut found = parse_one(NETWORKS_ANNOTATION, networks, true)?;
        found.extend(parse_one(MULTI_NETWORK_ANNOTATION, multi, false)?);
        let primary = primary.map(parse_primary).transpose()?;
        check_together(&found, primary.as_ref())?;
        Ok(Selections {
            primary: primary.map(|item| item.selection),
            additional: found.into_iter().map(|item| item.selection).collect(),
        })
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
        Ok(Vec::new())
    } else if value.starts_with(['[', '{', '"']) {
        if !json_allowed {
            let reason = "is a comma list of network names, not JSON";
            return Err(SelectionError::whole(annotation, reason).quoting(value));
        }
        json::parse(annotation, value)
    } else {
        comma::parse(annotation, value)
    };
    found.map_err(|error| error.quoting(value))
}

/// Parses the network of the primary interface: a list of one.
fn parse_primary(value: &str) -> Result<Located, SelectionError> {
    let refuse = |reason: &str| SelectionError::whole(DEFAULT_NETWORK_ANNOTATION, reason).quoting(value);
    let mut found = parse_one(DEFAULT_NETWORK_ANNOTATION, value, true)?;
    let Some(item) = found.pop() else {
        return Err(refuse("names no network"));
    };
    if !found.is_empty() {
        return Err(refuse(
            "names more than one network, but a pod has one primary interface",
        ));
    }
    let name = item.selection.ifname.as_ref().map(IfName::as_str);
    if name.is_some_and(|name| name != PRIMARY_IFNAME) {
        return Err(item.error("interface", format!("the primary interface is {PRIMARY_IFNAME}")));
    }
    Ok(item)
}

/// Checks the rules across items: their number, one name per interface, one default route.
fn check_together(found: &[Located], primary: Option<&Located>) -> Result<(), SelectionError> {
    if let Some(first_too_many) = found.get(MAX_NETWORKS) {
        return Err(first_too_many.error("", format!("a pod may join at most {MAX_NETWORKS} additional networks")));
    }
    let mut names = BTreeSet::new();
    let mut default_route = primary.is_some_and(|item| item.selection.default_route);
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
