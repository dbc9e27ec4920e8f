//! Reads which ports the kernel gives to sockets of the node that ask for none.

use std::{fs, io, ops::RangeInclusive, path::Path};

/// The ports for sockets that ask for none: `net.ipv4.ip_local_port_range`, which holds for both families, without
/// `net.ipv4.ip_local_reserved_ports`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalPorts {
    range: RangeInclusive<u16>,
    reserved: Vec<RangeInclusive<u16>>,
}

impl LocalPorts {
    /// Reads them in the network namespace of the calling thread. Fails if the files cannot be read or are not lists of
    /// ports.
    pub fn read() -> io::Result<Self> {
        let folder = Path::new("/proc/sys/net/ipv4");
        let range = fs::read_to_string(folder.join("ip_local_port_range"))?;
        let reserved = fs::read_to_string(folder.join("ip_local_reserved_ports"))?;
        Self::parse(&range, &reserved).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("ports {range:?}, reserved {reserved:?}"),
            )
        })
    }

    fn parse(range: &str, reserved: &str) -> Option<Self> {
        let mut ends = range.split_whitespace().map(|text| text.parse::<u16>().ok());
        let range = ends.next()??..=ends.next()??;
        let part = |text: &str| {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            Some(first.parse().ok()?..=last.parse().ok()?)
        };
        let parts = reserved.trim().split(',').filter(|text| !text.is_empty());
        Some(Self {
            range,
            reserved: parts.map(part).collect::<Option<_>>()?,
        })
    }

    /// The number of these ports that are in `ports`, too.
    pub fn shared_with(&self, ports: &RangeInclusive<u16>) -> u32 {
        let is_reserved = |port: &u16| self.reserved.iter().any(|part| part.contains(port));
        let shared = ports
            .clone()
            .filter(|port| self.range.contains(port) && !is_reserved(port));
        shared.fold(0, |count, _port| count + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_ports_are_not_shared() {
        let shared = |range: &str, reserved: &str| {
            LocalPorts::parse(range, reserved)
                .unwrap()
                .shared_with(&(61_000..=65_535))
        };
        assert_eq!(shared("32768\t60999\n", "\n"), 0);
        assert_eq!(shared("1024\t65535\n", "\n"), 4536);
        assert_eq!(shared("1024\t65535\n", "61000-65535\n"), 0);
        assert_eq!(shared("1024\t61009\n", "8080,61000-61003,61005\n"), 5);
        assert_eq!(LocalPorts::parse("1024", ""), None);
        assert_eq!(LocalPorts::parse("1024 2048", "7-x"), None);
    }
}
