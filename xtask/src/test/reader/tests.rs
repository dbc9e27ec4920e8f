//! Tests of the reader of test output.

use super::*;
use crate::test::failure::SUMMARY_LINES;

fn read(text: &str) -> (Reader, Vec<&str>) {
    let mut reader = Reader::default();
    let shown = text.lines().filter(|line| reader.line(line) != Seen::Hidden).collect();
    (reader, shown)
}

fn failures(text: &str) -> Vec<(String, Failure)> {
    let cases = read(text).0.cases().into_iter();
    let failed = cases.filter_map(|case| match case.end {
        End::Failed(failure) => Some((case.test, failure)),
        End::Passed | End::Quarantined(_) | End::Ignored(_) | End::Skipped => None,
    });
    failed.collect()
}

#[test]
fn results_of_several_programs_add_up() {
    let (reader, shown) = read(
        "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.07s\n\
         test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
    );
    let sum = Tally {
        passed: 14,
        failed: 3,
        skipped: 1,
        reported_skip: 0,
    };
    assert_eq!(reader.tally(), sum);
    assert_eq!(shown.len(), 2);
}

#[test]
fn a_test_that_reports_a_skip_did_not_pass() {
    let (reader, shown) = read(
        "running 3 tests\ntest a ... ok\ntest b ... ok\ntest c ... ok\n\nsuccesses:\n\n---- a stdout ----\nchatter\n\
         SKIP a: needs root\nSKIP a: needs bpf\n\n---- b stdout ----\nSKIP b: needs root\n\nsuccesses:\n    a\n    b\n    c\n\n\
         test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
    );
    let sum = Tally {
        passed: 1,
        failed: 0,
        skipped: 2,
        reported_skip: 2,
    };
    assert_eq!(reader.tally(), sum);
    assert_eq!(reader.count(), (3, 3));
    assert!(
        !shown.contains(&"chatter") && shown.contains(&"SKIP b: needs root"),
        "{shown:?}"
    );
    let ends: Vec<End> = reader.cases().into_iter().map(|case| case.end).collect();
    assert_eq!(ends, [End::Skipped, End::Skipped, End::Passed]);
}

#[test]
fn the_output_of_failed_tests_is_shown() {
    let (_, shown) = read(
        "successes:\n\n---- a stdout ----\nquiet\n\nsuccesses:\n    a\n\nfailures:\n\n---- b stdout ----\nloud\n\n\
         failures:\n    b\n\ntest result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured",
    );
    assert!(shown.contains(&"loud") && !shown.contains(&"quiet"), "{shown:?}");
}

#[test]
fn a_failure_has_the_begin_of_its_output() {
    let long = "a line\n".repeat(20);
    let found = failures(&format!(
        "test a ... ok\ntest b ... FAILED\ntest c::d ... FAILED\ntest e ... FAILED\nsuccesses:\n\n---- a stdout ----\n\
         quiet\n\nsuccesses:\n    a\n\nfailures:\n\n---- b stdout ----\n\
         Error: first\n\n  second\n---- c::d stdout ----\n{long}\n\
         ---- e stdout ----\nshort\n\nfailures:\n    b\n    c::d\n    e\n\n\
         test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured\nafter"
    ));
    let [(b, first), (c, second), (e, third)] = found.try_into().unwrap();
    assert_eq!((b.as_str(), c.as_str(), e.as_str()), ("b", "c::d", "e"));
    assert_eq!(first.to_string(), "\n      Error: first\n        second");
    assert_eq!(second.lines.len(), SUMMARY_LINES);
    assert_eq!(third.lines, ["short"], "the names of failed tests are not output");
}

#[test]
fn a_failure_has_the_error_after_a_long_output() {
    let long = "a line\n".repeat(20);
    let found = failures(&format!(
        "test a ... FAILED\ntest b ... FAILED\ntest c ... FAILED\n\
         failures:\n\n---- a stdout ----\n{long}---- not a test stdout ----\nError: too many\n\nCaused by:\n\
         ---- b stdout ----\n{long}\n\
         thread 'b' (7) panicked at src/b.rs:1:2:\ncaught\nError: left\n\n---- c stdout ----\n{long}\n\
         thread 'c' (8) panicked at src/c.rs:1:2:\nright\n\nfailures:\n    a\n    b\n    c\n"
    ));
    let [a, b, c] = found.try_into().unwrap();
    assert_eq!(a.1.lines, ["Error: too many", "Caused by:"]);
    assert_eq!(
        b.1.lines,
        ["Error: left"],
        "the error that was returned, not the caught panic"
    );
    assert_eq!(c.1.lines, ["thread 'c' (8) panicked at src/c.rs:1:2:", "right"]);
}

#[test]
fn times_belong_to_their_tests_and_are_not_shown() {
    let text = "test a::b ... ok\nsuccesses:\n---- a::b stdout ----\nTIME 12.5 a::b (Busy, waited 0.1 s)\nTIME of day\n\
                test result: ok. 1 passed; 0 failed";
    let (reader, shown) = read(text);
    assert_eq!(shown.len(), 2, "the line of the test and the sums: {shown:?}");
    let time = Time {
        seconds: 12.5,
        share: "Busy, waited 0.1 s".to_owned(),
    };
    assert_eq!(reader.cases().pop().unwrap().time, Some(time));
}

#[test]
fn lines_of_results_are_read() {
    let end = |line: &str| ended(line).map(|case| (case.test, case.end));
    assert_eq!(end("test a::b ... ok"), Some(("a::b".to_owned(), End::Passed)));
    assert_eq!(end("test a - should panic ... ok"), Some(("a".to_owned(), End::Passed)));
    assert_eq!(
        end("test a ... ignored, long: a benchmark"),
        Some(("a".to_owned(), End::Ignored("long: a benchmark".to_owned())))
    );
    assert_eq!(end("test a ... or so"), None);
}

#[test]
fn words_of_a_test_itself_count_nothing() {
    let (reader, _) = read("5 passed\nresult: 7 failed\ntest result ok\nnot a SKIP line");
    assert_eq!(reader.tally(), Tally::default());
    assert_eq!(reader.count(), (0, 0));
}
