//! Changes modules before they are built: copies them, checks the copies, and writes an overlay with insertions and
//! files.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use base64::Engine as _;
use sha2::{Digest as _, Sha256};

/// A module that is built with changes.
#[derive(Debug)]
pub(super) struct Changed {
    /// Its path, as in `go.mod`.
    pub(super) module: &'static str,
    /// The folder with its insertions, below `local-node/overlays`; every other file in it is added to the module.
    pub(super) changes: &'static str,
}

/// The file of the insertions in the folder of a module.
const INSERTIONS: &str = "insertions";
const OVERLAYS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/overlays");

/// What `go build` needs to see the changed modules.
#[derive(Debug)]
pub(super) struct Overlay {
    /// Value of `-overlay`.
    pub(super) overlay: PathBuf,
    /// Value of `-modfile`.
    pub(super) modfile: PathBuf,
}

/// Identifies the changes; tests are no part of a program.
pub(super) fn sources(modules: &[Changed]) -> Result<Vec<String>> {
    let mut sources = Vec::new();
    for changed in modules {
        let files = files(&Path::new(OVERLAYS).join(changed.changes))?;
        for (path, file) in files.into_iter().filter(|(path, _file)| !path.ends_with("_test.go")) {
            let content = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
            sources.push(format!("{}\n{path}\n{content}", changed.module));
        }
    }
    Ok(sources)
}

/// Copies `modules` of the Go module in `go` to `folder` and writes the overlay there. The copies are checked against
/// the sums of `go.sum`.
pub(super) fn prepare(go: &Path, modules: &[Changed], folder: &Path) -> Result<Overlay> {
    let sums = read(&go.join("go.sum"))?;
    let mut go_mod = read(&go.join("go.mod"))?;
    let written = folder.join("overlay");
    if written.exists() {
        fs::remove_dir_all(&written).with_context(|| format!("remove {}", written.display()))?;
    }
    let mut replaced = BTreeMap::new();
    for changed in modules {
        let tree = copy(go, changed.module, &sums, folder)?;
        go_mod = replace_module(&go_mod, changed.module, &tree);
        let changes = Path::new(OVERLAYS).join(changed.changes);
        for (path, file) in files(&changes)? {
            if path != INSERTIONS {
                let added = tree.join(path);
                let parent = added.parent().context("a file has a folder")?;
                // Go executes tests in the folder of their package.
                fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
                replaced.insert(added, file);
            }
        }
        let text = read(&changes.join(INSERTIONS))?;
        for (path, insertions) in parse(&text).with_context(|| format!("insertions for {}", changed.module))? {
            let original = tree.join(&path);
            let context = || format!("module {}, file {path}", changed.module);
            let inserted = insert(&read(&original)?, &insertions).with_context(context)?;
            let file = written.join(changed.changes).join(&path);
            write(&file, &inserted)?;
            replaced.insert(original, file);
        }
    }
    let (overlay, modfile) = (folder.join("overlay.json"), folder.join("kni.mod"));
    write(&overlay, serde_json::json!({ "Replace": replaced }).to_string())?;
    write(&modfile, &go_mod)?;
    // The sums of a module file are beside it.
    write(&folder.join("kni.sum"), &sums)?;
    Ok(Overlay { overlay, modfile })
}

/// Makes `go.mod` take a module from a folder.
fn replace_module(go_mod: &str, module: &str, tree: &Path) -> String {
    let other = |line: &&str| !line.trim_start().starts_with(&format!("{module} => "));
    let kept: Vec<&str> = go_mod.lines().filter(other).collect();
    format!("{}\n\nreplace {module} => {}\n", kept.join("\n"), tree.display())
}

/// The folder with a copy of a module; a complete copy is kept.
fn copy(go: &Path, module: &str, sums: &str, folder: &Path) -> Result<PathBuf> {
    let mut list = Command::new("go");
    list.current_dir(go)
        .env("GOWORK", "off")
        .env("GOTOOLCHAIN", "local")
        .args(["mod", "download", "-json", module]);
    let output = list.output().context("run go mod download")?;
    ensure!(
        output.status.success(),
        "go mod download {module} failed:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).context("the answer of go mod download")?;
    let field = |name: &str| {
        let text = found.get(name).and_then(serde_json::Value::as_str);
        text.with_context(|| format!("go mod download says no {name} of {module}"))
    };
    let (version, cached) = (field("Version")?, field("Dir")?);
    let wanted = sum(sums, module, version)?;
    let name = format!("{}@{version}", module.replace('/', "_"));
    let tree = folder.join("trees").join(&name);
    if tree.is_dir() && hash(&tree, module, version)? == wanted {
        return Ok(tree);
    }
    if tree.exists() {
        fs::remove_dir_all(&tree).with_context(|| format!("remove {}", tree.display()))?;
    }
    let source = Path::new(cached);
    for (path, file) in files(source)? {
        let target = tree.join(path);
        // A plain copy: files of the module cache cannot be written.
        let content = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        write(&target, &content)?;
    }
    let copied = hash(&tree, module, version)?;
    ensure!(
        copied == wanted,
        "the copy of {module} {version} has sum {copied}, and go.sum has {wanted}"
    );
    Ok(tree)
}

fn sum<'a>(sums: &'a str, module: &str, version: &str) -> Result<&'a str> {
    let start = format!("{module} {version} ");
    let found = sums.lines().find_map(|line| line.strip_prefix(&start));
    found.with_context(|| format!("go.sum has no line for {module} {version}"))
}

/// The sum of a module as in `go.sum`: Hash1 of golang.org/x/mod/sumdb/dirhash.
fn hash(tree: &Path, module: &str, version: &str) -> Result<String> {
    let mut lines: Vec<(String, PathBuf)> = files(tree)?
        .into_iter()
        .map(|(path, file)| (format!("{module}@{version}/{path}"), file))
        .collect();
    lines.sort();
    let mut all = Sha256::new();
    for (name, file) in lines {
        let content = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        all.update(format!("{}  {name}\n", hex(&Sha256::digest(&content))));
    }
    let sum = base64::engine::general_purpose::STANDARD.encode(all.finalize());
    Ok(format!("h1:{sum}"))
}

/// The bytes in hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing into a string cannot fail.
        write!(text, "{byte:02x}").unwrap_or_default();
        text
    })
}

/// Every file below a folder, with its path from there.
fn files(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        let entries = fs::read_dir(&next).with_context(|| format!("read {}", next.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let inside = path.strip_prefix(folder).context("an entry is in its folder")?;
            let name = inside
                .to_str()
                .with_context(|| format!("{} is not UTF-8", inside.display()))?;
            found.push((name.to_owned(), path));
        }
    }
    found.sort();
    Ok(found)
}

/// Text for one place of a file.
#[derive(Debug, PartialEq, Eq)]
struct Insertion {
    /// Part of the line that it belongs to.
    anchor: String,
    after: bool,
    /// Whether several lines have the anchor, and each gets the text.
    each: bool,
    text: String,
}

/// The insertions by file. The format is explained at the beginning of each file of insertions.
fn parse(text: &str) -> Result<BTreeMap<String, Vec<Insertion>>> {
    let mut all: BTreeMap<String, Vec<Insertion>> = BTreeMap::new();
    let mut file = None;
    for (number, line) in text.lines().enumerate() {
        let number = number + 1;
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(path) = line.strip_prefix("file ") {
            file = Some(path.to_owned());
            continue;
        }
        let file = file
            .as_ref()
            .with_context(|| format!("line {number} belongs to no file"))?;
        let insertions = all.entry(file.clone()).or_default();
        if let Some(text) = line.strip_prefix('|') {
            let last = insertions
                .last_mut()
                .with_context(|| format!("line {number} belongs to no place"))?;
            last.text.push_str(text);
            last.text.push('\n');
            continue;
        }
        let (each, place) = line.strip_prefix("each ").map_or((false, line), |rest| (true, rest));
        let (after, quoted) = if let Some(rest) = place.strip_prefix("after ") {
            (true, rest)
        } else if let Some(rest) = place.strip_prefix("before ") {
            (false, rest)
        } else {
            bail!("line {number} is neither file, before, after nor text: {line:?}");
        };
        let anchor = quoted.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
        let anchor = anchor.with_context(|| format!("line {number}: the anchor is not in quotes"))?;
        insertions.push(Insertion {
            anchor: anchor.replace("\"\"", "\""),
            after,
            each,
            text: String::new(),
        });
    }
    Ok(all)
}

/// The file with its insertions. An anchor that is missing, or not the only one, is an error that names it.
fn insert(original: &str, insertions: &[Insertion]) -> Result<String> {
    let mut lines: Vec<String> = original.lines().map(|line| format!("{line}\n")).collect();
    for insertion in insertions {
        let mut count = 0;
        let mut changed = Vec::with_capacity(lines.len());
        for line in lines {
            if !line.contains(&insertion.anchor) {
                changed.push(line);
                continue;
            }
            count += 1;
            if insertion.after {
                changed.extend([line, insertion.text.clone()]);
            } else {
                changed.extend([insertion.text.clone(), line]);
            }
        }
        ensure!(count > 0, "no line has the anchor {:?}", insertion.anchor);
        ensure!(
            count == 1 || insertion.each,
            "{count} lines have the anchor {:?}",
            insertion.anchor
        );
        lines = changed;
    }
    Ok(lines.concat())
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    let parent = path.parent().context("a file has a folder")?;
    fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    fs::write(path, content).with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# comment\nfile a.go\nbefore \"say(\"\"x\"\")\"\n|one\n|\n\nafter \"end\"\n|two\n";

    #[test]
    fn text_goes_to_its_place() {
        let all = parse(TEXT).unwrap();
        let done = insert("begin\n  say(\"x\")\nend\n", &all["a.go"]).unwrap();
        assert_eq!(done, "begin\none\n\n  say(\"x\")\nend\ntwo\n");
    }

    #[test]
    fn an_anchor_that_is_missing_or_ambiguous_is_named() {
        let all = parse(TEXT).unwrap();
        let missing = insert("end\n", &all["a.go"]).unwrap_err().to_string();
        assert_eq!(missing, r#"no line has the anchor "say(\"x\")""#);
        let twice = insert("say(\"x\")\nend\nend\n", &all["a.go"]).unwrap_err().to_string();
        assert_eq!(twice, r#"2 lines have the anchor "end""#);
        let each = parse("file a\neach before \"end\"\n|x\n").unwrap();
        assert_eq!(insert("end\nend\n", &each["a"]).unwrap(), "x\nend\nx\nend\n");
        assert!(parse("before \"x\"\n").is_err() && parse("file a\nnear \"x\"\n").is_err());
    }

    #[test]
    fn a_module_is_taken_from_a_folder_instead_of_its_version() {
        let go_mod = "require m v1\nreplace (\n\tm => m v1\n\tn => n v1\n)\n";
        let done = replace_module(go_mod, "m", Path::new("/t"));
        assert_eq!(done, "require m v1\nreplace (\n\tn => n v1\n)\n\nreplace m => /t\n");
    }
}
