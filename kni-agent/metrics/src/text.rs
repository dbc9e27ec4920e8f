//! Writes the metrics with names, labels and units in the text format of `OpenMetrics`.

use std::{collections::BTreeMap, fmt, time::Duration};

use kni_model::durations::Durations;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeCounterValue, MetricEncoder, NoLabelSet, text},
    metrics::MetricType,
    registry::{Registry, Unit},
};

use super::{Snapshot, totals::Series};

/// The contents of one page.
#[derive(Debug)]
pub(super) struct Facts {
    /// Packets and bytes since the agent's start.
    pub(super) traffic: BTreeMap<Series, (u64, u64)>,
    /// Likewise; `None` where it could not be read.
    pub(super) lost_events: Option<u64>,
    /// All other values, unchanged.
    pub(super) snapshot: Snapshot,
}

/// Writes the page.
pub(super) fn page(facts: Facts) -> Result<String, fmt::Error> {
    encoded(Box::new(facts))
}

/// The page of a collector alone.
pub(super) fn encoded(collector: Box<dyn Collector>) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(collector);
    let mut page = String::new();
    text::encode(&mut page, &registry)?;
    Ok(page)
}

type Label<'a> = (&'a str, &'a str);

impl Collector for Facts {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        let snapshot = &self.snapshot;
        out.build_info()?;
        out.errors(snapshot)?;
        if snapshot.traffic.is_ok() {
            out.traffic(&self.traffic)?;
        }
        if let Some(lost) = self.lost_events {
            let help = "Flow and drop events that were not sent to the agent: too many, or no room";
            out.counters("kni_flow_events_lost", help, [([], lost)])?;
        }
        if let Ok((ipv4, ipv6)) = snapshot.flows {
            let rows = [([("family", "ipv4")], ipv4), ([("family", "ipv6")], ipv6)];
            out.gauges("kni_flows", "Rows of the flow tables; a connection has two", rows)?;
        }
        out.policy(snapshot)?;
        out.maps(snapshot)?;
        out.programs(snapshot)?;
        out.rest(snapshot)?;
        out.control_plane(&snapshot.control_plane)
    }
}

pub(super) struct Out<'a>(pub(super) DescriptorEncoder<'a>);

impl Out<'_> {
    pub(super) fn counters<'a, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = ([Label<'a>; N], u64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in rows {
            // An empty label set would be written as `{}`, which not every parser accepts.
            if labels.is_empty() {
                counter(&mut family, &value)?;
            } else {
                counter(&mut family.encode_family(&labels)?, &value)?;
            }
        }
        Ok(())
    }

    pub(super) fn gauges<'a, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = ([Label<'a>; N], u64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in rows {
            // As above.
            if labels.is_empty() {
                family.encode_gauge(&value)?;
            } else {
                family.encode_family(&labels)?.encode_gauge(&value)?;
            }
        }
        Ok(())
    }

    /// The unit is seconds, and is appended to the name.
    fn histogram(&mut self, name: &str, help: &str, durations: &Durations) -> fmt::Result {
        let unit = Unit::Seconds;
        let mut metric = self
            .0
            .encode_descriptor(name, help, Some(&unit), MetricType::Histogram)?;
        let buckets: Vec<(f64, u64)> = durations.buckets().collect();
        metric.encode_histogram::<NoLabelSet>(durations.sum_seconds(), durations.count(), &buckets, None)
    }

    fn attach_steps(&mut self, steps: &[(&'static str, Durations)]) -> fmt::Result {
        if steps.is_empty() {
            return Ok(());
        }
        let (help, unit) = ("Time to attach a pod, by step", Unit::Seconds);
        let mut metric = self
            .0
            .encode_descriptor("kni_attach", help, Some(&unit), MetricType::Histogram)?;
        for (step, durations) in steps {
            let buckets: Vec<(f64, u64)> = durations.buckets().collect();
            let labels = [("step", *step)];
            let mut metric = metric.encode_family(&labels)?;
            metric.encode_histogram::<NoLabelSet>(durations.sum_seconds(), durations.count(), &buckets, None)?;
        }
        Ok(())
    }

    fn build_info(&mut self) -> fmt::Result {
        let labels = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("layout", &kni_common::layout::LAYOUT_VERSION.to_string()),
        ];
        let mut metric =
            self.0
                .encode_descriptor("kni_build", "The agent and its maps' layout", None, MetricType::Info)?;
        metric.encode_info(&labels)
    }

    fn errors(&mut self, snapshot: &Snapshot) -> fmt::Result {
        let help = "Whether a part of this page could not be read and is left out";
        let rows = parts(snapshot).map(|(part, failure)| {
            if let Some(reason) = failure {
                tracing::warn!(part, reason, "left out of the metrics");
            }
            ([("part", part)], u64::from(failure.is_some()))
        });
        self.gauges("kni_scrape_error", help, rows)
    }

    fn traffic(&mut self, traffic: &BTreeMap<Series, (u64, u64)>) -> fmt::Result {
        let packets = traffic
            .iter()
            .map(|(series, (packets, _))| (by_verdict(series), *packets));
        self.counters("kni_packets", "Packets by what was decided about them", packets)?;
        let bytes = traffic.iter().map(|(series, (_, bytes))| (by_verdict(series), *bytes));
        self.counters(
            "kni_bytes",
            "Bytes of these packets, from the Ethernet header on",
            bytes,
        )?;
        let drops = traffic.iter().filter(|((_, _, verdict), _)| verdict.is_drop());
        let drops = drops.map(|((network, direction, reason), (packets, _))| {
            let labels = [
                ("network", network.as_str()),
                ("direction", direction.as_str()),
                ("reason", reason.as_str()),
            ];
            (labels, *packets)
        });
        self.counters("kni_drops", "Dropped packets", drops)
    }

    fn policy(&mut self, snapshot: &Snapshot) -> fmt::Result {
        let Ok(policy) = &snapshot.policy else {
            return Ok(());
        };
        let rows = policy.rows.iter().map(|(table, rows)| ([("table", *table)], *rows));
        self.gauges("kni_policy_rows", "Rows of the policy tables", rows)?;
        let help = "Time to apply a change of policies, pods or services";
        self.histogram("kni_policy_sync", help, &policy.sync)?;
        let help = "Changes of policies, pods or services that could not be applied at once";
        self.counters("kni_policy_sync_failures", help, [([], policy.failures)])
    }

    fn maps(&mut self, snapshot: &Snapshot) -> fmt::Result {
        let Ok(maps) = &snapshot.maps else { return Ok(()) };
        let entries = maps.iter().map(|map| ([("map", map.name.as_str())], map.entries));
        self.gauges("kni_map_entries", "Rows in use", entries)?;
        let capacity = maps.iter().map(|map| ([("map", map.name.as_str())], map.max_entries));
        self.gauges("kni_map_max_entries", "Rows that fit", capacity)
    }

    fn programs(&mut self, snapshot: &Snapshot) -> fmt::Result {
        let Ok(programs) = &snapshot.programs else {
            return Ok(());
        };
        let runs = programs
            .iter()
            .map(|program| ([("program", program.name.as_str())], program.runs));
        self.counters("kni_program_runs", "Runs that the kernel measured", runs)?;
        let unit = Unit::Seconds;
        let help = "Time in the runs that the kernel measured";
        let kind = MetricType::Counter;
        let mut family = self.0.encode_descriptor("kni_program_run", help, Some(&unit), kind)?;
        for program in programs {
            let seconds = Duration::from_nanos(program.run_ns).as_secs_f64();
            let labels = [("program", program.name.as_str())];
            counter(&mut family.encode_family(&labels)?, &seconds)?;
        }
        Ok(())
    }

    fn rest(&mut self, snapshot: &Snapshot) -> fmt::Result {
        if let Ok(ports) = &snapshot.masquerade {
            let rows = ports.iter().map(|ports| {
                let labels = [("family", ports.family), ("protocol", ports.protocol)];
                (labels, ports.used)
            });
            self.gauges("kni_masquerade_ports", "Ports in use for masquerading", rows)?;
        }
        if let Ok(endpoints) = &snapshot.endpoints {
            let rows = endpoints
                .iter()
                .map(|(network, count)| ([("network", network.as_str())], *count));
            self.gauges("kni_endpoints", "Pod interfaces", rows)?;
        }
        let shared = [([], snapshot.state.shared_ports)];
        let help = "Ports for masquerading that the kernel gives to sockets of the node, too";
        self.gauges("kni_masquerade_ports_shared", help, shared)?;
        let problems = snapshot.state.problems.iter();
        let problems = problems.map(|(problem, count)| ([("problem", *problem)], *count));
        self.gauges("kni_state_problems", "Problems of the agent's own state", problems)?;
        let repairs = snapshot.state.repairs.iter();
        let repairs = repairs.map(|(object, count)| ([("object", *object)], *count));
        self.counters("kni_repairs", "Objects that other processes took away", repairs)?;
        let early = [([], snapshot.state.early_attaches)];
        let help = "Pods that were attached before the node knew what other nodes have in their networks";
        self.counters("kni_attach_early", help, early)?;
        let unknown = snapshot.state.unknown_extradata.iter();
        let unknown = unknown.map(|(method, count)| ([("method", *method)], *count));
        let help = "Entries of extradata with a key that the agent does not know";
        self.counters("kni_unknown_extradata", help, unknown)?;
        snapshot
            .attach
            .as_ref()
            .map_or(Ok(()), |steps| self.attach_steps(steps))
    }
}

fn by_verdict((network, direction, verdict): &Series) -> [Label<'_>; 3] {
    [
        ("network", network.as_str()),
        ("direction", direction.as_str()),
        ("verdict", verdict.as_str()),
    ]
}

fn counter(metric: &mut MetricEncoder<'_>, value: &impl EncodeCounterValue) -> fmt::Result {
    metric.encode_counter::<NoLabelSet, _, f64>(value, None)
}

/// The name and the error of every part.
fn parts(snapshot: &Snapshot) -> [(&'static str, Option<&String>); 9] {
    let Snapshot {
        traffic,
        flows,
        lost_events,
        policy,
        maps,
        masquerade,
        programs,
        endpoints,
        attach,
        // Read from memory.
        state: _,
        control_plane: _,
    } = snapshot;
    [
        ("traffic", traffic.as_ref().err()),
        ("flows", flows.as_ref().err()),
        ("lost_events", lost_events.as_ref().err()),
        ("policy", policy.as_ref().err()),
        ("maps", maps.as_ref().err()),
        ("masquerade", masquerade.as_ref().err()),
        ("programs", programs.as_ref().err()),
        ("endpoints", endpoints.as_ref().err()),
        ("attach", attach.as_ref().err()),
    ]
}
