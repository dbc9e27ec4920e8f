//! Compares two values that were measured in pairs, and evaluates their ratio by an aim.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::{
    report,
    statistics::{median, median_interval},
};

/// Values by the key of what was measured, one per pair.
pub(crate) type Values = BTreeMap<String, Vec<f64>>;

/// The columns of the table of comparisons.
const COLUMNS: [&str; 7] = ["comparison", "first", "second", "ratio", "95 %", "aim", ""];

/// The bound of a ratio. It is met if the interval of the ratio reaches it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Aim {
    /// The ratio should not exceed it.
    AtMost(f64),
    /// The ratio should reach it.
    AtLeast(f64),
}

/// Two measured values, and the aim of the first one divided by the second one.
#[derive(Debug)]
pub(crate) struct Comparison {
    title: String,
    first: String,
    second: String,
    aim: Option<Aim>,
}

/// The medians of both values, and the ratio by pair.
#[derive(Debug)]
struct Outcome {
    medians: [f64; 2],
    ratio: f64,
    interval: [f64; 2],
    aim: Option<Aim>,
}

impl Comparison {
    /// `first` and `second` are keys of [`Values`].
    pub(crate) fn new(title: String, first: String, second: String, aim: Option<Aim>) -> Self {
        Self {
            title,
            first,
            second,
            aim,
        }
    }

    /// `None` unless both were measured.
    fn result(&self, all: &Values) -> Option<Outcome> {
        let (first, second) = (all.get(&self.first)?, all.get(&self.second)?);
        let ratios: Vec<f64> = first.iter().zip(second).map(|(first, second)| first / second).collect();
        Some(Outcome {
            medians: [median(first), median(second)],
            ratio: median(&ratios),
            interval: median_interval(&ratios),
            aim: self.aim,
        })
    }

    fn row(&self, result: &Outcome) -> Vec<String> {
        let [first, second] = result.medians.map(|value| format!("{value:.0}"));
        let [low, high] = result.interval;
        let aim = match self.aim {
            Some(Aim::AtMost(aim)) => format!("at most {aim:.2}"),
            Some(Aim::AtLeast(aim)) => format!("at least {aim:.2}"),
            None => String::new(),
        };
        let verdict = result.is_met().map_or("", |met| if met { "met" } else { "missed" });
        vec![
            self.title.clone(),
            first,
            second,
            format!("{:.3}", result.ratio),
            format!("{low:.3} to {high:.3}"),
            aim,
            verdict.to_owned(),
        ]
    }
}

impl Outcome {
    fn is_met(&self) -> Option<bool> {
        let [low, high] = self.interval;
        self.aim.map(|aim| match aim {
            Aim::AtMost(aim) => low <= aim,
            Aim::AtLeast(aim) => high >= aim,
        })
    }

    fn json(&self) -> Value {
        json!({
            "medians": self.medians,
            "ratio": self.ratio,
            "interval": self.interval,
            "met": self.is_met(),
        })
    }
}

/// Prints the table of those comparisons of which both values were measured, and returns it for the JSON output.
pub(crate) fn show(heading: &str, comparisons: &[Comparison], all: &Values) -> Value {
    let results = comparisons.iter().filter_map(|comparison| {
        let result = comparison.result(all)?;
        Some((comparison, result))
    });
    let results: Vec<(&Comparison, Outcome)> = results.collect();
    let rows: Vec<_> = results
        .iter()
        .map(|(comparison, result)| comparison.row(result))
        .collect();
    report::heading(heading);
    report::table(&COLUMNS, &rows);
    let ratios: Map<String, Value> = results
        .iter()
        .map(|(comparison, result)| (comparison.title.clone(), result.json()))
        .collect();
    json!({ "ratios": ratios, "values": all })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aim_is_met_where_the_interval_reaches_it() {
        let comparison = |aim| Comparison::new("a / b".into(), "a".into(), "b".into(), Some(aim));
        let values = Values::from([
            ("a".to_owned(), vec![94.0, 95.0, 96.0, 97.0, 98.0, 99.0]),
            ("b".to_owned(), vec![100.0; 6]),
        ]);
        let met = |aim| comparison(aim).result(&values).unwrap().is_met().unwrap();
        assert!(met(Aim::AtLeast(0.98)) && !met(Aim::AtLeast(1.0)));
        assert!(met(Aim::AtMost(0.95)) && !met(Aim::AtMost(0.9)));
    }
}
