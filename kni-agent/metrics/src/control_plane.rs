//! Defines and writes the metrics of the control plane: requests, watches, cached objects and background tasks.

use std::{collections::BTreeMap, fmt, time::Duration};

use prometheus_client::{metrics::MetricType, registry::Unit};

use super::text::Out;

/// The state of the control plane of one program; everything but the tasks is empty without a cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ControlPlane {
    /// Requests to the API server, by result.
    pub requests: Vec<RequestUse>,
    /// The watches.
    pub watches: Vec<WatchUse>,
    /// Cached objects by kind.
    pub objects: Vec<(&'static str, u64)>,
    /// The background tasks.
    pub tasks: Vec<TaskUse>,
}

/// Requests with one result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestUse {
    /// Verb of the API.
    pub verb: &'static str,
    /// Resource with its subresource, or `discovery`.
    pub resource: String,
    /// HTTP status, `timeout` or `error`.
    pub code: String,
    /// Requests.
    pub count: u64,
}

/// A watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchUse {
    /// Kind.
    pub kind: &'static str,
    /// Time since the last event; `None` before the first.
    pub last_event: Option<Duration>,
    /// Restarts after failures.
    pub restarts: u64,
}

/// A background task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskUse {
    /// Name.
    pub task: &'static str,
    /// Time since it last made progress, or waited for work.
    pub last_run: Duration,
}

impl Out<'_> {
    pub(super) fn control_plane(&mut self, state: &ControlPlane) -> fmt::Result {
        if !state.tasks.is_empty() {
            let help = "Time since a background task last made progress or waited for work";
            let rows = state.tasks.iter().map(|task| ([("task", task.task)], task.last_run));
            self.ages("kni_task_last_run", help, rows)?;
        }
        if state.watches.is_empty() && state.requests.is_empty() && state.objects.is_empty() {
            return Ok(());
        }
        let requests = state.requests.iter();
        let rows = requests.map(|row| {
            let labels = [
                ("verb", row.verb),
                ("kind", row.resource.as_str()),
                ("code", row.code.as_str()),
            ];
            (labels, row.count)
        });
        self.counters("kni_api_requests", "Requests to the API server", rows)?;
        let mut conflicts: BTreeMap<&str, u64> = BTreeMap::new();
        for row in state.requests.iter().filter(|row| row.code == "409") {
            *conflicts.entry(&row.resource).or_default() += row.count;
        }
        let rows = conflicts.iter().map(|(kind, count)| ([("kind", *kind)], *count));
        self.counters(
            "kni_api_conflicts",
            "Writes that the API server refused with a conflict",
            rows,
        )?;
        let events = state.watches.iter();
        let rows = events.filter_map(|watch| Some(([("kind", watch.kind)], watch.last_event?)));
        self.ages("kni_watch_last_event", "Time since the last event of a watch", rows)?;
        let rows = state
            .watches
            .iter()
            .map(|watch| ([("kind", watch.kind)], watch.restarts));
        self.counters(
            "kni_watch_restarts",
            "Failures of a watch, after which it started again",
            rows,
        )?;
        let rows = state.objects.iter().map(|(kind, count)| ([("kind", *kind)], *count));
        self.gauges("kni_objects", "Cached objects", rows)
    }

    fn ages<'a>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = ([(&'a str, &'a str); 1], Duration)>,
    ) -> fmt::Result {
        let unit = Unit::Seconds;
        let mut family = self.0.encode_descriptor(name, help, Some(&unit), MetricType::Gauge)?;
        for (labels, age) in rows {
            family.encode_family(&labels)?.encode_gauge(&age.as_secs_f64())?;
        }
        Ok(())
    }
}
