//! Measures the attachment and detachment of pods through the agent, through the CNI plugin of KNI and through the
//! bridge plugin.

mod kni;
mod pairs;
mod plugin;
mod timing;

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};

pub(crate) use self::pairs::measure as measure_pairs;
use self::timing::Timings;
use crate::{
    Effort, report,
    statistics::{median, percentile},
};

/// The measured programs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Programs<'a> {
    /// kni-agent.
    pub(crate) agent: &'a Path,
    /// The static binary of kni-cni; without it, the plugin is not measured.
    pub(crate) cni: Option<&'a Path>,
}

/// The arrival pattern of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// Sequential, with a pause between two pods.
    Spaced(u32, Duration),
    /// Sequential, without a pause.
    Sequence(u32),
    /// All at once.
    Burst(u32),
}

impl Pattern {
    fn pods(self) -> u32 {
        match self {
            Self::Spaced(pods, _) | Self::Sequence(pods) | Self::Burst(pods) => pods,
        }
    }

    fn title(self) -> String {
        match self {
            Self::Spaced(pods, pause) => format!("{pods}, one each {} ms", pause.as_millis()),
            Self::Sequence(pods) => format!("{pods} in a row"),
            Self::Burst(pods) => format!("{pods} at once"),
        }
    }
}

fn patterns(quick: bool) -> [Pattern; 4] {
    let pause = Duration::from_millis(200);
    if quick {
        [
            Pattern::Spaced(5, pause),
            Pattern::Sequence(5),
            Pattern::Burst(5),
            Pattern::Burst(10),
        ]
    } else {
        [
            Pattern::Spaced(40, pause),
            Pattern::Sequence(100),
            Pattern::Burst(30),
            Pattern::Burst(150),
        ]
    }
}

/// Measures all methods and patterns and prints the table.
pub(crate) fn measure(effort: Effort, programs: &Programs<'_>, json: &mut Map<String, Value>) -> Result<()> {
    let Programs { agent, cni } = *programs;
    let mut results = Vec::new();
    for (key, title, warm) in [("kni", "KNI", None), ("kni_cold", "KNI, nothing kept warm", Some(0))] {
        let way = kni::Kni::start(agent, warm).with_context(|| title.to_owned())?;
        for pattern in patterns(effort.quick) {
            eprintln!("attach: {title}, {}", pattern.title());
            results.push((key, title, pattern, way.run(pattern).with_context(|| title.to_owned())?));
        }
    }
    let mut plugins = Vec::new();
    if let Some(program) = cni {
        plugins.push(("kni_cni", "kni-cni plugin", plugin::Plugin::kni(program, agent)?));
    }
    match plugin::Plugin::bridge()? {
        Some(bridge) => plugins.push(("bridge", "bridge CNI plugin", bridge)),
        None => eprintln!("attach: no bridge plugin in {}: left out", plugin::PLUGINS),
    }
    // Alternating, so that both run under the same conditions.
    for pattern in patterns(effort.quick) {
        for (key, title, plugin) in &plugins {
            eprintln!("attach: {title}, {}", pattern.title());
            results.push((*key, *title, pattern, plugin.run(pattern).context(*title)?));
        }
    }
    show(&results, json);
    for (key, title, plugin) in &plugins {
        if let Some(bytes) = plugin.peak_memory()? {
            eprintln!("{title}: the agent has had at most {} kB of memory", bytes / 1000);
            json.insert(format!("{key}_agent_peak_bytes"), bytes.into());
        }
    }
    Ok(())
}

/// Measures the server of KNI on a socket and prints the table.
pub(crate) fn measure_server(effort: Effort, socket: &Path, json: &mut Map<String, Value>) -> Result<()> {
    let server = kni::Kni::connect(socket)?;
    let mut results = Vec::new();
    for pattern in patterns(effort.quick) {
        eprintln!("attach: {}, {}", socket.display(), pattern.title());
        results.push(("server", "server", pattern, server.run(pattern)?));
    }
    show(&results, json);
    Ok(())
}

fn show(results: &[(&'static str, &'static str, Pattern, Timings)], json: &mut Map<String, Value>) {
    let header = [
        "milliseconds",
        "pods",
        "attach p50",
        "p99",
        "all after",
        "detach p50",
        "p99",
        "all after",
        "idle call p50",
    ];
    let mut rows = Vec::new();
    let mut all = Vec::new();
    for (key, title, pattern, timings) in results {
        let mut row = vec![(*title).to_owned(), pattern.title()];
        for (values, total) in [
            (&timings.attach, timings.all_attached),
            (&timings.detach, timings.all_detached),
        ] {
            row.extend([median(values), percentile(values, 0.99)].map(|value| format!("{value:.2}")));
            row.push(format!("{total:.0}"));
        }
        row.push(match timings.idle_call.as_slice() {
            [] => String::new(),
            calls => format!("{:.2}", median(calls)),
        });
        rows.push(row);
        all.push(json!({
            "way": key,
            "pattern": pattern.title(),
            "pods": pattern.pods(),
            "create_ms": timings.create,
            "create_p50_ms": median(&timings.create),
            "attach_ms": timings.attach,
            "attach_p50_ms": median(&timings.attach),
            "attach_p99_ms": percentile(&timings.attach, 0.99),
            "all_attached_ms": timings.all_attached,
            "delete_ms": timings.delete,
            "delete_p50_ms": median(&timings.delete),
            "detach_ms": timings.detach,
            "detach_p50_ms": median(&timings.detach),
            "detach_p99_ms": percentile(&timings.detach, 0.99),
            "all_detached_ms": timings.all_detached,
            "idle_call_ms": timings.idle_call,
        }));
    }
    report::heading(
        "Attaching pods (KNI: CreateNetwork + AttachInterface, DetachInterface + DeleteNetwork, namespaces included;\n\
         plugin: ADD and DEL, executed as a container runtime does, namespaces made before and not counted)",
    );
    report::table(&header, &rows);
    json.insert("attach".into(), Value::Array(all));
}
