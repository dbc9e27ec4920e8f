//! Defines the bandwidth limits of a pod.

use serde::{Deserialize, Serialize};

/// Smallest burst in bytes: one packet of segmentation offload, which the kernel would have to split otherwise.
const MIN_BURST: u64 = 64 * 1024;
/// The largest burst is the rate divided by this: the default burst of runtimes is hundreds of megabytes, which would
/// exempt most connections from the limit.
const BURST_DIVISOR: u64 = 8;

/// The maximum rates at which a pod may send and receive; `None` means no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Traffic to the pod ("ingress").
    pub to_pod: Option<Rate>,
    /// Traffic from the pod ("egress").
    pub from_pod: Option<Rate>,
}

impl Bandwidth {
    /// Whether there is a limit.
    pub const fn is_bounded(&self) -> bool {
        self.to_pod.is_some() || self.from_pod.is_some()
    }
}

/// A rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// Bits per second, Ethernet headers included; not 0.
    pub bits_per_second: u64,
    /// Burst in bits; 0 for the default.
    pub burst_bits: u64,
}

impl Rate {
    /// Bytes per second.
    pub const fn bytes_per_second(&self) -> u64 {
        self.bits_per_second.div_ceil(8)
    }

    /// Burst in bytes: the requested one, at least 64 KiB, at most the rate of an eighth of a second.
    pub fn burst_bytes(&self) -> u32 {
        let most = (self.bytes_per_second() / BURST_DIVISOR).max(MIN_BURST);
        let burst = match self.burst_bits / 8 {
            0 => most,
            bytes => bytes.clamp(MIN_BURST, most),
        };
        u32::try_from(burst).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_stay_within_their_limits() {
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
