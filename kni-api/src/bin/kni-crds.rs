//! Entry point of `kni-crds`: writes the definitions of our Kubernetes objects, generated from the Rust types, into
//! deploy/crds and into the Helm chart. `cargo xtask crds` calls it.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool reports on its standard output")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write as _,
    path::Path,
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context, Result, bail};

/// The folder below the root of the repository.
const FOLDER: &str = "deploy/crds";
/// The chart's copy. No links: not everything that packs a chart or a repository keeps them.
const CHART: &str = "deploy/helm/kni/crds";
/// What kustomize reads, and Helm does not.
const KUSTOMIZATION: &str = "kustomization.yaml";
/// The first line of every file.
const HEAD: &str = "# Generated from the types of crate kni-api by `cargo xtask crds`; do not edit.\n";

fn main() -> ExitCode {
    let result = match std::env::args().nth(1).as_deref() {
        None => write_all(),
        Some("--check") => check_all(),
        Some(other) => Err(anyhow::anyhow!("usage: kni-crds [--check], not `{other}`")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Standard output, as all else: a log that keeps only one of the two streams still ends with the reason.
            println!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn write_all() -> Result<()> {
    for (folder, wanted) in folders()? {
        write(folder, &wanted)?;
    }
    Ok(())
}

/// Fails, and shows the differences, where the files are not what the types say.
fn check_all() -> Result<()> {
    for (folder, wanted) in folders()? {
        check(folder, &wanted)?;
    }
    Ok(())
}

/// The root of the repository.
fn root() -> &'static Path {
    // The manifest is kni-api/Cargo.toml, so its folder always has a parent.
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("/"))
}

/// What each folder is to hold.
fn folders() -> Result<[(&'static str, BTreeMap<String, String>); 2]> {
    let all = files()?;
    let mut of_chart = all.clone();
    of_chart.remove(KUSTOMIZATION);
    Ok([(FOLDER, all), (CHART, of_chart)])
}

/// Every file by its name.
fn files() -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    for definition in kni_api::definitions() {
        let name = definition
            .metadata
            .name
            .as_deref()
            .context("a definition has no name")?;
        let (plural, _group) = name.split_once('.').context("a definition's name has no group")?;
        // Through a value, whose maps are sorted: the text is the same every time.
        let value = serde_json::to_value(&definition).with_context(|| name.to_owned())?;
        let text = yaml(&value).with_context(|| name.to_owned())?;
        files.insert(format!("{plural}.yaml"), format!("{HEAD}{text}"));
    }
    let resources: Vec<&String> = files.keys().collect();
    let list = serde_json::json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": resources,
    });
    let list = yaml(&list).context(KUSTOMIZATION)?;
    files.insert(KUSTOMIZATION.into(), format!("{HEAD}{list}"));
    Ok(files)
}

fn yaml(value: &serde_json::Value) -> Result<String> {
    let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
    let mut text = String::new();
    serde_saphyr::to_fmt_writer_with_options(&mut text, value, options)?;
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}

fn write(folder: &str, wanted: &BTreeMap<String, String>) -> Result<()> {
    let path = root().join(folder);
    fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
    for name in strangers(folder, wanted)? {
        let path = path.join(name);
        fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
    }
    for (name, text) in wanted {
        let path = path.join(name);
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    println!("definitions: {} files in {folder}", wanted.len());
    Ok(())
}

fn check(folder: &str, wanted: &BTreeMap<String, String>) -> Result<()> {
    let mut differ = strangers(folder, wanted)?;
    for name in &differ {
        println!("{folder}/{name} is not generated");
    }
    for (name, text) in wanted {
        let path = root().join(folder).join(name);
        // A file that is not there differs from every text.
        if fs::read_to_string(&path).ok().as_deref() != Some(text.as_str()) {
            show_difference(&path, text)?;
            differ.insert(name.clone());
        }
    }
    if !differ.is_empty() {
        let names: Vec<String> = differ.into_iter().collect();
        bail!(
            "{folder} is not what the types of kni-api say ({}): run `cargo xtask crds`",
            names.join(", ")
        );
    }
    println!("definitions: {} files in {folder}, as the types say", wanted.len());
    Ok(())
}

/// Files of the folder that are not generated.
fn strangers(folder: &str, wanted: &BTreeMap<String, String>) -> Result<BTreeSet<String>> {
    let folder = root().join(folder);
    if !folder.exists() {
        return Ok(BTreeSet::new());
    }
    let mut strangers = BTreeSet::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
        let name = entry.with_context(|| format!("list {}", folder.display()))?.file_name();
        let name = name.to_string_lossy().into_owned();
        if !wanted.contains_key(&name) {
            strangers.insert(name);
        }
    }
    Ok(strangers)
}

fn show_difference(path: &Path, wanted: &str) -> Result<()> {
    let mut diff = Command::new("diff")
        .args([
            "--unified",
            "--new-file",
            "--label",
            "in the folder",
            "--label",
            "generated",
        ])
        .arg(path)
        .arg("-")
        .stdin(Stdio::piped())
        .spawn()
        .context("run diff")?;
    let mut stdin = diff.stdin.take().context("no stdin")?;
    stdin.write_all(wanted.as_bytes()).context("text for diff")?;
    drop(stdin);
    // Its exit status only reports that there are differences.
    diff.wait().map(drop).context("wait for diff")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_file_that_says_where_it_comes_from() {
        let files = files().unwrap();
        let names: Vec<&str> = files.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            [
                "addressblocks.yaml",
                "egressaddressclaims.yaml",
                "egressaddresspools.yaml",
                "egresspolicies.yaml",
                "kustomization.yaml",
                "networkmembers.yaml",
                "networknumbers.yaml",
                "nodeendpoints.yaml",
                "nodenetworks.yaml",
                "podinterfaces.yaml",
                "podnetworkattachments.yaml",
                "podnetworks.yaml"
            ]
        );
        assert!(files.values().all(|text| text.starts_with("# Generated ")));
        assert!(files["kustomization.yaml"].contains("- podnetworks.yaml\n"));
    }

    #[test]
    fn the_text_is_the_same_every_time_and_says_what_the_type_says() {
        let once = files().unwrap();
        assert_eq!(once, files().unwrap());
        for definition in kni_api::definitions() {
            let name = format!("{}.yaml", definition.spec.names.plural);
            let read: serde_json::Value = serde_saphyr::from_str(&once[&name]).unwrap();
            assert_eq!(read, serde_json::to_value(&definition).unwrap(), "{name}");
        }
    }
}
