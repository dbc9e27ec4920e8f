//! Runs Go: which one is there, a module of our own around each program's, and the build.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::table::{PROGRAMS, Program};

/// The Go that Kubernetes 1.36 asks for.
const NEEDED: (u32, u32) = (1, 26);

/// Fails unless a Go of at least [`NEEDED`] is on the path.
pub(super) fn check() -> Result<()> {
    let advice = format!(
        "install Go {}.{} or newer from https://go.dev/dl and put its bin folder on PATH (Debian 12's package golang is \
         too old)",
        NEEDED.0, NEEDED.1
    );
    let version = run(go(Path::new("/")).args(["env", "GOVERSION"]))
        .with_context(|| format!("building the node's programs needs Go: {advice}"))?;
    match parse(version.trim()) {
        Some(found) if found >= NEEDED => Ok(()),
        _ => bail!("{} is too old for the node's programs: {advice}", version.trim()),
    }
}

/// `go1.26.8` as `(1, 26)`.
fn parse(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.strip_prefix("go")?.split('.');
    let mut number = || {
        let part = parts.next()?;
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        part.get(..digits)?.parse().ok()
    };
    Some((number()?, number()?))
}

/// Writes a module into `folder` that requires the program's, unless it is there already.
pub(super) fn prepare(program: &Program, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let ready = folder.join("ready");
    if fs::read_to_string(&ready).is_ok_and(|version| version == program.version) {
        return Ok(());
    }
    let downloaded = run(go(folder)
        .env("GOFLAGS", "-mod=mod")
        .args(["mod", "download", "-json"])
        .arg(format!("{}@{}", program.module, program.version)))?;
    let downloaded: Value = serde_json::from_str(&downloaded).context("answer of go mod download")?;
    let theirs = downloaded
        .get("GoMod")
        .and_then(Value::as_str)
        .context("go mod download names no go.mod")?;
    let theirs = run(go(folder).args(["mod", "edit", "-json", theirs]))?;
    let theirs: Value = serde_json::from_str(&theirs).context("answer of go mod edit")?;
    fs::write(folder.join("go.mod"), module(program, &theirs)?)?;
    fs::write(folder.join("tools.go"), imports(program)?)?;
    run(go(folder).args(["mod", "tidy"]))?;
    fs::write(ready, program.version).with_context(|| format!("write into {}", folder.display()))
}

/// Builds one program of the module in `folder` into the file `output`.
pub(super) fn build(program: &Program, folder: &Path, output: &Path) -> Result<()> {
    let mut command = go(folder);
    command
        .args(["build", "-trimpath", "-ldflags", &linker_flags(program), "-o"])
        .arg(output)
        .arg(program.import());
    run(&mut command).map(drop)
}

/// Without debug information, and with the version where Kubernetes looks for it: it is compared with other parts'.
fn linker_flags(program: &Program) -> String {
    let package = "k8s.io/component-base/version";
    let version = program.version;
    let mut numbers = version.trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next().unwrap_or("1"), numbers.next().unwrap_or("0"));
    format!("-s -w -X {package}.gitVersion={version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}")
}

/// The text of our go.mod: theirs is not heeded where it stands in a required module, so its replacements are repeated.
fn module(program: &Program, theirs: &Value) -> Result<String> {
    let text = |value: &Value, pointer: &str| value.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
    let go = text(theirs, "/Go").context("their go.mod names no version of Go")?;
    let mut module = format!(
        "module local-node\n\ngo {go}\n\nrequire {} {}\n",
        program.module, program.version
    );
    for replace in list(theirs, "Replace") {
        let (Some(old), Some(new), Some(version)) = (
            text(replace, "/Old/Path"),
            text(replace, "/New/Path"),
            text(replace, "/New/Version"),
        ) else {
            // Without a version it is a folder beside theirs.
            continue;
        };
        writeln!(module, "replace {old} => {new} {version}")?;
    }
    // Kubernetes' own parts are required as v0.0.0 and published as v0 of the same number.
    for require in list(theirs, "Require") {
        if let (Some(path), Some("v0.0.0")) = (text(require, "/Path"), text(require, "/Version").as_deref()) {
            let published = program.version.replacen("v1.", "v0.", 1);
            writeln!(module, "replace {path} => {path} {published}")?;
        }
    }
    Ok(module)
}

/// A file that imports every program of the module, so that tidying keeps what they need.
fn imports(program: &Program) -> Result<String> {
    let mut text = String::from("//go:build tools\n\npackage tools\n\nimport (\n");
    let packages: BTreeSet<String> = PROGRAMS
        .iter()
        .filter(|other| other.module == program.module)
        .map(Program::import)
        .collect();
    for package in packages {
        writeln!(text, "\t_ \"{package}\"")?;
    }
    text.push_str(")\n");
    Ok(text)
}

fn list<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    value.get(field).and_then(Value::as_array).into_iter().flatten()
}

fn go(folder: &Path) -> Command {
    let mut command = Command::new("go");
    command
        .current_dir(folder)
        .env("CGO_ENABLED", "0")
        .env("GOWORK", "off")
        // A Go that is too old is an error with advice, not the download of another.
        .env("GOTOOLCHAIN", "local");
    command
}

fn run(command: &mut Command) -> Result<String> {
    let shown = format!("{command:?}");
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {shown}"))?;
    if !output.status.success() {
        bail!(
            "{shown} failed ({}): {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    String::from_utf8(output.stdout).with_context(|| format!("{shown} does not answer in UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_go_are_compared_as_numbers() {
        assert_eq!(parse("go1.26.8"), Some((1, 26)));
        assert_eq!(parse("go1.27rc1"), Some((1, 27)));
        assert!(parse("go1.9").unwrap() < NEEDED);
        assert_eq!(parse("devel"), None);
    }

    #[test]
    fn the_parts_of_kubernetes_are_taken_as_published() {
        let theirs = serde_json::json!({
            "Go": "1.26.0",
            "Require": [{"Path": "k8s.io/api", "Version": "v0.0.0"}, {"Path": "other.dev/x", "Version": "v1.2.3"}],
            "Replace": [
                {"Old": {"Path": "k8s.io/api"}, "New": {"Path": "./staging/src/k8s.io/api"}},
                {"Old": {"Path": "a.dev/b"}, "New": {"Path": "c.dev/d", "Version": "v3.0.0"}},
            ],
        });
        let kubelet = PROGRAMS.iter().find(|program| program.name == "kubelet").unwrap();
        let text = module(kubelet, &theirs).unwrap();
        let number = kubelet.version.strip_prefix("v1.").unwrap();
        assert!(text.contains(&format!("replace k8s.io/api => k8s.io/api v0.{number}\n")));
        assert!(text.contains("replace a.dev/b => c.dev/d v3.0.0\n"));
        assert!(!text.contains("staging"));
        assert!(!text.contains("other.dev"));
    }
}
