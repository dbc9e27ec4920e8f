//! Prints the results of the paths.

use serde_json::{Map, Value, json};

use super::{
    LIMIT, Measure, OURS, Values,
    ours::{MANY_SERVICES, ONE_SERVICE},
};
use crate::{
    path::Path,
    report,
    statistics::{median, paired_ratio},
};

fn rounds<'a>(all: &'a Values, path: &'static str, measure: &'static str) -> &'a [f64] {
    all.get(&(path, measure)).map_or(&[], Vec::as_slice)
}

/// One row of medians per path; below them the comparison of KNI with the others.
pub(super) fn print(paths: &[Path], measures: &[Measure], all: &Values) {
    let mut header = vec!["path"];
    header.extend(measures.iter().map(|m| m.title));
    let mut rows = Vec::new();
    for path in paths {
        let mut row = vec![path.title.to_owned()];
        for measure in measures {
            row.push(number(median(rounds(all, path.key, measure.key))));
        }
        rows.push(row);
    }
    let mut ratio = |title: String, ours: &'static str, other: &'static str| {
        rows.extend(ratios(title, measures, all, ours, other));
    };
    for path in paths.iter().filter(|path| !path.key.starts_with(OURS)) {
        ratio(format!("KNI / {}", path.title), OURS, path.key);
    }
    for path in paths
        .iter()
        .filter(|path| path.key.starts_with(OURS) && path.key != OURS)
    {
        ratio(format!("{} / bare redirect_peer", path.title), path.key, LIMIT);
    }
    for (title, ours, other) in [
        ("flow events followed / off", "kni_events_followed", "kni_events_off"),
        ("1 000 services / one", MANY_SERVICES, ONE_SERVICE),
    ] {
        ratio(title.to_owned(), ours, other);
    }
    report::heading("Pod to pod on one node (medians; ratios: median of the rounds' ratios)");
    report::table(&header, &rows);
}

/// The row that compares a path with another one; `None` if one of them was omitted.
fn ratios(
    title: String,
    measures: &[Measure],
    all: &Values,
    ours: &'static str,
    other: &'static str,
) -> Option<Vec<String>> {
    let mut row = vec![title];
    for measure in measures {
        let (ours, other) = (rounds(all, ours, measure.key), rounds(all, other, measure.key));
        if ours.is_empty() || other.is_empty() {
            return None;
        }
        row.push(format!("{:.2}", paired_ratio(ours, other)));
    }
    Some(row)
}

fn number(value: f64) -> String {
    if value >= 1000.0 {
        format!("{:.1} k", value / 1000.0)
    } else {
        format!("{value:.1}")
    }
}

/// All values by path and measure.
pub(super) fn json(all: &Values) -> Value {
    let mut paths = Map::new();
    for ((path, measure), rounds) in all {
        let limit = all.get(&(LIMIT, measure)).map_or(&[][..], Vec::as_slice);
        let value = json!({
            "median": median(rounds),
            "ratio_to_redirect_peer": paired_ratio(rounds, limit),
            "rounds": rounds,
        });
        let path = paths.entry(*path).or_insert_with(|| json!({}));
        path[*measure] = value;
    }
    Value::Object(paths)
}
