//! Writes container images of static programs, as archives for `ctr images import`.

use std::{
    fs::{self, File},
    path::Path,
};

use anyhow::{Context as _, Result};
use serde_json::json;
use sha2::{Digest as _, Sha256};

/// The image of the container that holds a pod's namespaces.
pub const PAUSE: &str = "kni.local/pause:1";
/// The image with `/kni-probe`, which is also its entry point.
pub const PROBE: &str = "kni.local/probe:1";
/// The image of the cluster's DNS server.
pub const DNS: &str = "kni.local/coredns:1";

/// Empty folders of every image, for mounts of the runtime.
const FOLDERS: [(&str, u32); 5] = [
    ("dev", 0o755),
    ("etc", 0o755),
    ("proc", 0o755),
    ("sys", 0o755),
    ("tmp", 0o1777),
];

/// Writes an archive to `path` with one image, `reference`, of one layer, which holds `program` as `/<its file name>`.
///
/// Equal programs make equal archives.
pub fn write(path: &Path, reference: &str, program: &Path) -> Result<()> {
    let name = program
        .file_name()
        .and_then(|name| name.to_str())
        .with_context(|| format!("{} has no name", program.display()))?;
    let bytes = fs::read(program).with_context(|| format!("read {}", program.display()))?;
    let layer = layer(name, &bytes)?;
    let digest = hex(&layer);
    let config = serde_json::to_vec(&json!({
        "architecture": architecture(),
        "os": "linux",
        "config": { "Entrypoint": [format!("/{name}")], "Env": ["PATH=/"] },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{digest}")] },
        "history": [{ "created_by": "kni" }],
    }))?;
    let (config_name, layer_name) = (format!("{}.json", hex(&config)), format!("{digest}/layer.tar"));
    let manifest = serde_json::to_vec(&json!([
        { "Config": config_name, "RepoTags": [reference], "Layers": [layer_name] }
    ]))?;
    let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    let mut archive = tar::Builder::new(file);
    for (name, content) in [
        (config_name.as_str(), &config),
        (layer_name.as_str(), &layer),
        ("manifest.json", &manifest),
    ] {
        add(&mut archive, name, content, 0o644)?;
    }
    archive
        .into_inner()
        .map(drop)
        .with_context(|| format!("write {}", path.display()))
}

fn layer(name: &str, program: &[u8]) -> Result<Vec<u8>> {
    let mut layer = tar::Builder::new(Vec::new());
    for (folder, mode) in FOLDERS {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(mode);
        header.set_size(0);
        layer.append_data(&mut header, format!("{folder}/"), std::io::empty())?;
    }
    add(&mut layer, name, program, 0o755)?;
    layer.into_inner().context("layer of an image")
}

pub(crate) fn add<W: std::io::Write>(
    archive: &mut tar::Builder<W>,
    name: &str,
    content: &[u8],
    mode: u32,
) -> Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(mode);
    header.set_size(content.len().try_into()?);
    archive
        .append_data(&mut header, name, content)
        .with_context(|| format!("{name} of an image"))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        // Writing into a string cannot fail.
        write!(text, "{byte:02x}").unwrap_or_default();
        text
    })
}

/// The architecture's name in image configurations.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, io::Read as _};

    use super::*;

    fn entries(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut found = BTreeMap::new();
        for entry in tar::Archive::new(archive).entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            found.insert(name, content);
        }
        found
    }

    #[test]
    fn an_archive_refers_to_its_parts_by_their_digests() {
        let folder = tempfile::tempdir().unwrap();
        let (program, image) = (folder.path().join("tool"), folder.path().join("image.tar"));
        fs::write(&program, b"content").unwrap();
        write(&image, PROBE, &program).unwrap();
        let outer = entries(&fs::read(&image).unwrap());
        let manifest: serde_json::Value = serde_json::from_slice(&outer["manifest.json"]).unwrap();
        assert_eq!(manifest[0]["RepoTags"][0], PROBE);
        let config_name = manifest[0]["Config"].as_str().unwrap();
        let config = &outer[config_name];
        assert_eq!(config_name, format!("{}.json", hex(config)));
        let config: serde_json::Value = serde_json::from_slice(config).unwrap();
        assert_eq!(config["config"]["Entrypoint"][0], "/tool");
        let layer = &outer[manifest[0]["Layers"][0].as_str().unwrap()];
        assert_eq!(config["rootfs"]["diff_ids"][0], format!("sha256:{}", hex(layer)));
        let inner = entries(layer);
        assert_eq!(inner["tool"], b"content");
        assert!(inner.contains_key("proc/"));
    }

    #[test]
    fn equal_programs_make_equal_archives() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("tool");
        fs::write(&program, b"content").unwrap();
        let [one, two] = ["one.tar", "two.tar"].map(|name| {
            let path = folder.path().join(name);
            write(&path, PAUSE, &program).unwrap();
            fs::read(path).unwrap()
        });
        assert_eq!(one, two);
    }
}
