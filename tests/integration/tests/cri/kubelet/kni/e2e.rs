//! Runs upstream's end-to-end tests on a node whose pods get their networks by KNI: ten of them, and in long tests all
//! for which one node is enough.

mod cases;
mod images;
mod report;

use std::{
    collections::BTreeMap,
    env,
    fmt::Write as _,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Stdio,
    thread,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{long, machine, require};
use kni_local_node::{LocalNode, Programs};

use self::{
    cases::{GATE, Known, LONG, NOT_RUN},
    report::{Case, Outcome},
};
use super::super::scene::Scene;

/// Variable with an expression for the only cases to execute.
const CHOSEN: &str = "KNI_E2E";

#[test]
fn upstreams_tests_pass_by_kni() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let programs = machine::e2e()?;
    let mut scene = Scene::joined_by_kni("kni-e2e")?;
    scene.machine.local.start_dns()?;
    let suite = Suite::new(&scene, programs, if long() { "long" } else { "gate" })?;
    let missing = images::import(&scene, &suite.programs, &suite.folder)?;
    if let Ok(pattern) = env::var(CHOSEN) {
        let cases = suite.run(&[Selection::of_patterns([&pattern, ""])])?;
        println!("{}", text(&cases, &Known::read()?, &missing)?);
        ensure!(!cases.is_empty(), "no case matches {pattern:?}");
        ensure!(cases.iter().all(Case::has_passed), "logs: {}", suite.folder.display());
        return Ok(());
    }
    if long() {
        let cases = suite.run(&LONG.map(Selection::of_patterns))?;
        let known = Known::read()?;
        fs::write(target_folder()?.join("e2e-cases.txt"), text(&cases, &known, &missing)?)?;
        return known.compare(&cases);
    }
    let cases = suite.run(&GATE.map(Selection::of_names))?;
    println!("{}", text(&cases, &Known::default(), &[])?);
    for name in GATE.into_iter().flatten() {
        let case = cases.iter().find(|case| case.name == *name);
        let case = case.with_context(|| format!("there is no case {name:?}"))?;
        let logs = suite.folder.display();
        ensure!(case.has_passed(), "{name}: {}; logs: {logs}", case.outcome);
    }
    Ok(())
}

/// The cases of a process: expressions for those to execute, and for those of them not to.
struct Selection {
    focus: String,
    skip: String,
    /// Afterwards the process interrupts the current case and ends.
    timeout: &'static str,
}

impl Selection {
    /// What matches `focus`, but not `skip` or what is never executed.
    fn of_patterns([focus, skip]: [&str; 2]) -> Self {
        let never = NOT_RUN.iter().map(|(pattern, _)| *pattern);
        let skip: Vec<&str> = never.chain([skip]).filter(|pattern| !pattern.is_empty()).collect();
        Self {
            focus: focus.to_owned(),
            skip: skip.join("|"),
            timeout: "4h",
        }
    }

    fn of_names(names: &[&str]) -> Self {
        let names: Vec<String> = names.iter().map(|name| literal(name)).collect();
        Self {
            focus: format!("({})$", names.join("|")),
            skip: String::new(),
            timeout: "8m",
        }
    }
}

/// A regular expression for a text.
fn literal(text: &str) -> String {
    text.chars().fold(String::new(), |mut found, character| {
        if r"\.+*?()|[]{}^$".contains(character) {
            found.push('\\');
        }
        found.push(character);
        found
    })
}

/// Upstream's tests and the node that they use.
struct Suite<'a> {
    scene: &'a Scene,
    programs: Programs,
    /// For logs and reports; seen inside the node.
    folder: PathBuf,
}

impl<'a> Suite<'a> {
    fn new(scene: &'a Scene, programs: Programs, name: &str) -> Result<Self> {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("e2e").join(name);
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::create_dir_all(&folder)?;
        Ok(Self {
            scene,
            programs,
            folder,
        })
    }

    /// Executes selections at once, each in a process of its own.
    fn run(&self, selections: &[Selection]) -> Result<Vec<Case>> {
        thread::scope(|scope| {
            let started: Vec<_> = selections
                .iter()
                .enumerate()
                .map(|(number, selection)| scope.spawn(move || self.run_one(number, selection)))
                .collect();
            let mut cases = Vec::new();
            for thread in started {
                let found = thread.join().map_err(|_panic| anyhow::anyhow!("a run has panicked"))?;
                cases.extend(found?);
            }
            Ok(cases)
        })
    }

    fn run_one(&self, number: usize, selection: &Selection) -> Result<Vec<Case>> {
        let file = |kind: &str| self.folder.join(format!("{number}.{kind}"));
        let log = File::create(file("log"))?;
        let (report, work) = (file("json"), file("work"));
        fs::create_dir(&work)?;
        let mut tests = self.scene.local().command(self.programs.path("e2e.test"));
        tests
            .current_dir(&work)
            .arg("--provider=skeleton")
            .arg(format!("--kubeconfig={}", LocalNode::admin_kubeconfig()))
            .arg("--disable-log-dump")
            .arg("--dump-logs-on-failure=false")
            .arg(format!("--ginkgo.focus={}", selection.focus))
            .arg(format!("--ginkgo.skip={}", selection.skip))
            .arg("--ginkgo.no-color")
            .arg(format!("--ginkgo.timeout={}", selection.timeout))
            .arg(format!("--ginkgo.json-report={}", report.display()));
        let status = tests
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .status()
            .context("run e2e.test")?;
        // Failed cases are in the report.
        report::read(&report).with_context(|| format!("e2e.test: {status}; its log is {}", file("log").display()))
    }
}

/// Every case with its result, sums by group, and the images that were not made.
fn text(cases: &[Case], known: &Known, missing: &[String]) -> Result<String> {
    let mut sorted: Vec<&Case> = cases.iter().collect();
    sorted.sort_by_key(|case| &case.name);
    let mut text = String::new();
    let mut groups: BTreeMap<&str, [usize; 3]> = BTreeMap::new();
    for case in sorted {
        let sums = groups.entry(&case.group).or_default();
        sums[match case.outcome {
            Outcome::Passed => 0,
            Outcome::Skipped(_) => 1,
            Outcome::Failed(_) => 2,
        }] += 1;
        write!(
            text,
            "{:6.1} s  {}: {}",
            case.took.as_secs_f64(),
            case.name,
            case.outcome
        )?;
        if let Some(reason) = known.reason(&case.name) {
            write!(text, " (known: {reason})")?;
        }
        writeln!(text)?;
    }
    writeln!(text)?;
    for (group, [passed, skipped, failed]) in &groups {
        writeln!(text, "{group}: {passed} passed, {skipped} skipped, {failed} failed")?;
    }
    if !missing.is_empty() {
        writeln!(text, "\nimages that were not made:\n{}", missing.join("\n"))?;
    }
    Ok(text)
}

/// The build folder of cargo.
fn target_folder() -> Result<PathBuf> {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = scratch.parent().context("the test was built in no target folder")?;
    Ok(folder.to_owned())
}

#[test]
fn an_expression_for_a_text_contains_no_operator() {
    assert_eq!(literal("[a] (b) c.d"), r"\[a\] \(b\) c\.d");
}
