//! Reads networks, policies and services from a folder of manifests, reports errors by file, line and field, and
//! watches for changes.
//! Layer: edge.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use kni_model::{
    NetworkSpec,
    egress::{EgressPool, EgressRefusal, EgressUser, EgressWay},
    policy::{Labels, Policy, PolicyRef},
    service::{EndpointSlice, Service},
};

mod document;
mod egress;
mod fidelity;
mod folder;
mod node;
mod object;
mod read;
mod set;
#[cfg(test)]
mod tests;
mod watch;

pub use read::parse_file;

/// The location of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The file, relative to the folder as it was given.
    pub file: PathBuf,
    /// First line of the document, from 1.
    pub line: u32,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)
    }
}

/// A manifest or a whole file that is refused, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The file.
    pub file: PathBuf,
    /// Line of the field, or of the nearest existing parent, from 1; `None` if the file is refused.
    pub line: Option<u32>,
    /// Kind of the object, if present.
    pub kind: Option<String>,
    /// Name of the object, if present, after its namespace and '/', if present.
    pub name: Option<String>,
    /// Path of the field, such as `spec.subnets[1]`; `None` if the document as a whole is wrong.
    pub field: Option<String>,
    /// The violated rule.
    pub reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        if let Some(kind) = &self.kind {
            write!(f, ": {kind}")?;
            if let Some(name) = &self.name {
                write!(f, " {name}")?;
            }
        }
        if let Some(field) = &self.field {
            write!(f, ": {field}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// The objects of a folder of manifests, in the order of file names and of documents within a file. Names are unique
/// among the objects of a kind and namespace, at most one network is the default, and no two Services of a network have
/// the same virtual address; objects that violate this are in `refused`. Valid objects that KNI does not serve, such as
/// headless Services, are in no list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ManifestSet {
    /// The accepted networks.
    pub networks: Vec<(NetworkSpec, Origin)>,
    /// Policies of every kind. One that is refused has the rules of its last valid version.
    pub policies: Vec<(Policy, Origin)>,
    /// Those of which no valid version is known: they isolate the selected pods and allow nothing.
    pub closed: BTreeSet<PolicyRef>,
    /// Pools of egress addresses.
    pub pools: Vec<(EgressPool, Origin)>,
    /// Who may use which egress address; policies that may not use one of theirs are also in `refused`.
    pub egress: BTreeMap<(EgressUser, IpAddr), Result<EgressWay, EgressRefusal>>,
    /// Labels of namespaces, including the label of the name; a namespace without a manifest is missing.
    pub namespaces: BTreeMap<String, Labels>,
    /// Services with virtual addresses.
    pub services: Vec<(Service, Origin)>,
    /// Endpoints of Services.
    pub slices: Vec<(EndpointSlice, Origin)>,
    /// The refused manifests.
    pub refused: Vec<Refusal>,
}

impl ManifestSet {
    /// The network that pods join by default, if there is one.
    pub fn default_network(&self) -> Option<&NetworkSpec> {
        self.networks.iter().map(|(spec, _)| spec).find(|spec| spec.default)
    }
}

/// An error of the folder itself; an error of a single file never causes it.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The folder cannot be listed.
    #[error("manifest folder {} cannot be read", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The folder cannot be watched.
    #[error("manifest folder {} cannot be watched", path.display())]
    Watch {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// A folder of manifests. Files named `*.yaml`, `*.yml` and `*.json` are read; names that begin with a dot are ignored,
/// because editors and the kubelet's updates of mounted folders use them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestSource {
    dir: PathBuf,
}

impl ManifestSource {
    /// Creates a reader of the folder; does not access the file system.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Reads the current content of the folder. Blocks on the file system.
    pub fn load(&self) -> Result<ManifestSet, ManifestError> {
        Ok(folder::parse(&folder::read(&self.dir)?, None))
    }
}
