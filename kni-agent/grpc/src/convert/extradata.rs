//! Determines which keys of a request's `extradata` the agent knows, and reads those of `isolation` with them.

use std::collections::BTreeMap;

use kni_proto::{
    cni,
    kni::{AttachInterfaceRequest, CreateNetworkRequest, DeleteNetworkRequest, DetachInterfaceRequest, Isolation},
};

use super::error::Refusal;

type Entries = BTreeMap<String, String>;

/// Key of the namespace path.
pub(super) const NETNS: &str = "netns";
/// Key of the pod's UID.
pub(super) const POD_UID: &str = "podUID";
/// Key of the number of the pod's sandbox, counted from 0. It is informational: the sandbox's id identifies it.
const ATTEMPT: &str = "attempt";

/// Names of the kind of isolation that the agent provides. Published clients send the first two.
const ISOLATION_TYPES: [&str; 4] = ["", "namespace", "netns", "network"];

const ABOUT_POD: [&str; 2] = [POD_UID, ATTEMPT];
const ABOUT_SANDBOX: [&str; 2] = [NETNS, cni::CGROUP_PATH];
const CNI_CALL: [&str; 4] = [cni::IFNAME, cni::NETWORK, cni::CONTAINER, cni::INVOCATION];
const CNI_INTERFACE: [&str; 5] = [cni::IPS, cni::MAC, cni::BANDWIDTH, cni::POD_NETWORK, cni::DEFAULT_ROUTE];

/// A request with `extradata`.
pub(crate) trait Extradata {
    /// The keys that the agent knows in this request.
    const KNOWN: &'static [&'static [&'static str]];

    /// Adds the entries of `isolation.extradata` to the request's own. An own entry that is not empty takes precedence.
    fn merge_isolation(&mut self) {}

    /// The entries.
    fn entries(&self) -> &Entries;

    /// The keys that the agent does not know in this request.
    fn unknown_keys(&self) -> impl Iterator<Item = &str> {
        let keys = self.entries().keys().map(String::as_str);
        keys.filter(|key| !Self::KNOWN.iter().any(|group| group.contains(key)))
    }
}

impl Extradata for CreateNetworkRequest {
    const KNOWN: &'static [&'static [&'static str]] = &[&ABOUT_POD];

    fn entries(&self) -> &Entries {
        &self.extradata
    }
}

impl Extradata for DeleteNetworkRequest {
    const KNOWN: &'static [&'static [&'static str]] = &[&ABOUT_POD, &ABOUT_SANDBOX];

    fn entries(&self) -> &Entries {
        &self.extradata
    }
}

impl Extradata for AttachInterfaceRequest {
    const KNOWN: &'static [&'static [&'static str]] = &[&ABOUT_POD, &ABOUT_SANDBOX, &CNI_CALL, &CNI_INTERFACE];

    fn merge_isolation(&mut self) {
        merge(&mut self.extradata, self.isolation.as_mut());
    }

    fn entries(&self) -> &Entries {
        &self.extradata
    }
}

impl Extradata for DetachInterfaceRequest {
    const KNOWN: &'static [&'static [&'static str]] = &[&ABOUT_POD, &ABOUT_SANDBOX, &CNI_CALL];

    fn merge_isolation(&mut self) {
        merge(&mut self.extradata, self.isolation.as_mut());
    }

    fn entries(&self) -> &Entries {
        &self.extradata
    }
}

fn merge(own: &mut Entries, isolation: Option<&mut Isolation>) {
    let Some(isolation) = isolation else { return };
    for (key, value) in std::mem::take(&mut isolation.extradata) {
        let entry = own.entry(key).or_default();
        if entry.is_empty() {
            *entry = value;
        }
    }
}

/// The pod's UID, if the client sent it in `extradata`.
pub(super) fn pod_uid(entries: &Entries) -> &str {
    entries.get(POD_UID).map(String::as_str).unwrap_or_default()
}

/// Refuses a kind of isolation that the agent does not provide.
pub(super) fn check_isolation(isolation: Option<&Isolation>) -> Result<(), Refusal> {
    let kind = isolation.map(|isolation| isolation.r#type.as_str()).unwrap_or_default();
    if ISOLATION_TYPES.contains(&kind) {
        return Ok(());
    }
    let quote: String = kind.chars().take(super::bounds::MAX_QUOTE).collect();
    let reason = format!("{quote:?} is none of \"namespace\", \"netns\", \"network\" and the empty text");
    Err(Refusal::new("isolation.type", reason))
}

/// Whether a key belongs to the extradata of a request to attach, and is no label.
pub(super) fn is_attach_key(key: &str) -> bool {
    AttachInterfaceRequest::KNOWN.iter().any(|group| group.contains(&key))
}
