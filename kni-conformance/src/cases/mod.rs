//! Lists all cases with their names and levels.

mod core;
mod extended;

use std::fmt;

use futures::future::LocalBoxFuture;
use serde::Serialize;

use crate::{error::Result, session::Session};

/// How much a client depends on a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Every server must pass it.
    Core,
    /// A server that offers the feature must pass it.
    Extended,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Core => "core",
            Self::Extended => "extended",
        })
    }
}

/// What is checked of a server.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Its unique name.
    pub name: &'static str,
    /// Its level.
    pub level: Level,
    /// What a server does that passes.
    pub about: &'static str,
    pub(crate) check: Check,
}

pub(crate) type Check = for<'a> fn(&'a Session) -> LocalBoxFuture<'a, Result<()>>;

/// All cases, in the order in which they run.
pub fn cases() -> impl Iterator<Item = &'static Case> {
    core::CASES.iter().chain(extended::CASES)
}

const fn case(level: Level, name: &'static str, about: &'static str, check: Check) -> Case {
    Case {
        name,
        level,
        about,
        check,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_plain() {
        let names: BTreeSet<&str> = cases().map(|case| case.name).collect();
        assert_eq!(names.len(), cases().count());
        let is_plain = |char: char| char.is_ascii_lowercase() || char == '-';
        assert!(names.iter().all(|name| name.chars().all(is_plain)), "{names:?}");
    }

    #[test]
    fn core_cases_come_first() {
        assert!(cases().map(|case| case.level).is_sorted());
    }
}
