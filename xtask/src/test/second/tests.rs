//! Tests of what failed tests mean.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use super::*;
use crate::test::{reader::Case, tally::Tally};

/// The output of these programs would be counted as results, if it were output of this program.
const HIDDEN: Show<'_> = &|_| {};
const EXHAUSTED: &str = "Error: waited 60s in vain";

fn failure(output: &str) -> Failure {
    let mut failure = Failure::default();
    output.lines().for_each(|line| failure.quote(line));
    failure
}

fn run(program: &str, failed: &[(&str, &str)]) -> Run {
    let case = |(test, output): &(&str, &str)| Case {
        test: (*test).to_owned(),
        end: End::Failed(failure(output)),
        time: None,
        tries: 1,
        first: None,
    };
    Run {
        program: program.to_owned(),
        is_integration: true,
        is_sound: true,
        tally: Tally {
            failed: failed.len(),
            ..Tally::default()
        },
        cases: failed.iter().map(case).collect(),
        ..Run::default()
    }
}

fn ledger(more: &str) -> Ledger {
    let text = format!(
        "[[flake]]\ntest = \"node::known::a\"\ndate = \"2026-11-28\"\nexpires = \"2026-12-01\"\nreason = \"x\"\n{more}"
    );
    Ledger::parse(&text).unwrap()
}

fn meaning_of(program: &str, test: &str, output: &str) -> Meaning {
    let failed = run(program, &[(test, output)]);
    meaning(&failed, test, &failure(output), &ledger(""))
}

#[test]
fn only_waits_of_integration_tests_are_tried_again() {
    let again = |is_listed| Meaning::Again { is_listed };
    assert_eq!(meaning_of("node", "egress::a", EXHAUSTED), again(false));
    assert_eq!(meaning_of("node", "known::a", EXHAUSTED), again(true));
    assert_eq!(
        meaning_of("node", "known::a", "Error: 3 packets lost"),
        Meaning::Wrong,
        "an entry of the ledger excuses no wrong result"
    );
    for (program, test) in [
        ("dataplane", "frames::a"),
        ("node", "isolation::a"),
        ("node", "attack::a"),
        ("cluster", "fabric::enemies::a"),
        ("cluster", "rights::a"),
        ("node", "lifecycle::memory::a"),
    ] {
        assert_eq!(meaning_of(program, test, EXHAUSTED), Meaning::Wrong, "{program} {test}");
    }
    let mut unit = run("kni_ipam", &[("a", EXHAUSTED)]);
    unit.is_integration = false;
    assert_eq!(meaning(&unit, "a", &failure(EXHAUSTED), &ledger("")), Meaning::Wrong);
    let mut crashed = run("node", &[("a", EXHAUSTED)]);
    crashed.is_sound = false;
    assert_eq!(meaning(&crashed, "a", &failure(EXHAUSTED), &ledger("")), Meaning::Wrong);
}

#[test]
fn quarantine_excuses_any_result_of_its_test() {
    let mut runs = [run("node", &[("known::a", "Error: left"), ("other::a", "Error: left")])];
    let settled = resolve(
        &mut runs,
        &ledger("quarantine = true"),
        &[],
        &Environment::new(),
        HIDDEN,
    )
    .unwrap();
    assert_eq!(settled.quarantined, ["node known::a: left"]);
    let [run] = runs;
    assert_eq!((run.tally.failed, run.tally.skipped), (1, 1));
    assert_eq!(settled.lines().first().unwrap(), "1 failed in quarantine:");
}

/// A program that is no test program but answers like one: only the test `a::holds` holds.
fn program(name: &str) -> (PathBuf, TestProgram) {
    let folder = std::env::temp_dir().join(format!("xtask-second-{name}-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("program");
    let script = "#!/bin/sh\necho \"$@\" >> asked\ncase \"$*\" in\n\
                  *--exact\\ a::holds) echo 'test result: ok. 1 passed; 0 failed; 0 ignored';;\n\
                  *) echo 'test a::fails ... FAILED'; echo 'test result: FAILED. 0 passed; 1 failed; 0 ignored'; exit 101;;\n\
                  esac\n";
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let program = TestProgram {
        name: "cri".to_owned(),
        path,
        folder: folder.clone(),
    };
    (folder, program)
}

#[test]
fn a_second_try_runs_one_test_alone_and_decides() {
    let (folder, program) = program("two");
    let failed = [
        ("a::holds", EXHAUSTED),
        ("a::fails", EXHAUSTED),
        ("a::wrong", "Error: left"),
    ];
    let mut runs = [run("cri", &failed)];
    let settled = resolve(&mut runs, &ledger(""), &[program], &Environment::new(), HIDDEN).unwrap();
    let asked = fs::read_to_string(folder.join("asked")).unwrap();
    fs::remove_dir_all(folder).unwrap();
    let ends: Vec<bool> = settled.tried.iter().map(|second| second.has_passed).collect();
    assert_eq!((ends.as_slice(), settled.untried), ([true, false].as_slice(), 0));
    assert_eq!(asked.lines().count(), 2, "{asked}");
    let [run] = runs;
    assert_eq!((run.tally.passed, run.tally.failed), (1, 2));
    let first = run.cases.first().unwrap();
    assert_eq!((first.tries, first.first.as_deref()), (2, Some("waited 60s in vain")));
    assert_eq!(
        settled.lines(),
        [
            "1 passed at the second try:",
            "  cri a::holds: waited 60s in vain",
            "      again: cargo xtask test --only cri::a::holds"
        ]
    );
}

#[test]
fn a_third_wait_that_is_not_listed_is_beyond_the_budget() {
    let (folder, program) = program("three");
    let failed = ["a::holds", "b", "c"].map(|test| (test, EXHAUSTED));
    let mut runs = [run("cri", &failed)];
    let settled = resolve(&mut runs, &ledger(""), &[program], &Environment::new(), HIDDEN).unwrap();
    assert!(!folder.join("asked").exists(), "none is tried again");
    fs::remove_dir_all(folder).unwrap();
    assert_eq!((settled.tried.len(), settled.untried), (0, 3));
    assert_eq!(runs.first().unwrap().tally.failed, 3);
}
