//! Builds the row of `CONFIG`, the programs' settings of the node.

use std::time::Duration;

use kni_common::{config::Config, counter::EVENT_WINDOW_SHIFT};

use super::clock::Ticks;

/// Settings of the node for all its endpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeConfig {
    /// Flow events per second that one endpoint may send on each CPU; 0 for none. Rounded up to whole events per
    /// window.
    pub flow_events_per_second: u32,
    /// Connections that one endpoint may open, and flows that may be opened to it from outside of the node, each; twice
    /// as many flows of other protocols; 0 for no limit.
    pub flows_per_endpoint: u32,
    /// How long flows live without a packet.
    pub lifetimes: FlowLifetimes,
}

/// How long flows live without a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowLifetimes {
    /// TCP: until the opener continues after the reply.
    pub tcp_new: Duration,
    /// TCP: from then on.
    pub tcp_established: Duration,
    /// TCP: after FIN of both sides, or after an RST from outside of the node.
    pub tcp_closing: Duration,
    /// UDP, SCTP, ICMP and other protocols: until the first reply.
    pub other_new: Duration,
    /// UDP: after a reply. A question and its answer end here.
    pub udp_replied: Duration,
    /// UDP: once the opener has continued for a while after a reply.
    pub udp_established: Duration,
    /// SCTP: once the opener has continued after the reply.
    pub sctp_established: Duration,
    /// ICMP and other protocols: after a reply.
    pub other_established: Duration,
}

impl Default for FlowLifetimes {
    /// The steps of netfilter's connection tracking, shorter where a row is soon replaced by the next packet, and the
    /// minima of RFC 5382 (TCP), RFC 4787 (UDP streams) and RFC 5508 (ICMP) for translators.
    fn default() -> Self {
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        Self {
            tcp_new: Duration::from_secs(30),
            tcp_established: minutes(2 * 60 + 4),
            tcp_closing: Duration::from_secs(10),
            other_new: Duration::from_secs(30),
            udp_replied: Duration::from_secs(10),
            udp_established: minutes(5),
            sctp_established: minutes(2 * 60 + 4),
            other_established: minutes(1),
        }
    }
}

impl NodeConfig {
    /// The row, in ticks of this kernel. The uplink is that of the current row, and the mark too, which packets on
    /// their way have: it is made once per boot.
    pub(super) fn row(&self, ticks: Ticks, current: Config) -> Config {
        let FlowLifetimes {
            tcp_new,
            tcp_established,
            tcp_closing,
            other_new,
            udp_replied,
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
            udp_replied: ticks.count(udp_replied),
            udp_established: ticks.count(udp_established),
            sctp_established: ticks.count(sctp_established),
            other_established: ticks.count(other_established),
            uplink: current.uplink,
            evaluated_mark: if current.evaluated_mark == 0 || current.evaluated_mark & MARKS_OF_OTHERS != 0 {
                random_mark()
            } else {
                current.evaluated_mark
            },
        }
    }
}

/// Bits of marks with a meaning in Kubernetes: kube-proxy and the kubelet masquerade packets with the first and drop
/// those with the second. Packets in the tunnel pass their rules with our mark.
const MARKS_OF_OTHERS: u32 = 0x4000 | 0x8000;

/// A mark that no process can know, not 0. Without the kernel's random numbers, before they are ready, the clock has to
/// do.
fn random_mark() -> u32 {
    let mut bytes = [0_u8; 4];
    // SAFETY: `bytes` is ours to write, with its own length.
    let read = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
    if usize::try_from(read) != Ok(bytes.len()) {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        bytes = now.unwrap_or_default().subsec_nanos().to_ne_bytes();
    }
    (u32::from_ne_bytes(bytes) & !MARKS_OF_OTHERS).max(1)
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
        let current = Config {
            uplink: 7,
            ..Config::default()
        };
        let row = config.row(Ticks::with_hz(250), current);
        assert_eq!((row.hz, row.tcp_closing, row.udp_established), (250, 2500, 75_000));
        assert_eq!(row.uplink, 7);
        // 64 ticks of 4 ms: 256 events in each window make 1000 per second.
        assert_eq!(row.flow_events, 256);
        // A small rate is not rounded to zero, and zero stays zero.
        let rate = |flow_events_per_second| NodeConfig {
            flow_events_per_second,
            ..NodeConfig::default()
        };
        assert_eq!(rate(1).row(Ticks::with_hz(1000), current).flow_events, 1);
        assert_eq!(rate(0).row(Ticks::with_hz(1000), current).flow_events, 0);
    }

    #[test]
    fn the_mark_of_judged_packets_is_made_once() {
        let row = |current| NodeConfig::default().row(Ticks::with_hz(250), current);
        let first = row(Config::default());
        assert_ne!(first.evaluated_mark, 0, "a packet without a mark has mark 0");
        assert_eq!(
            row(first).evaluated_mark,
            first.evaluated_mark,
            "packets on their way have it"
        );
        let others: std::collections::BTreeSet<u32> = (0..8).map(|_| row(Config::default()).evaluated_mark).collect();
        assert!(others.len() > 1, "{others:?}");
        assert!(others.iter().all(|mark| mark & MARKS_OF_OTHERS == 0), "{others:?}");
        let former = Config {
            evaluated_mark: 0x1234_c001,
            ..first
        };
        assert_eq!(row(former).evaluated_mark & MARKS_OF_OTHERS, 0);
    }
}
