//! Shows the outcome of simulations as tables and as JSON.

use std::{collections::BTreeMap, fmt::Write as _};

use serde_json::{Value, json};

use super::{
    Latency, Outcome,
    meters::{Cost, Request},
    model::{FORMULAS, Size},
};

/// Rows that a table of kinds has at most.
const MOST_ROWS: usize = 14;
/// The share of the machine from which on it is saturated.
const SATURATED: f64 = 0.9;
const MIB: f64 = 1024.0 * 1024.0;

/// The tables of one size.
pub fn text(outcome: &Outcome, cores: f64) -> String {
    let options = &outcome.options;
    let mut text = format!(
        "\n== {} nodes, {} pods, {} networks, {:.1} starts/s ({} starts in {:.0} s) ==\n",
        options.nodes, options.pods, options.networks, outcome.started.1, outcome.started.0, outcome.load.seconds
    );
    for (name, latency) in latencies(outcome) {
        let Latency {
            p50,
            p99,
            most,
            count,
            missing,
        } = latency;
        line(
            &mut text,
            &format!("{name:<58} p50 {p50:.3} s, p99 {p99:.3} s, max {most:.3} s, n {count}, missing {missing}"),
        );
    }
    let (seconds, read) = &outcome.restart;
    line(
        &mut text,
        &format!(
            "an agent starts again: {seconds:.3} s; it reads {:.0} kB: {}",
            read.values().sum::<f64>() / 1e3,
            listed(read, 1e-3, MOST_ROWS)
        ),
    );
    add_phases(&mut text, outcome, cores);
    add_changes(&mut text, outcome);
    text
}

fn add_phases(text: &mut String, outcome: &Outcome, cores: f64) {
    for (name, cost) in [
        ("filling", &outcome.filling.0),
        ("idle", &outcome.idle),
        ("load", &outcome.load),
    ] {
        line(text, &format!("-- {name}: {}", summary(cost)));
        line(
            text,
            &format!("   cores: {}; saturated: {}", cores_of(cost), saturated(cost, cores)),
        );
    }
    line(
        text,
        &format!(
            "pods confirmed while filling: {:.1}/s, {} of {}",
            outcome.filling.1, outcome.confirmed, outcome.options.pods
        ),
    );
    line(
        text,
        &format!("   resident MiB: {}", listed(&outcome.memory.0, 1.0 / MIB, 8)),
    );
    line(
        text,
        &format!("   open watches: {:.0}", outcome.watches.values().sum::<f64>()),
    );
    line(text, "-- load, watch events/s by resource");
    line(
        text,
        &format!(
            "   {}",
            listed(&outcome.load.events, 1.0 / outcome.load.seconds, MOST_ROWS)
        ),
    );
    line(text, "-- load, kB/s of watch events by resource");
    line(
        text,
        &format!(
            "   {}",
            listed(&outcome.load.event_bytes, 1e-3 / outcome.load.seconds, MOST_ROWS)
        ),
    );
    line(text, "-- load, kB/s of other answers");
    line(
        text,
        &format!(
            "   {}",
            listed(&outcome.load.answers, 1e-3 / outcome.load.seconds, MOST_ROWS)
        ),
    );
    line(text, "-- load, requests/s");
    line(
        text,
        &format!(
            "   {}",
            listed(&requests(&outcome.load), 1.0 / outcome.load.seconds, MOST_ROWS * 2)
        ),
    );
}

fn add_changes(text: &mut String, outcome: &Outcome) {
    for one in &outcome.changes {
        let cost = &one.cost;
        line(
            text,
            &format!(
                "-- {}: {:.0} writes, {:.0} reads, {:.0} events, {:.1} kB of events, {:.1} kB of answers",
                one.what,
                cost.writes(),
                cost.reads(),
                cost.all_events(),
                cost.all_event_bytes() / 1e3,
                cost.all_answers() / 1e3
            ),
        );
        line(
            text,
            &format!("   requests: {}", listed(&requests(cost), 1.0, MOST_ROWS)),
        );
        line(text, &format!("   events: {}", listed(&cost.events, 1.0, MOST_ROWS)));
        line(
            text,
            &format!(
                "   watches that received each change: {}",
                listed(&cost.watchers(), 1.0, MOST_ROWS)
            ),
        );
    }
}

fn line(text: &mut String, line: &str) {
    // Writing to a string does not fail.
    let _written = writeln!(text, "{line}").is_ok();
}

fn latencies(outcome: &Outcome) -> [(&'static str, Latency); 5] {
    [
        ("start of an agent, all at once", outcome.starts),
        ("all nodes claim a block at once", outcome.claims),
        ("pod created to attached (in memory)", outcome.attaches),
        ("pod created to known at all concerned nodes", outcome.joins),
        ("labels changed to known at all concerned nodes", outcome.relabels),
    ]
}

fn summary(cost: &Cost) -> String {
    let per = |value: f64| value / cost.seconds;
    format!(
        "{:.0} s; KNI's requests: {:.1} writes/s, {:.1} reads/s; answers {:.2} MB/s; watches: {:.0} events/s, {:.2} MB/s",
        cost.seconds,
        per(cost.writes()),
        per(cost.reads()),
        per(cost.all_answers()) / 1e6,
        per(cost.all_events()),
        per(cost.all_event_bytes()) / 1e6
    )
}

fn cores_of(cost: &Cost) -> String {
    let all: Vec<String> = cost
        .cpu
        .iter()
        .map(|(name, cores)| format!("{name} {cores:.3}"))
        .collect();
    format!("{}, others of the machine {:.2}", all.join(", "), cost.others)
}

/// The resource that was used up, with the program that used most of it.
fn saturated(cost: &Cost, cores: f64) -> String {
    let used: f64 = cost.cpu.values().sum::<f64>() + cost.others;
    if used < SATURATED * cores {
        return format!("nothing ({:.0} % of the CPU)", used / cores * 100.0);
    }
    let most = cost.cpu.iter().max_by(|a, b| a.1.total_cmp(b.1));
    let (name, by) = most.map_or(("nothing", 0.0), |(name, by)| (name.as_str(), *by));
    format!(
        "CPU of the machine ({:.0} %), most by {name} ({by:.2} cores)",
        used / cores * 100.0
    )
}

fn requests(cost: &Cost) -> BTreeMap<String, f64> {
    let name = |request: &Request| format!("{} {} {}", request.who, request.verb, request.resource);
    let kept = cost.requests.iter().filter(|(request, _)| request.is_ours());
    kept.map(|(request, count)| (name(request), *count)).collect()
}

/// The largest rows.
fn listed(rows: &BTreeMap<String, f64>, factor: f64, most: usize) -> String {
    let mut rows: Vec<(&String, f64)> = rows.iter().map(|(name, value)| (name, value * factor)).collect();
    rows.sort_by(|a, b| b.1.total_cmp(&a.1));
    let rows = rows.into_iter().filter(|(_, value)| *value >= 0.005).take(most);
    let rows: Vec<String> = rows.map(|(name, value)| format!("{name} {value:.2}")).collect();
    rows.join("; ")
}

/// One size as JSON.
pub fn json(outcome: &Outcome) -> Value {
    let cost = |cost: &Cost| {
        json!({
            "seconds": cost.seconds, "cores": cost.cpu, "others": cost.others, "requests": requests(cost),
            "writes": cost.writes(), "reads": cost.reads(), "answers": cost.answers, "events": cost.events,
            "eventBytes": cost.event_bytes, "watchers": cost.watchers(),
        })
    };
    let latency = |one: Latency| json!({ "p50": one.p50, "p99": one.p99, "max": one.most, "count": one.count, "missing": one.missing });
    let changes = outcome
        .changes
        .iter()
        .map(|one| json!({ "what": one.what, "cost": cost(&one.cost) }));
    json!({
        "nodes": outcome.options.nodes, "pods": outcome.options.pods, "networks": outcome.options.networks,
        "rate": outcome.started.1, "starts": outcome.started.0,
        "latencies": latencies(outcome).map(|(name, one)| json!({ "name": name, "seconds": latency(one) })),
        "restartSeconds": outcome.restart.0, "restartBytes": outcome.restart.1, "filling": cost(&outcome.filling.0), "confirmedPerSecond": outcome.filling.1, "confirmed": outcome.confirmed,
        "idle": cost(&outcome.idle), "load": cost(&outcome.load), "memory": outcome.memory.0,
        "memoryWithoutAgents": outcome.memory.1, "watches": outcome.watches, "changes": changes.collect::<Vec<_>>(),
        "measured": outcome.measured(),
    })
}

/// The model, fitted on the first two sizes, beside the third, and its prediction for the goal.
pub fn prediction(first: &Outcome, second: &Outcome, third: Option<&Outcome>) -> (String, Value) {
    let mut text = String::from("\n== model, fitted on the first two sizes ==\n");
    let mut rows = Vec::new();
    let (one, two) = (first.measured(), second.measured());
    let three = third.map(|third| (third, third.measured()));
    for formula in &FORMULAS {
        let value = |all: &BTreeMap<String, f64>| all.get(formula.name).copied().unwrap_or_default();
        let Some(fitted) = formula.fit((&first.size, value(&one)), (&second.size, value(&two))) else {
            line(
                &mut text,
                &format!("{}: the two sizes are not independent", formula.name),
            );
            continue;
        };
        let checked = three.as_ref().map(|(third, measured)| {
            let (predicted, measured) = (formula.predict(fitted, &third.size), value(measured));
            (predicted, measured, (predicted / measured - 1.0) * 100.0)
        });
        let goals = [0.0, 1.0 / 10.0].map(|flat| formula.predict(fitted, &Size::goal(flat)));
        let shown = checked.map_or(String::new(), |(predicted, measured, error)| {
            format!("; third size: predicted {predicted:.4e}, measured {measured:.4e}, error {error:+.0} %")
        });
        line(
            &mut text,
            &format!(
                "{:<15} [{}] = {:.3e} x ({}) + {:.3e} x ({}){shown}; at the goal {:.3e}, with a tenth of the pods in one \
                 network {:.3e}; aim {}",
                formula.name,
                formula.unit,
                fitted[0],
                formula.terms[0],
                fitted[1],
                formula.terms[1],
                goals[0],
                goals[1],
                formula.aim.map_or("none".to_owned(), |aim| format!("{aim:.3e}"))
            ),
        );
        rows.push(json!({
            "name": formula.name, "unit": formula.unit, "terms": formula.terms, "coefficients": fitted,
            "third": checked.map(|(predicted, measured, error)| json!({
                "predicted": predicted, "measured": measured, "errorPercent": error,
            })),
            "goal": goals[0], "goalWithFlatShare": goals[1], "aim": formula.aim,
        }));
    }
    (text, Value::from(rows))
}
