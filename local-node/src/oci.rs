//! Writes an image of several files as an OCI archive, without a container engine.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::Path,
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::image::{add, architecture, hex};

/// A file, folder or link of an image. Paths are relative to its root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A folder with its mode.
    Folder(u32),
    /// A symbolic link to the path.
    Link(String),
    /// An executable file.
    Program(Vec<u8>),
}

/// The content and configuration of an image.
#[derive(Debug, Clone, Default)]
pub struct Image {
    /// Entries by path; the order puts folders before their content.
    pub entries: BTreeMap<String, Entry>,
    /// The program and its arguments.
    pub entrypoint: Vec<String>,
    /// More arguments, in place of which a container may have others.
    pub arguments: Vec<String>,
    /// `NAME=value`.
    pub environment: Vec<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
}

impl Image {
    /// Writes the archive to `path`, named `reference`. Equal images make equal archives, without times and with
    /// root as the only owner.
    pub fn write(&self, path: &Path, reference: &str) -> Result<()> {
        let layer = self.layer()?;
        let config = serde_json::to_vec(&json!({
            "architecture": architecture(),
            "os": "linux",
            "config": self.configuration(),
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", hex(&layer))] },
            "history": [{ "created_by": "cargo xtask image" }],
        }))?;
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
        }))?;
        let mut listed = descriptor(MANIFEST, &manifest);
        let tag = reference.rsplit_once(':').map_or(reference, |(_, tag)| tag);
        if let Some(listed) = listed.as_object_mut() {
            listed.insert(
                "annotations".into(),
                json!({ "io.containerd.image.name": reference, "org.opencontainers.image.ref.name": tag }),
            );
        }
        let index = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [listed],
        }))?;
        let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
        let mut archive = tar::Builder::new(file);
        add(&mut archive, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#, 0o644)?;
        add(&mut archive, "index.json", &index, 0o644)?;
        for blob in [&manifest, &config, &layer] {
            add(&mut archive, &format!("blobs/sha256/{}", hex(blob)), blob, 0o644)?;
        }
        let done = archive.into_inner().map(drop);
        done.with_context(|| format!("write {}", path.display()))
    }

    /// Writes the entries below `folder`, which must be empty or missing.
    pub fn write_folder(&self, folder: &Path) -> Result<()> {
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        fs::create_dir_all(folder)?;
        for (name, entry) in &self.entries {
            let path = folder.join(name);
            let written =
                match entry {
                    Entry::Folder(mode) => fs::create_dir(&path)
                        .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(*mode))),
                    Entry::Link(to) => symlink(to, &path),
                    Entry::Program(bytes) => fs::write(&path, bytes)
                        .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755))),
                };
            written.with_context(|| format!("write {}", path.display()))?;
        }
        Ok(())
    }

    fn configuration(&self) -> Value {
        let mut configuration =
            json!({ "Entrypoint": self.entrypoint, "Env": self.environment, "Labels": self.labels });
        if let Some(all) = configuration.as_object_mut().filter(|_all| !self.arguments.is_empty()) {
            all.insert("Cmd".into(), json!(self.arguments));
        }
        configuration
    }

    fn layer(&self) -> Result<Vec<u8>> {
        let mut layer = tar::Builder::new(Vec::new());
        for (name, entry) in &self.entries {
            let mut header = tar::Header::new_gnu();
            header.set_size(0);
            match entry {
                Entry::Folder(mode) => {
                    header.set_entry_type(tar::EntryType::Directory);
                    header.set_mode(*mode);
                    layer.append_data(&mut header, format!("{name}/"), io::empty())?;
                }
                Entry::Link(to) => {
                    header.set_entry_type(tar::EntryType::Symlink);
                    header.set_mode(0o777);
                    layer.append_link(&mut header, name, to)?;
                }
                Entry::Program(bytes) => add(&mut layer, name, bytes, 0o755)?,
            }
        }
        layer.into_inner().context("layer of an image")
    }
}

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

fn descriptor(kind: &str, content: &[u8]) -> Value {
    json!({ "mediaType": kind, "digest": format!("sha256:{}", hex(content)), "size": content.len() })
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, io::Read as _, path::PathBuf};

    use super::*;

    fn image() -> Image {
        let entries = [
            ("bin", Entry::Folder(0o755)),
            ("bin/tool", Entry::Program(b"content".to_vec())),
            ("var", Entry::Folder(0o755)),
            ("var/run", Entry::Link("/run".into())),
        ];
        Image {
            entries: entries.map(|(name, entry)| (name.to_owned(), entry)).into(),
            entrypoint: vec!["/bin/tool".into()],
            arguments: vec!["rest".into()],
            ..Image::default()
        }
    }

    fn entries(archive: &[u8]) -> BTreeMap<String, (Vec<u8>, Option<PathBuf>)> {
        let mut found = BTreeMap::new();
        for entry in tar::Archive::new(archive).entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let link = entry.link_name().unwrap().map(std::borrow::Cow::into_owned);
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            found.insert(name, (content, link));
        }
        found
    }

    #[test]
    fn an_archive_leads_from_its_index_to_every_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image.tar");
        image().write(&path, "kni.local/tool:one").unwrap();
        let outer = entries(&fs::read(&path).unwrap());
        let read = |name: &str| -> Value { serde_json::from_slice(&outer[name].0).unwrap() };
        let blob = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap().replace(':', "/");
            let content = outer[&format!("blobs/{digest}")].0.clone();
            assert_eq!(digest, format!("sha256/{}", hex(&content)));
            assert_eq!(descriptor["size"], content.len());
            content
        };
        let listed = &read("index.json")["manifests"][0];
        assert_eq!(listed["annotations"]["io.containerd.image.name"], "kni.local/tool:one");
        assert_eq!(listed["annotations"]["org.opencontainers.image.ref.name"], "one");
        let manifest: Value = serde_json::from_slice(&blob(listed)).unwrap();
        let config: Value = serde_json::from_slice(&blob(&manifest["config"])).unwrap();
        assert_eq!(config["config"]["Entrypoint"][0], "/bin/tool");
        assert_eq!(config["config"]["Cmd"][0], "rest");
        assert_eq!(config["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);
        let inner = entries(&blob(&manifest["layers"][0]));
        assert_eq!(inner["bin/tool"].0, b"content");
        assert_eq!(inner["var/run"].1.as_deref(), Some(Path::new("/run")));
    }

    #[test]
    fn equal_images_make_equal_archives_and_folders_have_the_same_files() {
        let folder = tempfile::tempdir().unwrap();
        let [one, two] = ["one.tar", "two.tar"].map(|name| {
            let path = folder.path().join(name);
            image().write(&path, "kni.local/tool:one").unwrap();
            fs::read(path).unwrap()
        });
        assert_eq!(one, two);
        let root = folder.path().join("root");
        image().write_folder(&root).unwrap();
        assert_eq!(fs::read(root.join("bin/tool")).unwrap(), b"content");
        assert_eq!(fs::read_link(root.join("var/run")).unwrap(), Path::new("/run"));
    }
}
