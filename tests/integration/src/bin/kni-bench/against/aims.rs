//! Lists what is compared, with the aims, and computes the ratios.

use serde_json::{Value, json};

use super::{Values, WORKLOADS, timed::CASES};
use crate::statistics::{median, median_interval};

/// The bound of a ratio. It is met if the interval of the ratio reaches it.
#[derive(Debug, Clone, Copy)]
enum Aim {
    AtMost(f64),
    AtLeast(f64),
}

/// Two measured values, and the aim of the first one divided by the second one.
#[derive(Debug)]
pub(super) struct Comparison {
    pub(super) title: String,
    first: String,
    second: String,
    aim: Option<Aim>,
}

/// The medians of both values, and the ratio by pair.
#[derive(Debug)]
pub(super) struct Outcome {
    medians: [f64; 2],
    ratio: f64,
    interval: [f64; 2],
    aim: Option<Aim>,
}

impl Comparison {
    fn new(title: String, first: String, second: String, aim: Option<Aim>) -> Self {
        Self {
            title,
            first,
            second,
            aim,
        }
    }

    /// `None` unless both were measured.
    pub(super) fn result(&self, all: &Values) -> Option<Outcome> {
        let (first, second) = (all.get(&self.first)?, all.get(&self.second)?);
        let ratios: Vec<f64> = first.iter().zip(second).map(|(first, second)| first / second).collect();
        Some(Outcome {
            medians: [median(first), median(second)],
            ratio: median(&ratios),
            interval: median_interval(&ratios),
            aim: self.aim,
        })
    }

    pub(super) fn row(&self, result: &Outcome) -> Vec<String> {
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

    pub(super) fn json(&self) -> Value {
        json!({
            "medians": self.medians,
            "ratio": self.ratio,
            "interval": self.interval,
            "met": self.is_met(),
        })
    }
}

/// Everything that is compared.
pub(super) fn comparisons() -> Vec<Comparison> {
    let mut all = Vec::new();
    for (key, title) in CASES {
        all.push(Comparison::new(
            format!("ns, {title}: new / old"),
            format!("new {key}"),
            format!("old {key}"),
            Some(Aim::AtMost(0.6)),
        ));
    }
    for (suffix, family) in [("", ""), ("_v6", ", IPv6")] {
        for (measure, _) in WORKLOADS {
            let of = |who: &str, path: &str| format!("{who} {path}{suffix} {measure}");
            all.push(Comparison::new(
                format!("{measure}{family}: new / old"),
                of("new", "kni"),
                of("old", "kni"),
                None,
            ));
            let aim = match (suffix, measure) {
                ("", "tcp_rr") => 0.98,
                ("", _) => 0.97,
                _ => 0.95,
            };
            all.push(Comparison::new(
                format!("{measure}{family}: policies / bare redirect_peer"),
                of("new", "kni_policy"),
                of("bare", "redirect_peer"),
                Some(Aim::AtLeast(aim)),
            ));
        }
    }
    for (title, first, second, aim) in [
        ("1 000 services / one", "kni_1000_services", "kni_one_service", 0.95),
        (
            "flow events followed / off",
            "kni_events_followed",
            "kni_events_off",
            0.97,
        ),
    ] {
        all.push(Comparison::new(
            format!("connections: {title}"),
            format!("new {first} connections"),
            format!("new {second} connections"),
            Some(Aim::AtLeast(aim)),
        ));
    }
    all
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
