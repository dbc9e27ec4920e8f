//! Compares the attachment of pods by two agents in pairs, beside the bridge plugin, with the aims.

use std::{collections::BTreeMap, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};

use super::{
    Pattern,
    kni::Kni,
    plugin::{PLUGINS, Plugin},
    timing::Timings,
};
use crate::{
    Effort, report,
    statistics::{median, median_interval, percentile},
};

/// How pods are attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    Warm,
    Cold,
    Cni,
}

/// A measured value of a case.
#[derive(Debug, Clone, Copy)]
enum Measure {
    AttachMedian,
    /// `CreateNetwork` within it.
    CreateMedian,
    /// Of the attachments of all pairs together.
    AttachP99,
    DetachMedian,
    /// `DeleteNetwork` within it.
    DeleteMedian,
    AllAttached,
    /// A call that does nothing.
    IdleCallMedian,
}

impl Measure {
    fn title(self) -> &'static str {
        match self {
            Self::AttachMedian => "attach p50",
            Self::CreateMedian => "- of it creating",
            Self::AttachP99 => "attach p99",
            Self::DetachMedian => "detach p50",
            Self::DeleteMedian => "- of it deleting",
            Self::AllAttached => "all attached",
            Self::IdleCallMedian => "an idle call p50",
        }
    }

    /// Value and interval.
    fn of(self, rounds: &[Timings]) -> (f64, [f64; 2]) {
        let each: Vec<f64> = match self {
            Self::AttachMedian => rounds.iter().map(|round| median(&round.attach)).collect(),
            Self::CreateMedian => rounds.iter().map(|round| median(&round.create)).collect(),
            Self::DeleteMedian => rounds.iter().map(|round| median(&round.delete)).collect(),
            Self::DetachMedian => rounds.iter().map(|round| median(&round.detach)).collect(),
            Self::IdleCallMedian => rounds.iter().map(|round| median(&round.idle_call)).collect(),
            Self::AllAttached => rounds.iter().map(|round| round.all_attached).collect(),
            Self::AttachP99 => {
                let all: Vec<f64> = rounds.iter().flat_map(|round| round.attach.iter().copied()).collect();
                let value = percentile(&all, 0.99);
                return (value, [value; 2]);
            }
        };
        (median(&each), median_interval(&each))
    }
}

/// Aims in milliseconds, where there are some.
type Aims = &'static [(Measure, Option<f64>)];

const EACH: Aims = &[
    (Measure::AttachMedian, Some(1.0)),
    (Measure::CreateMedian, None),
    (Measure::AttachP99, Some(3.0)),
    (Measure::DetachMedian, Some(1.0)),
    (Measure::DeleteMedian, None),
    (Measure::IdleCallMedian, None),
];
const COLD: Aims = &[(Measure::AttachMedian, Some(3.0)), (Measure::CreateMedian, None)];
const BURST_OF_30: Aims = &[(Measure::AllAttached, Some(40.0))];
const BURST_OF_110: Aims = &[(Measure::AllAttached, Some(300.0))];
const BURST_OF_150: Aims = &[(Measure::AllAttached, Some(400.0))];

fn cases(quick: bool) -> Vec<(Method, Pattern, Aims)> {
    let pause = Duration::from_millis(200);
    if quick {
        return vec![
            (Method::Warm, Pattern::Sequence(5), EACH),
            (Method::Warm, Pattern::Spaced(3, pause), EACH),
            (Method::Cold, Pattern::Sequence(5), COLD),
            (Method::Warm, Pattern::Burst(10), BURST_OF_30),
            (Method::Cni, Pattern::Burst(5), BURST_OF_150),
        ];
    }
    vec![
        (Method::Warm, Pattern::Sequence(100), EACH),
        (Method::Warm, Pattern::Spaced(20, pause), EACH),
        (Method::Cold, Pattern::Sequence(30), COLD),
        (Method::Warm, Pattern::Burst(30), BURST_OF_30),
        (Method::Warm, Pattern::Burst(110), BURST_OF_110),
        (Method::Cni, Pattern::Burst(150), BURST_OF_150),
    ]
}

/// The servers of one agent, each on a node of its own.
struct Servers {
    warm: Kni,
    cold: Kni,
    cni: Option<Plugin>,
}

impl Servers {
    fn start(agent: &Path, cni: Option<&Path>) -> Result<Self> {
        Ok(Self {
            warm: Kni::start(agent, None)?,
            cold: Kni::start(agent, Some(0))?,
            cni: cni.map(|program| Plugin::kni(program, agent)).transpose()?,
        })
    }

    fn run(&self, method: Method, pattern: Pattern) -> Result<Option<Timings>> {
        match method {
            Method::Warm => self.warm.run(pattern).map(Some),
            Method::Cold => self.cold.run(pattern).map(Some),
            Method::Cni => self.cni.as_ref().map(|plugin| plugin.run(pattern)).transpose(),
        }
    }
}

/// Measures pairs of both agents, in the opposite order in every other pair, and prints the table.
pub(crate) fn measure(
    effort: Effort,
    [new, old]: [&Path; 2],
    cni: Option<&Path>,
    json: &mut Map<String, Value>,
) -> Result<()> {
    println!("new: {}\nold: {}", new.display(), old.display());
    let agents = [("new", Servers::start(new, cni)?), ("old", Servers::start(old, cni)?)];
    let bridge = Plugin::bridge()?;
    if bridge.is_none() {
        eprintln!("attach: no bridge plugin in {PLUGINS}: left out");
    }
    let cases = cases(effort.quick);
    let mut all: BTreeMap<(usize, &str), Vec<Timings>> = BTreeMap::new();
    for round in 0..effort.rounds {
        eprintln!("pair {} of {}", round + 1, effort.rounds);
        for (case, (method, pattern, _)) in cases.iter().enumerate() {
            let mut order: Vec<&(&str, Servers)> = agents.iter().collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for (who, servers) in order {
                let timings = servers.run(*method, *pattern).with_context(|| (*who).to_owned())?;
                all.entry((case, who)).or_default().extend(timings);
            }
            if let Some(bridge) = bridge.as_ref().filter(|_| *method != Method::Cold) {
                let timings = bridge.run(*pattern).context("bridge plugin")?;
                all.entry((case, "bridge")).or_default().push(timings);
            }
        }
    }
    show(&cases, &all, json);
    Ok(())
}

fn show(cases: &[(Method, Pattern, Aims)], all: &BTreeMap<(usize, &str), Vec<Timings>>, json: &mut Map<String, Value>) {
    let header = [
        "milliseconds",
        "value",
        "new",
        "95 %",
        "old",
        "95 %",
        "bridge",
        "aim",
        "",
    ];
    let mut rows = Vec::new();
    let mut values = Vec::new();
    for (case, (method, pattern, aims)) in cases.iter().enumerate() {
        let title = format!("{method:?}: {}", pattern.title());
        for (measure, aim) in *aims {
            let of = |who| {
                let rounds = all.get(&(case, who)).filter(|rounds| !rounds.is_empty())?;
                Some(measure.of(rounds))
            };
            let Some((value, [low, high])) = of("new") else {
                continue;
            };
            let cells = |found: Option<(f64, [f64; 2])>| match found {
                Some((value, [low, high])) => [format!("{value:.2}"), format!("{low:.2} to {high:.2}")],
                None => [String::new(), String::new()],
            };
            let mut row = vec![title.clone(), measure.title().to_owned()];
            row.extend(cells(Some((value, [low, high]))));
            row.extend(cells(of("old")));
            row.extend(cells(of("bridge")).into_iter().take(1));
            let is_met = aim.map(|aim| value <= aim);
            row.push(aim.map(|aim| format!("at most {aim}")).unwrap_or_default());
            row.push(is_met.map_or("", |met| if met { "met" } else { "missed" }).to_owned());
            rows.push(row);
            values.push(json!({
                "case": title, "value": measure.title(), "new": value, "interval": [low, high],
                "old": of("old").map(|(value, _)| value), "bridge": of("bridge").map(|(value, _)| value),
                "aim": aim, "met": is_met,
            }));
        }
    }
    report::heading(
        "Attaching pods, pairs of two agents: medians of the pairs with the interval that covers 95 %; p99 of all \
         attachments together (KNI: CreateNetwork + AttachInterface; plugins: ADD)",
    );
    report::table(&header, &rows);
    json.insert("attach_pairs".into(), Value::Array(values));
}
