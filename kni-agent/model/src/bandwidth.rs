//! How fast a pod may send and receive.

use serde::{Deserialize, Serialize};

/// Least bytes at once: one packet of segmentation offload, which the kernel would have to split otherwise.
const MIN_BURST: u64 = 64 * 1024;
/// Longest time that a pod may be ahead of its rate: what runtimes ask for where a pod says nothing is a burst of
/// hundreds of megabytes, which would leave most connections unbounded.
const MAX_AHEAD: u64 = 8;

/// How fast a pod may send and receive; without a rate, as fast as it can.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// What reaches the pod ("ingress").
    pub to_pod: Option<Rate>,
    /// What the pod sends ("egress").
    pub from_pod: Option<Rate>,
}

impl Bandwidth {
    /// Whether it bounds anything.
    pub const fn is_bounded(&self) -> bool {
        self.to_pod.is_some() || self.from_pod.is_some()
    }
}

/// A rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// Bits per second, Ethernet headers included; not 0.
    pub bits_per_second: u64,
    /// Bits that may be sent at once after a pause; 0 for a default.
    pub burst_bits: u64,
}

impl Rate {
    /// Bytes per second.
    pub const fn bytes_per_second(&self) -> u64 {
        self.bits_per_second.div_ceil(8)
    }

    /// Bytes that may be sent at once: what was asked for, at least 64 KiB, at most what the rate gives in an eighth of a
    /// second.
    pub fn burst_bytes(&self) -> u32 {
        let most = (self.bytes_per_second() / MAX_AHEAD).max(MIN_BURST);
        let wanted = match self.burst_bits / 8 {
            0 => most,
            bytes => bytes.clamp(MIN_BURST, most),
        };
        u32::try_from(wanted).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_stay_within_what_makes_a_rate() {
        let burst = |bits_per_second, burst_bits| {
            Rate {
                bits_per_second,
                burst_bits,
            }
            .burst_bytes()
        };
        assert_eq!(burst(1_000, 0), 64 * 1024);
        assert_eq!(burst(10_000_000, 0), 156_250);
        assert_eq!(burst(10_000_000, 8), 64 * 1024);
        assert_eq!(burst(10_000_000, 800_000), 100_000);
        assert_eq!(burst(10_000_000, u64::from(u32::MAX)), 156_250);
        assert_eq!(burst(u64::MAX, u64::MAX), u32::MAX);
    }
}
