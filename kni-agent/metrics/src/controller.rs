//! Defines and writes the page of kni-controller: whether it acts, its controllers, and the free blocks of networks.

use std::fmt;

use kni_model::durations::Durations;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, NoLabelSet},
    metrics::MetricType,
    registry::Unit,
};

use super::{
    control_plane::ControlPlane,
    text::{Out, encoded},
};

/// All values of the page of one replica.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ControllerState {
    /// Whether this replica holds the Lease.
    pub leads: bool,
    /// Requests and watches since the start. Objects are cached while the replica holds the Lease.
    pub control_plane: ControlPlane,
    /// Its controllers; empty before it holds the Lease for the first time.
    pub controllers: Vec<ControllerUse>,
    /// Blocks that no node has, by network and family; empty while the replica does not hold the Lease.
    pub free_blocks: Vec<FreeBlocks>,
}

/// The work of one controller since the start.
#[derive(Debug, Clone, PartialEq)]
pub struct ControllerUse {
    /// Name.
    pub controller: &'static str,
    /// How long it took to compare the objects with the desired ones.
    pub reconcile: Durations,
    /// Writes that failed, and are repeated.
    pub failures: u64,
}

/// Blocks of a network that no node has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FreeBlocks {
    /// Network.
    pub network: String,
    /// `ipv4` or `ipv6`.
    pub family: &'static str,
    /// Blocks.
    pub free: u64,
}

impl ControllerState {
    /// The page in the `OpenMetrics` text format.
    pub fn page(self) -> Result<String, fmt::Error> {
        encoded(Box::new(self))
    }
}

impl Collector for ControllerState {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        let help = "Whether this replica of kni-controller holds the Lease";
        out.value("kni_leader", help, u64::from(self.leads))?;
        out.control_plane(&self.control_plane)?;
        out.controllers(&self.controllers)?;
        let free = self.free_blocks.iter();
        let rows = free.map(|row| ([("network", row.network.as_str()), ("family", row.family)], row.free));
        out.gauges("kni_address_blocks_free", "Address blocks that no node has", rows)
    }
}

impl Out<'_> {
    fn value(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        metric.encode_gauge(&value)
    }

    fn controllers(&mut self, controllers: &[ControllerUse]) -> fmt::Result {
        let unit = Unit::Seconds;
        let help = "Time in which a controller compares the objects with the desired ones";
        let kind = MetricType::Histogram;
        let mut family = self.0.encode_descriptor("kni_reconcile", help, Some(&unit), kind)?;
        for row in controllers {
            let buckets: Vec<(f64, u64)> = row.reconcile.buckets().collect();
            let labels = [("controller", row.controller)];
            let mut metric = family.encode_family(&labels)?;
            let (sum, count) = (row.reconcile.sum_seconds(), row.reconcile.count());
            metric.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        let rows = controllers
            .iter()
            .map(|row| ([("controller", row.controller)], row.failures));
        let help = "Writes of a controller that failed, and are repeated";
        self.counters("kni_reconcile_failures", help, rows)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{RequestUse, WatchUse};

    #[test]
    fn the_page_has_the_state_of_the_replica() {
        let mut reconcile = Durations::default();
        reconcile.observe(Duration::from_micros(700));
        let state = ControllerState {
            leads: true,
            control_plane: ControlPlane {
                requests: vec![RequestUse {
                    verb: "patch",
                    resource: "podnetworks/status".to_owned(),
                    code: "409".to_owned(),
                    count: 3,
                }],
                watches: vec![WatchUse {
                    kind: "pods",
                    last_event: Some(Duration::from_millis(1500)),
                    restarts: 2,
                }],
                objects: vec![("pods", 30)],
                tasks: Vec::new(),
            },
            controllers: vec![ControllerUse {
                controller: "taints",
                reconcile,
                failures: 4,
            }],
            free_blocks: vec![FreeBlocks {
                network: "blue".to_owned(),
                family: "ipv4",
                free: 1022,
            }],
        };
        let page = state.page().unwrap();
        for line in [
            "# TYPE kni_leader gauge",
            "kni_leader 1",
            "kni_api_requests_total{verb=\"patch\",kind=\"podnetworks/status\",code=\"409\"} 3",
            "kni_api_conflicts_total{kind=\"podnetworks/status\"} 3",
            "kni_watch_last_event_seconds{kind=\"pods\"} 1.5",
            "kni_watch_restarts_total{kind=\"pods\"} 2",
            "kni_objects{kind=\"pods\"} 30",
            "# TYPE kni_reconcile_seconds histogram",
            "kni_reconcile_seconds_count{controller=\"taints\"} 1",
            "kni_reconcile_seconds_bucket{le=\"0.001\",controller=\"taints\"} 1",
            "kni_reconcile_failures_total{controller=\"taints\"} 4",
            "kni_address_blocks_free{network=\"blue\",family=\"ipv4\"} 1022",
            "# EOF",
        ] {
            assert!(page.lines().any(|have| have == line), "{line}\n{page}");
        }
        let page = ControllerState::default().page().unwrap();
        assert!(page.contains("kni_leader 0\n") && page.ends_with("# EOF\n"), "{page}");
    }
}
