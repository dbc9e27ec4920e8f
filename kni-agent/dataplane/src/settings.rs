//! Builds the row of `CONFIG`, the programs' settings of the node.

use std::time::Duration;

use kni_common::{config::Config, counter::EVENT_WINDOW_SHIFT};

use super::clock::Ticks;

/// Settings of the node for all its endpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeConfig {
    /// Flow events per second that one endpoint may send on each CPU; 0 for none. Rounded up to whole events per window.
    pub flow_events_per_second: u32,
    /// Flows that one endpoint may have; 0 for no limit.
    pub flows_per_endpoint: u32,
    /// How long flows live without a packet.
    pub lifetimes: FlowLifetimes,
}

/// How long flows live without a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowLifetimes {
    /// TCP: until the first reply.
    pub tcp_new: Duration,
    /// TCP: from then on.
    pub tcp_established: Duration,
    /// TCP: after RST, or FIN of both sides.
    pub tcp_closing: Duration,
    /// UDP, ICMP and other protocols: until the first reply.
    pub other_new: Duration,
    /// UDP: from then on.
    pub udp_established: Duration,
    /// SCTP: from the first reply on.
    pub sctp_established: Duration,
    /// ICMP and other protocols: from then on.
    pub other_established: Duration,
}

impl Default for FlowLifetimes {
    /// The minima of RFC 5382 (TCP), RFC 4787 (UDP) and RFC 5508 (ICMP) for translators, and netfilter's values where the
    /// RFCs have none.
    fn default() -> Self {
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        Self {
            tcp_new: minutes(2),
            tcp_established: minutes(2 * 60 + 4),
            tcp_closing: Duration::from_secs(10),
            other_new: Duration::from_secs(30),
            udp_established: minutes(5),
            sctp_established: minutes(2 * 60 + 4),
            other_established: minutes(1),
        }
    }
}

impl NodeConfig {
    /// The row, in ticks of this kernel. `uplink` is that of the current row.
    pub(super) fn row(&self, ticks: Ticks, uplink: u32) -> Config {
        let FlowLifetimes {
            tcp_new,
            tcp_established,
            tcp_closing,
            other_new,
            udp_established,
            sctp_established,
            other_established,
        } = self.lifetimes;
        let window = u64::from(self.flow_events_per_second) << EVENT_WINDOW_SHIFT;
        Config {
            hz: ticks.hz(),
            flow_events: u32::try_from(window.div_ceil(ticks.hz().into())).unwrap_or(u32::MAX),
            flows_per_endpoint: self.flows_per_endpoint,
            tcp_new: ticks.count(tcp_new),
            tcp_established: ticks.count(tcp_established),
            tcp_closing: ticks.count(tcp_closing),
            other_new: ticks.count(other_new),
            udp_established: ticks.count(udp_established),
            sctp_established: ticks.count(sctp_established),
            other_established: ticks.count(other_established),
            uplink,
        }
    }
}

impl Default for NodeConfig {
    /// Flow events enabled, a share of a default flow table for each endpoint.
    fn default() -> Self {
        Self {
            flow_events_per_second: 1000,
            flows_per_endpoint: 16_384,
            lifetimes: FlowLifetimes::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_rates_become_ticks_and_windows() {
        let config = NodeConfig {
            flow_events_per_second: 1000,
            ..NodeConfig::default()
        };
        let row = config.row(Ticks::with_hz(250), 7);
        assert_eq!((row.hz, row.tcp_closing, row.udp_established), (250, 2500, 75_000));
        assert_eq!(row.uplink, 7);
        // 64 ticks of 4 ms: 256 events in each window make 1000 per second.
        assert_eq!(row.flow_events, 256);
        // A small rate is not rounded to zero, and zero stays zero.
        let rate = |flow_events_per_second| NodeConfig {
            flow_events_per_second,
            ..NodeConfig::default()
        };
        assert_eq!(rate(1).row(Ticks::with_hz(1000), 0).flow_events, 1);
        assert_eq!(rate(0).row(Ticks::with_hz(1000), 0).flow_events, 0);
    }
}
