//! What holds between manifests: one network per name, one default network.

use std::collections::BTreeMap;

use super::{ManifestSet, Origin, Refusal};
use crate::{
    crd::PodNetwork,
    model::{NetworkName, NetworkSpec},
};

/// A network that is valid by itself.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) spec: NetworkSpec,
    pub(super) origin: Origin,
    /// Line of `metadata.name`.
    pub(super) name_line: u32,
    /// Line of `spec.default`.
    pub(super) default_line: u32,
}

impl Candidate {
    fn refuse(self, line: u32, field: &str, reason: String) -> Refusal {
        Refusal {
            file: self.origin.file,
            line: Some(line),
            kind: Some(<PodNetwork as kube::Resource>::kind(&()).into_owned()),
            name: Some(self.spec.name.into()),
            field: Some(field.to_owned()),
            reason,
        }
    }
}

/// Puts what was read together, in its order: the first of a name and the first default network win.
pub(super) fn combine(read: impl IntoIterator<Item = Result<Candidate, Box<Refusal>>>) -> ManifestSet {
    let mut set = ManifestSet::default();
    let mut names: BTreeMap<NetworkName, Origin> = BTreeMap::new();
    let mut default: Option<(NetworkName, Origin)> = None;
    for item in read {
        let candidate = match item {
            Ok(candidate) => candidate,
            Err(refusal) => {
                set.refused.push(*refusal);
                continue;
            }
        };
        if let Some(origin) = names.get(&candidate.spec.name) {
            let reason = format!("a network of this name is already defined at {origin}");
            let line = candidate.name_line;
            set.refused.push(candidate.refuse(line, "metadata.name", reason));
            continue;
        }
        if candidate.spec.default {
            if let Some((name, origin)) = &default {
                let reason = format!("network {name}, defined at {origin}, is already the default");
                let line = candidate.default_line;
                set.refused.push(candidate.refuse(line, "spec.default", reason));
                continue;
            }
            default = Some((candidate.spec.name.clone(), candidate.origin.clone()));
        }
        names.insert(candidate.spec.name.clone(), candidate.origin.clone());
        set.networks.push((candidate.spec, candidate.origin));
    }
    set
}
