//! Builds the test programs of the workspace, and the programs that they run.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use anyhow::{Result, bail};

use crate::{
    command::build_with,
    programs::{Profile, programs},
    workspace::{cargo, root},
};

/// The package of the integration tests.
pub(super) const INTEGRATION: &str = "tests/integration";
/// Its test programs. Their tests wait for permits, so that they may run at once.
const CONCURRENT: [&str; 4] = ["cluster", "cri", "dataplane", "node"];
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
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TestProgram {
    /// The name of its target, unless it has the unit tests of a library or a program.
    pub(super) target: Option<String>,
    pub(super) path: PathBuf,
}

impl TestProgram {
    pub(super) fn is_integration(&self) -> bool {
        let target = self.target.as_deref().unwrap_or_default();
        CONCURRENT.contains(&target)
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
    let found = Mutex::new(Vec::new());
    let mut tests = cargo();
    tests.args(["test", "--workspace", "--no-run"]);
    build_with(&mut tests, |line| match parse(line) {
        Some(program) => {
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            found.push(program);
            false
        }
        None => true,
    })?;
    programs(Profile::Dev, &RUN.map(|(program, _)| program))?;
    let tests = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    let targets: BTreeSet<&str> = tests.iter().filter_map(|program| program.target.as_deref()).collect();
    if let Some(missing) = CONCURRENT.iter().find(|name| !targets.contains(*name)) {
        bail!("cargo has built no test program {missing}");
    }
    let variable = |(program, name): (&str, &'static str)| (name, Profile::Dev.program(program));
    Ok(Built {
        tests,
        variables: RUN.into_iter().map(variable).collect(),
    })
}

/// Builds the tests of [`UNPRIVILEGED`].
pub(super) fn build_unprivileged() -> Result<()> {
    let mut tests = cargo();
    tests.args(["test", "--no-run"]).args(UNPRIVILEGED);
    build_with(&mut tests, |line| parse(line).is_none())
}

/// The test program that a line of cargo names: `Executable tests/cri/main.rs (target/debug/deps/cri-0123)`.
fn parse(line: &str) -> Option<TestProgram> {
    let (source, path) = line.trim().strip_prefix("Executable ")?.split_once(" (")?;
    let target = source.strip_prefix("tests/").map(|file| {
        let name = file.split('/').next().unwrap_or(file);
        name.trim_end_matches(".rs").to_owned()
    });
    Some(TestProgram {
        target,
        path: root().join(path.strip_suffix(')')?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_cargo_name_test_programs() {
        let found = |line: &str| parse(line).map(|program| (program.target, program.path));
        let path = |name: &str| root().join("target/debug/deps").join(name);
        assert_eq!(
            found("  Executable tests/cri/main.rs (target/debug/deps/cri-01)"),
            Some((Some("cri".to_owned()), path("cri-01")))
        );
        assert_eq!(
            found("  Executable tests/process.rs (target/debug/deps/process-02)"),
            Some((Some("process".to_owned()), path("process-02")))
        );
        assert_eq!(
            found("  Executable unittests src/lib.rs (target/debug/deps/kni_ipam-03)"),
            Some((None, path("kni_ipam-03")))
        );
        assert_eq!(found("warning: unused"), None);
    }
}
