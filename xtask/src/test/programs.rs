//! Builds the test programs of the workspace, and the programs that they run.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use anyhow::{Result, bail};

use crate::{
    arch::manifest::{self, Member},
    command::build_with,
    programs::{Profile, programs},
    workspace::{cargo, root},
};

/// The test programs of the integration tests. Their tests wait for permits, so that they may run at once.
pub(super) const CONCURRENT: [&str; 4] = ["cluster", "cri", "dataplane", "node"];
/// The programs that integration tests run, and the variables that name them.
const RUN: [(&str, &str); 6] = [
    ("kni-agent", "KNI_AGENT_BIN"),
    ("kni-cni", "KNI_CNI_BIN"),
    ("kni-controller", "KNI_CONTROLLER_BIN"),
    ("kni-node", "KNI_NODE_BIN"),
    ("kni-simulated-nodes", "KNI_SIMULATED_NODES_BIN"),
    ("knictl", "KNI_KNICTL_BIN"),
];

/// The packages whose tests need neither privileges nor those programs.
pub(super) const UNPRIVILEGED: [&str; 3] = ["--workspace", "--exclude", "kni-integration"];

/// A test program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TestProgram {
    /// The name of its target, with `_` for `-` if it has the unit tests of a library or a program.
    pub(super) name: String,
    pub(super) path: PathBuf,
    /// The folder of its package, in which it runs.
    pub(super) folder: PathBuf,
}

impl TestProgram {
    pub(super) fn is_integration(&self) -> bool {
        CONCURRENT.contains(&self.name.as_str())
    }
}

/// What was built.
pub(super) struct Built {
    pub(super) tests: Vec<TestProgram>,
    /// The variables that name the programs which tests run.
    pub(super) variables: BTreeMap<&'static str, PathBuf>,
}

/// Builds everything. The same selection of packages in each command, so that dependencies are compiled once.
pub(super) fn build() -> Result<Built> {
    let tests = test_programs(&["--workspace"])?;
    let names: BTreeSet<&str> = tests.iter().map(|program| program.name.as_str()).collect();
    if let Some(missing) = CONCURRENT.iter().find(|name| !names.contains(*name)) {
        bail!("cargo has built no test program {missing}");
    }
    with_run(tests)
}

/// Builds the unit tests and the integration tests `suites`, and what these run.
pub(super) fn build_some(suites: &BTreeSet<&str>) -> Result<Built> {
    let mut selection = vec!["--workspace", "--lib", "--bins"];
    selection.extend(suites.iter().flat_map(|suite| ["--test", suite]));
    let tests = test_programs(&selection)?;
    if suites.is_empty() {
        let variables = BTreeMap::new();
        return Ok(Built { tests, variables });
    }
    with_run(tests)
}

/// Builds the tests of [`UNPRIVILEGED`].
pub(super) fn build_unprivileged() -> Result<Built> {
    let tests = test_programs(&UNPRIVILEGED)?;
    let variables = BTreeMap::new();
    Ok(Built { tests, variables })
}

fn with_run(tests: Vec<TestProgram>) -> Result<Built> {
    programs(Profile::Dev, &RUN.map(|(program, _)| program))?;
    let variable = |(program, name): (&str, &'static str)| (name, Profile::Dev.program(program));
    Ok(Built {
        tests,
        variables: RUN.into_iter().map(variable).collect(),
    })
}

fn test_programs(selection: &[&str]) -> Result<Vec<TestProgram>> {
    let members = manifest::members(root())?;
    let found = Mutex::new(Vec::new());
    let mut tests = cargo();
    tests.args(["test", "--no-run"]).args(selection);
    build_with(&mut tests, |line| match parse(line, &members) {
        Some(program) => {
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            found.push(program);
            false
        }
        None => true,
    })?;
    Ok(found.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// The test program that a line of cargo names: `Executable tests/cri/main.rs (target/debug/deps/cri-0123)`.
fn parse(line: &str, members: &[Member]) -> Option<TestProgram> {
    let (source, path) = line.trim().strip_prefix("Executable ")?.split_once(" (")?;
    let path = root().join(path.strip_suffix(')')?);
    let name = path.file_name()?.to_str()?.rsplit_once('-')?.0.to_owned();
    let source = source.trim_start_matches("unittests ");
    let is_main = matches!(source, "src/lib.rs" | "src/main.rs");
    let of_package = members.iter().find(|member| {
        if is_main {
            member.package.replace('-', "_") == name
        } else {
            root().join(&member.folder).join(source).is_file()
        }
    });
    Some(TestProgram {
        name,
        path,
        folder: root().join(of_package.map_or("", |member| &member.folder)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_cargo_name_test_programs() {
        let members = manifest::members(root()).unwrap();
        let found = |line: &str| parse(line, &members);
        let program = |name: &str, file: &str, folder: &str| TestProgram {
            name: name.to_owned(),
            path: root().join("target/debug/deps").join(file),
            folder: root().join(folder),
        };
        assert_eq!(
            found("  Executable tests/cri/main.rs (target/debug/deps/cri-01)"),
            Some(program("cri", "cri-01", "tests/integration"))
        );
        assert_eq!(
            found("  Executable tests/process.rs (target/debug/deps/process-02)"),
            Some(program("process", "process-02", "knictl"))
        );
        assert_eq!(
            found("  Executable unittests src/lib.rs (target/debug/deps/kni_ipam-03)"),
            Some(program("kni_ipam", "kni_ipam-03", "kni-agent/ipam"))
        );
        assert_eq!(found("warning: unused"), None);
    }
}
