//! Writes the `PodNetwork` manifests of a standalone agent.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};

use crate::namespaces::Namespaces;

/// The manifests folder, inside the node.
pub const MANIFESTS: &str = "/run/kni-manifests";

/// Lets pods of every namespace join, with everything that they may choose.
pub const OPEN: &str =
    "access: { namespaces: { from: All }, allowAddresses: true, allowMac: true, allowDefaultRoute: true }";

/// One file of the manifests folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// File name inside the folder.
    pub file: String,
    /// The YAML text.
    pub text: String,
}

/// A document with a `NetworkPolicy`; `spec` is a flow mapping of YAML.
pub fn network_policy(namespace: &str, name: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{namespace: {namespace}, name: {name}}}\n\
         spec: {spec}\n"
    )
}

impl Manifest {
    /// A network with the given subnets, and nothing about who may join.
    pub fn without_access(name: &str, subnets: &[&str]) -> Self {
        let list = subnets
            .iter()
            .fold(String::new(), |list, subnet| list + "    - " + subnet + "\n");
        let text = format!(
            "apiVersion: kni.dev/v1alpha1\nkind: PodNetwork\nmetadata:\n  name: {name}\nspec:\n  subnets:\n{list}"
        );
        Self {
            file: format!("{name}.yaml"),
            text,
        }
    }

    /// [`Self::without_access`] that pods of every namespace may join, with addresses, MAC addresses and default routes
    /// of their choice.
    pub fn network(name: &str, subnets: &[&str]) -> Self {
        Self::without_access(name, subnets).spec(OPEN)
    }

    /// The network that pods join by default.
    pub fn default_network(name: &str, subnets: &[&str]) -> Self {
        Self::network(name, subnets).spec("default: true")
    }

    /// Adds a line to the spec, for example `mtu: 1400`.
    #[must_use]
    pub fn spec(mut self, line: &str) -> Self {
        self.text.extend(["  ", line, "\n"]);
        self
    }

    /// `default` with `10.244.0.0/16` and `fd00:244::/64`, and `blue` and `red`, both with `10.10.0.0/16` and
    /// `fd10::/64`.
    pub fn overlapping() -> Vec<Self> {
        let same = ["10.10.0.0/16", "fd10::/64"];
        vec![
            Self::default_network("default", &["10.244.0.0/16", "fd00:244::/64"]),
            Self::network("blue", &same),
            Self::network("red", &same),
        ]
    }

    /// A file with the given text.
    pub fn file(file: &str, text: impl Into<String>) -> Self {
        Self {
            file: file.to_owned(),
            text: text.into(),
        }
    }

    /// Objects in one file, which change together.
    pub fn of(file: &str, objects: &[serde_json::Value]) -> Self {
        // JSON is valid YAML.
        let documents: Vec<String> = objects.iter().map(ToString::to_string).collect();
        Self::file(file, documents.join("\n---\n") + "\n")
    }

    /// [`Self::write_all`] into the folder of the agent inside `ns`.
    pub fn apply(manifests: &[Self], ns: &Namespaces) -> Result<()> {
        Self::write_all(manifests, ns, Path::new(MANIFESTS))
    }

    /// Removes the files from the folder of the agent inside `ns`.
    pub fn remove(manifests: &[Self], ns: &Namespaces) -> Result<()> {
        ns.enter(|| {
            let mut files = manifests
                .iter()
                .map(|manifest| Path::new(MANIFESTS).join(&manifest.file));
            files.try_for_each(fs::remove_file)
        })?
        .with_context(|| format!("manifests in {MANIFESTS}"))
    }

    /// Writes or replaces the files in `folder` as seen inside `ns`, each atomically, so that a watcher sees complete
    /// files.
    pub fn write_all(manifests: &[Self], ns: &Namespaces, folder: &Path) -> Result<()> {
        ns.enter(|| {
            fs::create_dir_all(folder)?;
            manifests.iter().try_for_each(|manifest| {
                let unfinished = folder.join(format!(".{}.new", manifest.file));
                fs::write(&unfinished, &manifest.text)?;
                fs::rename(&unfinished, folder.join(&manifest.file))
            })
        })?
        .with_context(|| format!("manifests in {}", folder.display()))
    }
}
