//! Enforces the rules between manifests: one object per kind and name, one default network, one Service per virtual
//! address, one tenant per egress address.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::PathBuf,
};

use kni_model::{NetworkName, policy::PolicyRef, service::Service};

use super::{
    ManifestSet, Origin, Refusal,
    egress::{self, Lines},
    object::Object,
};

/// The result of reading one object.
pub(super) type Read = Result<Candidate, Box<Refused>>;

/// An object that is refused.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) refusal: Refusal,
    pub(super) instead: Instead,
}

/// What stands for a refused object.
#[derive(Debug)]
pub(super) enum Instead {
    /// Nothing: it is no policy.
    Nothing,
    /// A closed policy, until a valid version is known.
    Closed(Box<Candidate>),
    /// The earlier policies of the file: it is not known which objects they are.
    Unread,
}

impl From<Refusal> for Box<Refused> {
    fn from(refusal: Refusal) -> Self {
        Self::new(Refused {
            refusal,
            instead: Instead::Unread,
        })
    }
}

/// An object that is valid on its own.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) object: Object,
    pub(super) kind: &'static str,
    /// `None` for cluster-scoped kinds.
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    pub(super) origin: Origin,
    /// Line of `metadata.name`.
    pub(super) name_line: u32,
    /// Line of `spec.default`.
    pub(super) default_line: u32,
    /// Line of `spec.clusterIP`.
    pub(super) address_line: u32,
    /// Lines of the items of `spec.egressAddresses`.
    pub(super) egress_lines: [u32; 2],
}

impl Candidate {
    fn refuse(self, line: u32, field: &str, reason: String) -> Refusal {
        let name = self.name;
        Refusal {
            file: self.origin.file,
            line: Some(line),
            kind: Some(self.kind.to_owned()),
            name: Some(match self.namespace {
                Some(namespace) => format!("{namespace}/{name}"),
                None => name,
            }),
            field: Some(field.to_owned()),
            reason,
        }
    }

    fn refuse_default(self, (name, origin): &(NetworkName, Origin)) -> Refusal {
        let line = self.default_line;
        let reason = format!("network {name}, defined at {origin}, is already the default");
        self.refuse(line, "spec.default", reason)
    }

    fn key(&self) -> Key {
        (self.kind, self.namespace.clone(), self.name.clone())
    }
}

/// Kind, namespace and name.
type Key = (&'static str, Option<String>, String);

/// Combines the objects in order: the first object of a name, the first default network and the first Service of a
/// virtual address are accepted.
///
/// The policies of `former` that are refused now stay, and those that it does not have are closed.
pub(super) fn combine(read: impl IntoIterator<Item = Read>, former: Option<&ManifestSet>) -> ManifestSet {
    let mut set = ManifestSet::default();
    let mut names: BTreeMap<Key, Origin> = BTreeMap::new();
    let mut default: Option<(NetworkName, Origin)> = None;
    let mut with_addresses = Vec::new();
    let mut lines = Lines::new();
    let mut closed = Vec::new();
    let mut unread = BTreeSet::new();
    for item in read {
        let candidate = match item {
            Ok(candidate) => candidate,
            Err(refused) => {
                match refused.instead {
                    Instead::Nothing => {}
                    Instead::Closed(candidate) => closed.push(*candidate),
                    Instead::Unread => {
                        unread.insert(refused.refusal.file.clone());
                    }
                }
                set.refused.push(refused.refusal);
                continue;
            }
        };
        let key = candidate.key();
        if let Some(origin) = names.get(&key) {
            let reason = format!("a {} of this name is already defined at {origin}", candidate.kind);
            let line = candidate.name_line;
            set.refused.push(candidate.refuse(line, "metadata.name", reason));
            continue;
        }
        if let Object::Network(spec) = &candidate.object
            && spec.default
        {
            if let Some(earlier) = &default {
                set.refused.push(candidate.refuse_default(earlier));
                continue;
            }
            default = Some((spec.name.clone(), candidate.origin.clone()));
        }
        names.insert(key, candidate.origin.clone());
        if let Object::Policy(policy) = &candidate.object {
            lines.insert(policy.reference.clone(), candidate.egress_lines);
        }
        if let Object::Service(Some(_)) = &candidate.object {
            // The network of an address, and so its conflicts, are known once the default network is.
            with_addresses.push(candidate);
        } else {
            set.insert(candidate);
        }
    }
    for candidate in closed {
        set.close(candidate, former, &mut lines);
    }
    if let Some(former) = former {
        set.keep_unread(former, &unread);
    }
    add_services(&mut set, with_addresses, default.as_ref().map(|(name, _)| name));
    egress::decide(&mut set, &lines);
    set
}

impl ManifestSet {
    fn has_policy(&self, reference: &PolicyRef) -> bool {
        self.policies.iter().any(|(policy, _)| policy.reference == *reference)
    }

    /// Adds what stands for a refused policy, unless another document has its name.
    fn close(&mut self, candidate: Candidate, former: Option<&Self>, lines: &mut Lines) {
        let Object::Policy(closed) = candidate.object else {
            return;
        };
        let reference = closed.reference.clone();
        if self.has_policy(&reference) {
            return;
        }
        let valid = former.filter(|former| !former.closed.contains(&reference));
        let valid = valid.and_then(|former| former.policies.iter().find(|(policy, _)| policy.reference == reference));
        let policy = if let Some((policy, _)) = valid {
            policy.clone()
        } else {
            self.closed.insert(reference.clone());
            *closed
        };
        lines.insert(reference, candidate.egress_lines);
        self.policies.push((policy, candidate.origin));
    }

    /// Retains the policies of files with a document that cannot be read.
    fn keep_unread(&mut self, former: &Self, unread: &BTreeSet<PathBuf>) {
        for (policy, origin) in &former.policies {
            if unread.contains(&origin.file) && !self.has_policy(&policy.reference) {
                if former.closed.contains(&policy.reference) {
                    self.closed.insert(policy.reference.clone());
                }
                self.policies.push((policy.clone(), origin.clone()));
            }
        }
    }

    fn insert(&mut self, candidate: Candidate) {
        let Candidate {
            object, name, origin, ..
        } = candidate;
        match object {
            Object::Network(spec) => self.networks.push((*spec, origin)),
            Object::Policy(policy) => self.policies.push((*policy, origin)),
            Object::Pool(pool) => self.pools.push((*pool, origin)),
            Object::Namespace(labels) => {
                self.namespaces.insert(name, labels);
            }
            Object::Service(Some(service)) => self.services.push((*service, origin)),
            Object::Slice(Some(slice)) => self.slices.push((*slice, origin)),
            Object::Service(None) | Object::Slice(None) => {}
        }
    }
}

/// Checks that virtual addresses are unique, which the API server ensures in a cluster. A Service that names no network
/// belongs to the default one.
fn add_services(set: &mut ManifestSet, candidates: Vec<Candidate>, default: Option<&NetworkName>) {
    let mut owners: BTreeMap<(Option<NetworkName>, IpAddr), Origin> = BTreeMap::new();
    for candidate in candidates {
        let Object::Service(Some(service)) = &candidate.object else {
            continue;
        };
        let network = service.network.as_ref().or(default).cloned();
        let taken = taken_address(service, network.as_ref(), &owners);
        if let Some((address, origin)) = taken {
            let reason = format!("{address} is already the address of the Service at {origin}");
            let line = candidate.address_line;
            set.refused.push(candidate.refuse(line, "spec.clusterIP", reason));
            continue;
        }
        for address in &service.cluster_ips {
            owners.insert((network.clone(), *address), candidate.origin.clone());
        }
        set.insert(candidate);
    }
}

fn taken_address(
    service: &Service,
    network: Option<&NetworkName>,
    owners: &BTreeMap<(Option<NetworkName>, IpAddr), Origin>,
) -> Option<(IpAddr, Origin)> {
    service.cluster_ips.iter().find_map(|address| {
        let origin = owners.get(&(network.cloned(), *address))?;
        Some((*address, origin.clone()))
    })
}
