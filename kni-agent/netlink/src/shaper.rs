//! Limits the rate at which an interface sends: a token bucket as its queueing discipline (`sch_tbf`).

use std::time::Duration;

use kni_model::Rate;
use netlink_packet_core::DefaultNla;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    tc::{TcAttribute, TcHandle, TcMessage, TcOption},
};

use super::{Netlink, Result, connection::Request, message::PUT};

/// Longest wait of a packet in the bucket: TCP notices the limit without much delay for other flows.
const LATENCY: Duration = Duration::from_millis(25);
/// Attributes of `sch_tbf` (`linux/pkt_sched.h`).
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;
const TCA_TBF_BURST: u16 = 6;
/// `TC_LINKLAYER_ETHERNET`: the kernel computes sizes itself and needs no table.
const LINKLAYER_ETHERNET: u8 = 1;
/// The handle of the discipline; any other value would also work.
const HANDLE: TcHandle = TcHandle { major: 1, minor: 0 };

impl Netlink {
    /// Limits the rate at which the interface sends, replacing an earlier limit. The limit is removed with the
    /// interface.
    pub async fn shape(&self, ifindex: u32, rate: &Rate) -> Result<()> {
        let place = self.place("limit the rate").interface(format!("#{ifindex}"));
        let message = RouteNetlinkMessage::NewQueueDiscipline(discipline(ifindex, rate));
        self.apply(vec![Request::new(place, message, PUT)]).await
    }
}

fn discipline(ifindex: u32, rate: &Rate) -> TcMessage {
    let mut message = TcMessage::default();
    message.header.family = AddressFamily::Unspec;
    message.header.index = i32::try_from(ifindex).unwrap_or_default();
    message.header.handle = HANDLE;
    message.header.parent = TcHandle::ROOT;
    let option = |kind, value: Vec<u8>| TcOption::Other(DefaultNla::new(kind, value));
    message.attributes = vec![
        TcAttribute::Kind("tbf".to_owned()),
        TcAttribute::Options(vec![
            option(TCA_TBF_PARMS, parameters(rate)),
            option(TCA_TBF_BURST, rate.burst_bytes().to_ne_bytes().to_vec()),
            option(TCA_TBF_RATE64, rate.bytes_per_second().to_ne_bytes().to_vec()),
        ]),
    ];
    message
}

/// `struct tc_tbf_qopt`: two of `struct tc_ratespec` (`cell_log`, `linklayer`, `overhead`, `cell_align`, `mpu`,
/// `rate`), then limit, buffer and mtu. Separate attributes for buffer and rate take precedence.
fn parameters(rate: &Rate) -> Vec<u8> {
    let bytes_per_second = rate.bytes_per_second();
    let waiting = u128::from(bytes_per_second) * LATENCY.as_millis() / 1000;
    let limit = u32::try_from(waiting)
        .unwrap_or(u32::MAX)
        .saturating_add(rate.burst_bytes());
    let narrow = u32::try_from(bytes_per_second).unwrap_or(u32::MAX);
    let mut bytes = vec![0, LINKLAYER_ETHERNET, 0, 0, 0, 0, 0, 0];
    bytes.extend(narrow.to_ne_bytes());
    // No peak rate.
    bytes.extend([0; 12]);
    bytes.extend(limit.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parameters_have_the_kernels_layout() {
        let rate = Rate {
            bits_per_second: 8_000_000,
            burst_bits: 0,
        };
        let bytes = parameters(&rate);
        assert_eq!(bytes.len(), 36);
        assert_eq!(bytes[8..12], 1_000_000_u32.to_ne_bytes());
        assert_eq!(bytes[24..28], (25_000 + 125_000_u32).to_ne_bytes());
    }
}
