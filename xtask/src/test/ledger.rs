//! The ledger of known flaky tests, `tests/flakes.toml`: each entry has an end, after which it fails the run.
//!
//! A test that is listed may be tried again without counting against the run's budget. One in quarantine runs and does
//! not fail the run.

use std::{
    fs,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail, ensure};

use super::failure::is_protected;
use crate::workspace::root;

/// The file, relative to the root of the repository.
const FILE: &str = "tests/flakes.toml";
/// The longest time from the date of an entry to its end.
const LONGEST_DAYS: i64 = 14;
/// The most entries in quarantine.
const MOST_IN_QUARANTINE: usize = 3;

/// The known flaky tests.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    entries: Vec<Entry>,
}

/// A test of the ledger.
#[derive(Debug, Default, PartialEq, Eq)]
struct Entry {
    /// Its program and its path, `node::egress::ports::a_port_is_kept`.
    test: String,
    date: i64,
    expires: i64,
    reason: String,
    quarantine: bool,
    /// The number of its first line.
    line: usize,
}

impl Ledger {
    /// Reads the ledger; fails if an entry is wrong or its end is over.
    pub(super) fn read() -> Result<Self> {
        let text = fs::read_to_string(root().join(FILE)).with_context(|| format!("cannot read {FILE}"))?;
        let ledger = Self::parse(&text)?;
        ledger.check(today()?)?;
        Ok(ledger)
    }

    /// Whether the test is listed.
    pub(super) fn lists(&self, program: &str, test: &str) -> bool {
        self.entry(program, test).is_some()
    }

    /// Whether the test is in quarantine.
    pub(super) fn quarantines(&self, program: &str, test: &str) -> bool {
        self.entry(program, test).is_some_and(|entry| entry.quarantine)
    }

    fn entry(&self, program: &str, test: &str) -> Option<&Entry> {
        let found = |entry: &&Entry| entry.test.split_once("::") == Some((program, test));
        self.entries.iter().find(found)
    }

    /// Reads the small part of TOML that the file uses: tables `[[flake]]` with texts and booleans.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut entries: Vec<Entry> = Vec::new();
        for (number, line) in (1..).zip(text.lines().map(str::trim)) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if line == "[[flake]]" {
                let line = number;
                entries.push(Entry {
                    line,
                    ..Entry::default()
                });
                continue;
            }
            let entry = entries.last_mut();
            let entry = entry.with_context(|| format!("{FILE}:{number}: a line before the first [[flake]]"))?;
            set(entry, line).with_context(|| format!("{FILE}:{number}"))?;
        }
        Ok(Self { entries })
    }

    fn check(&self, today: i64) -> Result<()> {
        for entry in &self.entries {
            entry.check(today).with_context(|| format!("{FILE}:{}", entry.line))?;
        }
        let quarantined = self.entries.iter().filter(|entry| entry.quarantine).count();
        ensure!(
            quarantined <= MOST_IN_QUARANTINE,
            "{FILE}: {quarantined} entries in quarantine, at most {MOST_IN_QUARANTINE} are allowed"
        );
        Ok(())
    }
}

impl Entry {
    fn check(&self, today: i64) -> Result<()> {
        ensure!(!self.reason.is_empty(), "the entry has no reason");
        let (program, test) = self.test.split_once("::").context("`test` is PROGRAM::PATH")?;
        ensure!(
            !is_protected(program, test),
            "{} checks isolation, rights or memory: it may not be tried again",
            self.test
        );
        ensure!(
            (self.date..=self.date + LONGEST_DAYS).contains(&self.expires),
            "the entry must expire at most {LONGEST_DAYS} days after its date"
        );
        ensure!(
            today <= self.expires,
            "the entry of {} has expired: mend the test and remove the entry",
            self.test
        );
        Ok(())
    }
}

fn set(entry: &mut Entry, line: &str) -> Result<()> {
    let (key, value) = line.split_once(" = ").context("no line `key = value`")?;
    let text = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    match (key, text, value) {
        ("test", Some(text), _) => text.clone_into(&mut entry.test),
        ("reason", Some(text), _) => text.clone_into(&mut entry.reason),
        ("date", Some(text), _) => entry.date = day(text)?,
        ("expires", Some(text), _) => entry.expires = day(text)?,
        ("quarantine", None, "true") => entry.quarantine = true,
        ("quarantine", None, "false") => entry.quarantine = false,
        _ => bail!("`{line}` is no field of an entry"),
    }
    Ok(())
}

/// The days from 1970-01-01 to the date `YYYY-MM-DD`.
fn day(text: &str) -> Result<i64> {
    let parts: Vec<i64> = text.split('-').filter_map(|part| part.parse().ok()).collect();
    let [year, month @ 1..=12, day @ 1..=31] = parts.as_slice() else {
        bail!("{text:?} is no date YYYY-MM-DD")
    };
    // The year of this count begins in March, so that the leap day is its last one.
    let year = if *month <= 2 { year - 1 } else { *year };
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    Ok(year * 365 + year / 4 - year / 100 + year / 400 + of_year - 719_468)
}

fn today() -> Result<i64> {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .context("the clock is wrong")?;
    i64::try_from(since.as_secs() / 86_400).context("the clock is wrong")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger(test: &str, date: &str, expires: &str, more: &str) -> Result<Ledger> {
        Ledger::parse(&format!(
            "# known\n\n[[flake]]\ntest = \"{test}\"\ndate = \"{date}\"\nexpires = \"{expires}\"\nreason = \"slow\"\n{more}"
        ))
    }

    #[test]
    fn dates_are_days() {
        assert_eq!(day("1970-01-01").unwrap(), 0);
        assert_eq!(day("2000-03-01").unwrap(), 11_017);
        assert_eq!(day("2026-12-31").unwrap() + 1, day("2027-01-01").unwrap());
        assert_eq!(day("2028-02-29").unwrap() + 1, day("2028-03-01").unwrap());
        assert!(day("tomorrow").is_err() && day("2026-13-01").is_err());
    }

    #[test]
    fn an_entry_ends_with_its_last_day() {
        let test = "node::egress::ports::a";
        let ledger = ledger(test, "2026-11-28", "2026-12-12", "").unwrap();
        ledger.check(day("2026-12-12").unwrap()).unwrap();
        let error = ledger.check(day("2026-12-13").unwrap()).unwrap_err();
        assert!(format!("{error:#}").contains("has expired"), "{error:#}");
        assert!(ledger.lists("node", "egress::ports::a") && !ledger.quarantines("node", "egress::ports::a"));
        assert!(!ledger.lists("cluster", "egress::ports::a") && !ledger.lists("node", "egress::ports"));
    }

    #[test]
    fn no_entry_lasts_longer_than_two_weeks_or_hides_a_leak() {
        let today = day("2026-11-28").unwrap();
        let refused = |test: &str, date: &str, expires: &str| {
            ledger(test, date, expires, "")
                .and_then(|ledger| ledger.check(today))
                .is_err()
        };
        assert!(!refused("node::a", "2026-11-28", "2026-11-28"));
        assert!(refused("node::a", "2026-11-28", "2026-12-13"));
        assert!(refused("node::a", "2026-11-29", "2026-11-28"));
        assert!(refused("node::isolation::a", "2026-11-28", "2026-11-29"));
        assert!(refused("dataplane::frames::a", "2026-11-28", "2026-11-29"));
        assert!(refused("node", "2026-11-28", "2026-11-29"));
    }

    #[test]
    fn few_tests_are_in_quarantine() {
        let entry = "[[flake]]\ntest = \"node::a\"\ndate = \"2026-11-28\"\nexpires = \"2026-11-30\"\nreason = \"x\"\n\
                     quarantine = true\n";
        let today = day("2026-11-28").unwrap();
        let three = Ledger::parse(&entry.repeat(3)).unwrap();
        three.check(today).unwrap();
        assert!(three.quarantines("node", "a"));
        assert!(Ledger::parse(&entry.repeat(4)).unwrap().check(today).is_err());
    }

    #[test]
    fn only_known_lines_are_read() {
        assert!(ledger("node::a", "2026-11-28", "2026-11-29", "quarantine = \"true\"").is_err());
        assert!(ledger("node::a", "2026-11-28", "2026-11-29", "owner = \"me\"").is_err());
        assert!(Ledger::parse("test = \"node::a\"").is_err());
    }

    #[test]
    fn the_ledger_of_the_repository_can_be_read() {
        let text = fs::read_to_string(root().join(FILE)).unwrap();
        Ledger::parse(&text).unwrap();
    }
}
