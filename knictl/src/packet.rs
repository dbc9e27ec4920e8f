//! Formats packets for people.

use crate::table::cell;

/// `address:port`, `[address]:port`, or the address alone where the packet has no ports.
pub(crate) fn socket(address: &str, port: Option<u32>) -> String {
    let address = cell(address);
    match (port, address.contains(':')) {
        (None, _) => address,
        (Some(port), false) => format!("{address}:{port}"),
        (Some(port), true) => format!("[{address}]:{port}"),
    }
}

/// Whether packets of the transport have ports. Those of later fragments are unknown: both are 0.
pub(crate) fn has_ports(protocol: &str, ports: (u32, u32)) -> bool {
    matches!(protocol, "TCP" | "UDP" | "SCTP") && ports != (0, 0)
}

/// RFC 3339 with microseconds, UTC.
pub(crate) fn time(nanoseconds: u64) -> String {
    // 2^64 nanoseconds end in the year 2554, which the calendar supports.
    let time = jiff::Timestamp::from_nanosecond(nanoseconds.into()).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
    format!("{time:.6}")
}
