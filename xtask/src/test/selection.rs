//! Selects tests: by parts of their names, or by the files that have changed.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use anyhow::{Result, bail};

use super::{
    programs::{Built, CONCURRENT},
    run::{self, Job},
};
use crate::{
    arch::manifest::{self, Member},
    command::output,
    workspace::root,
};

/// What changes in a folder lead to beside the unit tests of the changed crates and of those that depend on them: the
/// integration tests, by program or by the beginning of their path. The first row that fits decides.
const SUITES: [(&[&str], &[&str]); 9] = [
    (&["docs", "xtask", "README.md"], &[]),
    (
        &["kni-ebpf", "kni-common", "kni-agent/dataplane", "kni-agent/object"],
        &["dataplane", "node", "cluster::fabric"],
    ),
    (
        &[
            "kni-cni",
            "kni-agent/plugins",
            "kni-agent/grpc",
            "proto",
            "kni-conformance",
            "h2-authority",
        ],
        &[
            "node::cni",
            "node::providers",
            "node::runtime_clients",
            "node::authority",
            "cri::containerd",
        ],
    ),
    (
        &["knictl", "kni-agent/inspect"],
        &["node::policy::explain", "cri::deploy"],
    ),
    (&["local-node"], &["cri"]),
    (
        &[
            "kni-agent/reflectors",
            "kni-agent/controllers",
            "kni-agent/cluster",
            "kni-agent/crd",
            "kni-agent/manifests",
            "kni-agent/claims",
            "kni-api",
            "kni-controller",
            "deploy",
            "simulated-nodes",
        ],
        &["cluster", "cri::deploy"],
    ),
    (&["kni-agent"], &["dataplane", "node", "cluster::fabric"]),
    (&["tests/integration/src"], &CONCURRENT),
    (&["Cargo.toml", "Cargo.lock"], &CONCURRENT),
];
/// The folder of the integration tests: a changed file there selects its own program or module.
const OWN: &str = "tests/integration/tests/";

/// What changed files lead to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changed {
    /// Folders of packages whose unit tests run.
    pub(super) folders: BTreeSet<String>,
    /// Programs of integration tests, or beginnings of paths of their tests.
    pub(super) suites: BTreeSet<String>,
}

impl Changed {
    /// What the files that differ from `revision` lead to, and those that git does not know.
    pub(super) fn since(revision: &str) -> Result<Self> {
        let git = |arguments: &[&str]| output(Command::new("git").current_dir(root()).args(arguments));
        let mut files = git(&["diff", "--name-only", revision, "--"])?;
        files.push_str(&git(&["ls-files", "--others", "--exclude-standard"])?);
        let files: Vec<&str> = files.lines().collect();
        if files.is_empty() {
            bail!("no file differs from {revision}");
        }
        Ok(Self::of(&files, &manifest::members(root())?))
    }

    fn of(files: &[&str], members: &[Member]) -> Self {
        let mut changed = Self::default();
        let mut packages = BTreeSet::new();
        for file in files {
            if let Some(member) = package_of(file, members) {
                packages.insert(member.package.clone());
            }
            if let Some(own) = file.strip_prefix(OWN) {
                changed.suites.insert(module(own));
            } else if let Some((_, suites)) = SUITES.iter().find(|(folders, _)| has(folders, file)) {
                changed.suites.extend(suites.iter().map(|suite| (*suite).to_owned()));
            }
        }
        let packages = with_dependants(packages, members);
        let selected = members.iter().filter(|member| packages.contains(&member.package));
        changed.folders = selected.map(|member| member.folder.clone()).collect();
        changed
    }

    /// The programs of integration tests that have to be built.
    pub(super) fn programs(&self) -> BTreeSet<&str> {
        self.suites
            .iter()
            .filter_map(|suite| suite.split("::").next())
            .collect()
    }

    /// The tests to run.
    pub(super) fn jobs(&self, built: &Built) -> Result<Vec<Job>> {
        let mut jobs = Vec::new();
        for program in &built.tests {
            if program.is_integration() {
                if self.suites.contains(&program.name) {
                    jobs.push(Job::whole(program));
                    continue;
                }
                let tests = run::list(program)?.into_iter();
                let is_in = |test: &String| {
                    let path = format!("{}::{test}", program.name);
                    self.suites.iter().any(|suite| is_inside(&path, suite))
                };
                let tests: Vec<String> = tests.filter(is_in).collect();
                if !tests.is_empty() {
                    let ignored = false;
                    jobs.push(Job {
                        ignored,
                        ..Job::of(program, tests)
                    });
                }
            } else if self.folders.iter().any(|folder| program.folder == root().join(folder)) {
                jobs.push(Job::whole(program));
            }
        }
        Ok(jobs)
    }
}

/// The tests of `built` whose path, with the name of the program before it, contains one of `filters`; without filters,
/// the integration tests.
pub(super) fn named(built: &Built, filters: &[String]) -> Result<Vec<Job>> {
    let mut jobs = Vec::new();
    for program in &built.tests {
        if filters.is_empty() {
            jobs.extend(program.is_integration().then(|| Job::whole(program)));
            continue;
        }
        let is_named = |test: &String| {
            let path = format!("{}::{test}", program.name);
            filters.iter().any(|filter| path.contains(filter.as_str()))
        };
        let tests: Vec<String> = run::list(program)?.into_iter().filter(is_named).collect();
        if !tests.is_empty() {
            jobs.push(Job::of(program, tests));
        }
    }
    if jobs.is_empty() {
        bail!("no test has a name with {}", filters.join(" or "));
    }
    Ok(jobs)
}

/// Whether the file is one of `folders` or in one.
fn has(folders: &[&str], file: &str) -> bool {
    folders.iter().any(|folder| {
        let rest = file.strip_prefix(folder);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    })
}

/// Whether the test `path` is in the module `suite`.
fn is_inside(path: &str, suite: &str) -> bool {
    path.strip_prefix(suite)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// The program and module of a file of the integration tests: `node::egress` of `node/egress/ports.rs`.
fn module(file: &str) -> String {
    let parts: Vec<&str> = file
        .split('/')
        .map(|part| part.trim_end_matches(".rs"))
        .take(2)
        .collect();
    match parts.as_slice() {
        [program, "main"] => (*program).to_owned(),
        parts => parts.join("::"),
    }
}

/// The package with the longest folder that contains the file.
fn package_of<'a>(file: &str, members: &'a [Member]) -> Option<&'a Member> {
    let inside = members.iter().filter(|member| has(&[member.folder.as_str()], file));
    inside.max_by_key(|member| member.folder.len())
}

/// The packages, and all that depend on them.
fn with_dependants(mut packages: BTreeSet<String>, members: &[Member]) -> BTreeSet<String> {
    let mut dependants: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for member in members {
        for (dependency, _) in &member.dependencies {
            dependants.entry(dependency).or_default().push(&member.package);
        }
    }
    let mut new: Vec<String> = packages.iter().cloned().collect();
    while let Some(package) = new.pop() {
        for dependant in dependants.get(package.as_str()).into_iter().flatten() {
            if packages.insert((*dependant).to_owned()) {
                new.push((*dependant).to_owned());
            }
        }
    }
    packages
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(files: &[&str]) -> Changed {
        Changed::of(files, &manifest::members(root()).unwrap())
    }

    #[test]
    fn a_changed_crate_selects_its_dependants_and_its_suites() {
        let changed = of(&["kni-agent/ipam/src/lib.rs"]);
        let folders = |name: &str| changed.folders.contains(name);
        assert!(folders("kni-agent/ipam") && folders("kni-agent") && folders("tests/integration"));
        assert!(!folders("kni-ebpf") && !folders("xtask"));
        let suites: Vec<&String> = changed.suites.iter().collect();
        assert_eq!(suites, ["cluster::fabric", "dataplane", "node"]);
        let programs: Vec<&str> = changed.programs().into_iter().collect();
        assert_eq!(programs, ["cluster", "dataplane", "node"]);
    }

    #[test]
    fn a_changed_test_selects_its_module_only() {
        let changed = of(&["tests/integration/tests/node/egress/ports.rs"]);
        assert_eq!(changed.suites.iter().collect::<Vec<_>>(), ["node::egress"]);
        assert_eq!(
            of(&["tests/integration/tests/cri/main.rs"]).suites.first().unwrap(),
            "cri"
        );
        let page = of(&["docs/status.md"]);
        assert_eq!(page, Changed::default());
    }

    #[test]
    fn every_row_names_what_exists() {
        for (folders, suites) in SUITES {
            for folder in folders {
                assert!(root().join(folder).exists(), "{folder}");
            }
            for suite in suites {
                let program = suite.split("::").next().unwrap();
                assert!(CONCURRENT.contains(&program), "{suite}");
            }
        }
    }

    #[test]
    fn modules_are_compared_by_whole_names() {
        assert!(is_inside("node::cni::b01", "node::cni") && is_inside("node::cni", "node::cni"));
        assert!(!is_inside("node::cni_other::b01", "node::cni"));
    }
}
