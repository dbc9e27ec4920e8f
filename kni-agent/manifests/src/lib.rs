//! Networks, policies and services from a folder of manifests: read, refused by file, line and field, and watched.
//! Layer: edge.

use std::{
    collections::BTreeMap,
    fmt, io,
    path::{Path, PathBuf},
};

use kni_model::{
    NetworkSpec,
    policy::{Labels, Policy},
    service::{EndpointSlice, Service},
};

mod document;
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

/// Where a manifest stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The file, below the folder as it was given.
    pub file: PathBuf,
    /// First line of the document, from 1.
    pub line: u32,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)
    }
}

/// A manifest, or a whole file, that does not count, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The file.
    pub file: PathBuf,
    /// Line of the field, or of the nearest thing around it that is there, from 1; `None` if the file is refused.
    pub line: Option<u32>,
    /// Kind of the object, where it says one.
    pub kind: Option<String>,
    /// Name of the object, where it says one, after its namespace and '/', where it says that too.
    pub name: Option<String>,
    /// Path of the field, such as `spec.subnets[1]`; `None` if the document as a whole is wrong.
    pub field: Option<String>,
    /// What is wrong.
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

/// What a folder of manifests says, in the order of file names and of documents within a file. Names are unique among
/// the objects of a kind and namespace, at most one network is the default, and no two Services of a network have the
/// same virtual address; whatever would break that is in `refused`. Objects that are somebody else's to serve, such as
/// headless Services, are in no list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ManifestSet {
    /// The networks that count.
    pub networks: Vec<(NetworkSpec, Origin)>,
    /// Policies of every kind.
    pub policies: Vec<(Policy, Origin)>,
    /// Labels of namespaces, with the label of the name; a namespace without a manifest is not here.
    pub namespaces: BTreeMap<String, Labels>,
    /// Services with virtual addresses.
    pub services: Vec<(Service, Origin)>,
    /// Endpoints of Services.
    pub slices: Vec<(EndpointSlice, Origin)>,
    /// The manifests that do not count.
    pub refused: Vec<Refusal>,
}

impl ManifestSet {
    /// The network that pods join when nothing else is asked for, if there is one.
    pub fn default_network(&self) -> Option<&NetworkSpec> {
        self.networks.iter().map(|(spec, _)| spec).find(|spec| spec.default)
    }
}

/// The folder itself cannot be used; a single file never is the reason.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The folder cannot be listed.
    #[error("manifest folder {} cannot be read", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The folder cannot be watched.
    #[error("manifest folder {} cannot be watched", path.display())]
    Watch {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A folder of manifests. Files named `*.yaml`, `*.yml` and `*.json` count; names that begin with a dot do not, as
/// they belong to editors and to the kubelet's way of updating mounted folders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestSource {
    dir: PathBuf,
}

impl ManifestSource {
    /// Names a folder; touches nothing.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Reads the folder as it is now. Blocks on the file system.
    pub fn load(&self) -> Result<ManifestSet, ManifestError> {
        Ok(folder::parse(&folder::read(&self.dir)?))
    }
}
