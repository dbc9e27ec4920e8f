//! Runs Go: checks its version, and builds programs of the modules in `go`.

use std::{
    fs::{self, File},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use sha2::{Digest as _, Sha256};

use super::{
    overlay::{self, Changed, Overlay},
    table::Program,
};

const GO_MOD: &str = include_str!("../../go/go.mod");

/// A Go module that requires the modules of programs.
#[derive(Debug)]
pub(super) struct Module {
    folder: &'static str,
    /// The sources that determine the build result.
    sources: &'static [&'static str],
    /// Modules that are changed before they are built.
    changed: &'static [Changed],
    /// Tags of the build if its programs contain C.
    c: Option<&'static str>,
    /// Whether its programs are the compiled tests of packages.
    tests: bool,
}

/// The module of the programs of a node.
pub(super) static NODE: Module = Module {
    folder: concat!(env!("CARGO_MANIFEST_DIR"), "/go"),
    sources: &[
        GO_MOD,
        include_str!("../../go/go.sum"),
        include_str!("../../go/coredns/main.go"),
        include_str!("../../go/reference/fault.go"),
        include_str!("../../go/reference/link.go"),
        include_str!("../../go/reference/main.go"),
        include_str!("../../go/reference/netns.go"),
        include_str!("../../go/reference/pool.go"),
        include_str!("../../go/reference/service.go"),
    ],
    changed: &[],
    c: None,
    tests: false,
};

/// The module of runc. Apart from that of the node, whose programs contain no C, and whose versions of shared packages
/// it would move.
pub(super) static RUNC: Module = Module {
    folder: concat!(env!("CARGO_MANIFEST_DIR"), "/go/runc"),
    sources: &[
        include_str!("../../go/runc/go.mod"),
        include_str!("../../go/runc/go.sum"),
    ],
    changed: &[],
    // The kubelet gives every sandbox a seccomp profile; a runc without seccomp refuses to start it.
    c: Some("seccomp,urfave_cli_no_docs"),
    tests: false,
};

/// The module of the programs that speak KNI: that of the node with changes, from the same versions.
pub(super) static KNI: Module = Module {
    folder: NODE.folder,
    sources: NODE.sources,
    changed: &[
        Changed {
            module: "k8s.io/kubernetes",
            changes: "kubernetes",
        },
        Changed {
            module: "k8s.io/kubelet",
            changes: "kubelet-types",
        },
        Changed {
            module: "github.com/containerd/containerd/v2",
            changes: "containerd",
        },
    ],
    c: None,
    tests: false,
};

/// The module of Helm. Apart from that of the node, whose programs it would move to other versions of their
/// dependencies; the versions that both name are the same, so that shared packages are compiled once.
pub(super) static HELM: Module = Module {
    folder: concat!(env!("CARGO_MANIFEST_DIR"), "/go/helm"),
    sources: &[
        include_str!("../../go/helm/go.mod"),
        include_str!("../../go/helm/go.sum"),
    ],
    changed: &[],
    c: None,
    tests: false,
};

/// The module of the programs of upstream's test images. Apart from that of the node, whose `go.sum` would name every
/// module of the tests; the versions that both name are the same.
pub(super) static TEST_IMAGES: Module = Module {
    folder: concat!(env!("CARGO_MANIFEST_DIR"), "/go/e2e"),
    sources: E2E_SOURCES,
    changed: &[],
    c: None,
    tests: false,
};

/// The module of upstream's end-to-end tests.
pub(super) static E2E: Module = Module {
    folder: TEST_IMAGES.folder,
    sources: E2E_SOURCES,
    changed: &[],
    c: None,
    tests: true,
};

const E2E_SOURCES: &[&str] = &[include_str!("../../go/e2e/go.mod"), include_str!("../../go/e2e/go.sum")];

/// Settings of Go that determine a program, and its version.
const DETERMINING: &[&str] = &[
    "GOVERSION",
    "GOOS",
    "GOARCH",
    "GOAMD64",
    "GOARM64",
    "GOEXPERIMENT",
    "GOFIPS140",
    "GOFLAGS",
];

/// How often the folder is searched for finished programs.
const POLL: Duration = Duration::from_secs(1);

/// Fails unless a Go of at least the version of `go.mod` is on the path.
pub(super) fn check() -> Result<()> {
    let needed = version("go").context("go.mod names no version of Go")?;
    let advice = format!(
        "install Go {needed} or newer from https://go.dev/dl and put its bin folder on PATH (Debian 12's package golang is \
         too old)"
    );
    let mut command = Command::new("go");
    let output = command.args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local").output();
    let output = output.with_context(|| format!("building the node's programs needs Go: {advice}"))?;
    let found = String::from_utf8_lossy(&output.stdout);
    let found = found.trim().trim_start_matches("go");
    match parse(found) {
        Some(numbers) if Some(&numbers) >= parse(needed).as_ref() => Ok(()),
        _ => bail!("Go {found} is too old for the node's programs: {advice}"),
    }
}

/// `1.26.8` as `[1, 26, 8]`, and `1.27rc1` as `[1, 27]`.
fn parse(version: &str) -> Option<Vec<u32>> {
    let number = |part: &str| {
        let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        part.get(..end)?.parse().ok()
    };
    version.split('.').map(number).collect()
}

/// Identifies the sources of every program of a module.
pub(super) fn fingerprint(module: &Module) -> String {
    let mut hash = Sha256::new();
    for source in module.sources {
        hash.update(source);
    }
    // Changes that cannot be read are none; the build names what is missing.
    for source in overlay::sources(module.changed).unwrap_or_default() {
        hash.update(source);
    }
    overlay::hex(&hash.finalize())
}

/// A text that names everything that determines the programs of a module, except their packages. None if that is not
/// all: a program that contains C depends on the C compiler and the libraries of the machine.
pub(super) fn version_of_result(module: &Module) -> Result<Option<String>> {
    if module.c.is_some() {
        return Ok(None);
    }
    let output = environment(module).arg("env").args(DETERMINING).output();
    let output = output.context("run go env")?;
    ensure!(
        output.status.success(),
        "go env failed:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let settings = String::from_utf8_lossy(&output.stdout);
    let command = go(module, "build", None)?;
    let arguments: Vec<_> = command.get_args().collect();
    Ok(Some(format!(
        "{} {} {arguments:?} {settings}",
        fingerprint(module),
        module.tests
    )))
}

/// The version of a module that `go.mod` requires.
pub(crate) fn version(module: &str) -> Option<&'static str> {
    GO_MOD.lines().find_map(|line| {
        let version = line.trim().strip_prefix(module)?.strip_prefix(' ')?;
        version.split_whitespace().next()
    })
}

/// Builds `programs` into the empty folder `output`, all in one run: shared packages are compiled once, and linking one
/// program overlaps with compiling others. Reports each program when it is finished; the messages of Go go to the file
/// `log`.
pub(super) fn build(
    module: &Module,
    programs: &[&Program],
    output: &Path,
    log: &Path,
    report: &mut dyn FnMut(&str),
) -> Result<()> {
    let start = Instant::now();
    let overlay = overlay_of(module, log.parent().context("the log is in a folder")?)?;
    let file = File::create(log).with_context(|| format!("create {}", log.display()))?;
    let mut child = command(module, overlay.as_ref(), programs, output, file)?
        .spawn()
        .context("run go")?;
    let mut waiting: Vec<&Program> = programs.to_vec();
    let mut downloading = false;
    loop {
        // Checked before the programs: after the exit there is one more round.
        let ended = child.try_wait().context("wait for go")?;
        if !downloading && messages(log).contains("go: downloading ") {
            downloading = true;
            report("downloading Go modules");
        }
        let (finished, rest) = waiting
            .into_iter()
            .partition(|program| output.join(program.built_name()).exists());
        waiting = rest;
        for (position, program) in (programs.len() - waiting.len() - finished.len() + 1..).zip(&finished) {
            let seconds = start.elapsed().as_secs();
            report(&format!(
                "[{position}/{}] {} ({seconds} s)",
                programs.len(),
                program.name
            ));
        }
        match ended {
            None => thread::sleep(POLL),
            Some(status) if status.success() => return Ok(()),
            Some(status) => bail!("go build failed ({status}):\n{}", errors(&messages(log))),
        }
    }
}

/// A command that executes the tests of packages, flags before them, with what `folder` has of an earlier [`build`].
pub(super) fn tests(module: &Module, arguments: &[&str], folder: &Path) -> Result<Command> {
    let mut command = go(module, "test", overlay_of(module, folder)?.as_ref())?;
    command.args(arguments);
    Ok(command)
}

/// Go with the flags and the environment that all commands share: then they use the same cached packages.
fn go(module: &Module, action: &str, overlay: Option<&Overlay>) -> Result<Command> {
    let mut command = environment(module);
    command
        .args([action, "-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false"])
        .arg(format!("-ldflags={}", linker_flags()?));
    if let Some(tags) = module.c {
        command.arg("-tags").arg(tags);
    }
    if let Some(Overlay { overlay, modfile }) = overlay {
        command.arg("-overlay").arg(overlay).arg("-modfile").arg(modfile);
    }
    Ok(command)
}

/// Go with the environment of all commands.
fn environment(module: &Module) -> Command {
    let mut command = Command::new("go");
    command
        .current_dir(module.folder)
        .env("CGO_ENABLED", if module.c.is_some() { "1" } else { "0" })
        .env("GOWORK", "off")
        // An outdated Go is an error with advice and must not download another version.
        .env("GOTOOLCHAIN", "local")
        // The compiler of a large package runs for seconds: fewer garbage collections save CPU time.
        .env("GOGC", "400");
    command
}

fn overlay_of(module: &Module, folder: &Path) -> Result<Option<Overlay>> {
    if module.changed.is_empty() {
        return Ok(None);
    }
    overlay::prepare(Path::new(module.folder), module.changed, folder).map(Some)
}

fn command(
    module: &Module,
    overlay: Option<&Overlay>,
    programs: &[&Program],
    output: &Path,
    log: File,
) -> Result<Command> {
    let mut command = go(module, if module.tests { "test" } else { "build" }, overlay)?;
    if module.tests {
        // Vet would examine every package that they use.
        command.args(["-c", "-vet=off"]);
    }
    command.arg("-o").arg(output);
    command.args(programs.iter().map(|program| program.package));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    Ok(command)
}

/// Omits debug information, and sets the version in the parts of Kubernetes that compare it.
fn linker_flags() -> Result<String> {
    let package = "k8s.io/component-base/version";
    let version = version("k8s.io/kubernetes").context("go.mod requires no Kubernetes")?;
    let mut numbers = version.trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next().unwrap_or("1"), numbers.next().unwrap_or("0"));
    Ok(format!(
        "-s -w -X {package}.gitVersion={version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"
    ))
}

fn messages(log: &Path) -> String {
    fs::read(log).map_or_else(
        |error| error.to_string(),
        |bytes| String::from_utf8_lossy(&bytes).into_owned(),
    )
}

/// The messages without those of every build.
fn errors(messages: &str) -> String {
    let lines = messages.lines().filter(|line| !line.starts_with("go: downloading "));
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_go_are_compared_as_numbers() {
        assert_eq!(parse("1.26.8"), Some(vec![1, 26, 8]));
        assert_eq!(parse("1.27rc1"), Some(vec![1, 27]));
        assert!(parse("1.9") < parse("1.26.8") && parse("1.26.8") < parse("1.27rc1"));
        assert_eq!(parse("devel"), None);
        assert!(parse(version("go").unwrap()) >= parse("1.26"));
    }

    #[test]
    fn what_determines_a_program_names_sources_flags_and_compiler() {
        assert_eq!(version_of_result(&RUNC).unwrap(), None, "it contains C");
        // Without Go nothing is built, and so nothing kept.
        let Ok(found) = version_of_result(&NODE) else { return };
        let found = found.unwrap();
        for part in [&fingerprint(&NODE), "-trimpath", "gitMinor", "go1.", "linux"] {
            assert!(found.contains(part), "{part}: {found}");
        }
        assert_ne!(version_of_result(&KNI).unwrap().unwrap(), found);
    }

    #[test]
    fn the_tests_are_those_of_the_nodes_version() {
        let required = |text: &str| -> Vec<String> {
            let lines = text.lines().map(str::trim).filter(|line| !line.contains(" => "));
            let lines = lines.filter(|line| line.split(' ').nth(1).is_some_and(|version| version.starts_with('v')));
            lines
                .map(|line| line.trim_end_matches(" // indirect").to_owned())
                .collect()
        };
        let node = required(GO_MOD);
        let mut shared = 0;
        for line in required(include_str!("../../go/e2e/go.mod")) {
            let module = line.split(' ').next().unwrap();
            if version(module).is_some() {
                assert!(node.contains(&line), "{line}");
                shared += 1;
            }
        }
        assert!(shared > 100, "{shared}");
    }

    #[test]
    fn every_part_of_kubernetes_is_replaced_by_the_published_one() {
        let number = version("k8s.io/kubernetes").unwrap().strip_prefix("v1.").unwrap();
        let others = [
            include_str!("../../go/helm/go.mod"),
            include_str!("../../go/e2e/go.mod"),
        ];
        for text in [GO_MOD].into_iter().chain(others) {
            for line in text.lines().filter(|line| line.contains(" => ")) {
                assert!(line.ends_with(&format!(" v0.{number}")), "{line}");
            }
        }
        assert!(linker_flags().unwrap().contains(".gitMinor=36"));
    }
}
