//! Defines identifiers, each as a separate type that only holds valid values.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// The name of the primary interface inside every pod.
pub const PRIMARY_IFNAME: &str = "eth0";
/// Prefix of the name of every host-side link.
pub const HOST_IFNAME_PREFIX: &str = "kni";

/// A value that is not a valid identifier, with its kind and the violated rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {value:?} is not valid: {rule}")]
pub struct InvalidId {
    /// The kind of identifier ("network name").
    pub kind: &'static str,
    /// The rejected value, shortened.
    pub value: String,
    /// The violated rule.
    pub rule: &'static str,
}

fn invalid(kind: &'static str, value: &str, rule: &'static str) -> InvalidId {
    InvalidId {
        kind,
        value: value.chars().take(128).collect(),
        rule,
    }
}

macro_rules! string_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $rule:literal, $check:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The identifier as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;
            fn from_str(value: &str) -> Result<Self, InvalidId> {
                let legal: fn(&str) -> bool = $check;
                if legal(value) { Ok(Self(value.to_owned())) } else { Err(invalid($kind, value, $rule)) }
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(value: String) -> Result<Self, InvalidId> {
                value.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

string_id!(
    /// The container runtime's identifier of a pod sandbox; the key of its attachments.
    SandboxId,
    "sandbox id",
    "1 to 253 printable ASCII characters without '/' or spaces",
    |v| (1..=253).contains(&v.len()) && v.bytes().all(|b| b.is_ascii_graphic() && b != b'/')
);

string_id!(
    /// The name of a `PodNetwork`: a DNS-1123 label.
    NetworkName,
    "network name",
    "a DNS-1123 label: 1 to 63 of a-z, 0-9 and '-', beginning and ending with a letter or digit",
    |v| {
        let alnum = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        (1..=63).contains(&v.len())
            && v.bytes().all(|b| alnum(&b) || b == b'-')
            && v.as_bytes().first().is_some_and(alnum)
            && v.as_bytes().last().is_some_and(alnum)
    }
);

string_id!(
    /// The name of a network interface, by the kernel's rule (`dev_valid_name`, net/core/dev.c): at most 15 bytes.
    IfName,
    "interface name",
    "1 to 15 of A-Z, a-z, 0-9, '.', '_' and '-', not '.' or '..', not 'lo' or 'all' or 'default'",
    |v| {
        (1..=15).contains(&v.len())
            && v.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
            && !matches!(v, "." | ".." | "lo" | "all" | "default")
    }
);

impl IfName {
    /// The name of a pod's primary interface.
    pub fn primary() -> Self {
        Self(PRIMARY_IFNAME.to_owned())
    }

    /// The name of the host end of an endpoint's veth pair. The endpoint's number makes it unique on the node; the tag
    /// distinguishes the pairs that a number has over time.
    pub fn host_end(endpoint: EndpointId, tag: u16) -> Self {
        let number = endpoint.0;
        // 15 bytes hold numbers of up to 7 digits with a tag, and all others without.
        Self(if number < 10_000_000 {
            format!("{HOST_IFNAME_PREFIX}{number}x{tag:04x}")
        } else {
            format!("{HOST_IFNAME_PREFIX}{number}")
        })
    }
}

/// The pod that a sandbox belongs to. Parts that the client did not send are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodRef {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID of the pod; kubelets send it as label `io.kubernetes.pod.uid` or as `podUID` in `extradata`.
    pub uid: String,
}

impl PodRef {
    /// A pod by its name alone, as most calls send it.
    pub fn named(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: String::new(),
        }
    }
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.namespace.is_empty(), self.name.is_empty()) {
            (true, true) => f.write_str("<unnamed>"),
            (true, false) => f.write_str(&self.name),
            (false, _) => write!(f, "{}/{}", self.namespace, self.name),
        }
    }
}

/// The number of a network in every key of the dataplane: 1 to 2^24 - 1, so that it also fits a VXLAN VNI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct NetworkId(u32);

impl NetworkId {
    /// Largest network id.
    pub const MAX: u32 = (1 << 24) - 1;

    /// The id as a number.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl TryFrom<u32> for NetworkId {
    type Error = InvalidId;
    fn try_from(value: u32) -> Result<Self, InvalidId> {
        if (1..=Self::MAX).contains(&value) {
            Ok(Self(value))
        } else {
            Err(invalid("network id", &value.to_string(), "1 to 16777215"))
        }
    }
}

impl From<NetworkId> for u32 {
    fn from(id: NetworkId) -> Self {
        id.0
    }
}

impl fmt::Display for NetworkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The dataplane's number of an attachment: index into the per-endpoint arrays. 0 is never an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EndpointId(pub u32);

impl fmt::Display for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A unicast Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddr(pub [u8; 6]);

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, byte) in self.0.iter().enumerate() {
            let separator = if position == 0 { "" } else { ":" };
            write!(f, "{separator}{byte:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for MacAddr {
    type Err = InvalidId;
    fn from_str(value: &str) -> Result<Self, InvalidId> {
        let refuse = || {
            invalid(
                "MAC address",
                value,
                "six hexadecimal bytes joined by ':', unicast and not all zero",
            )
        };
        let mut bytes = [0_u8; 6];
        let mut parts = value.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|p| p.len() == 2).ok_or_else(refuse)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_not_hex| refuse())?;
        }
        let [first, ..] = bytes;
        if parts.next().is_some() || first & 1 == 1 || bytes == [0; 6] {
            return Err(refuse());
        }
        Ok(Self(bytes))
    }
}

impl TryFrom<String> for MacAddr {
    type Error = InvalidId;
    fn try_from(value: String) -> Result<Self, InvalidId> {
        value.parse()
    }
}

impl From<MacAddr> for String {
    fn from(mac: MacAddr) -> Self {
        mac.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_that_the_agent_names_have_legal_names() {
        for number in [1, 9_999_999, 10_000_000, u32::MAX] {
            let name = IfName::host_end(EndpointId(number), u16::MAX);
            assert_eq!(name.as_str().parse(), Ok(name.clone()), "{number}");
            assert!(name.as_str().starts_with(HOST_IFNAME_PREFIX));
        }
        assert_eq!(IfName::host_end(EndpointId(7), 0xa).as_str(), "kni7x000a");
        assert_eq!(PRIMARY_IFNAME.parse(), Ok(IfName::primary()));
    }

    #[test]
    fn network_names_are_dns_labels() {
        for good in ["a", "blue", "net-1", "0x"] {
            assert!(good.parse::<NetworkName>().is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "Blue", "a.b", "a/b", &"x".repeat(64)] {
            assert!(bad.parse::<NetworkName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn interface_names_follow_the_kernel() {
        for good in ["eth0", "net1", "a.b-c_d", "abcdefghijklmno"] {
            assert!(good.parse::<IfName>().is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "lo", "a/b", "a b", "abcdefghijklmnop", "a:b", "a%d"] {
            assert!(bad.parse::<IfName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn mac_addresses_are_unicast() {
        assert_eq!("02:00:00:00:00:0a".parse::<MacAddr>().unwrap().0, [2, 0, 0, 0, 0, 10]);
        for bad in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:00:00",
            "01:00:00:00:00:00",
            "00:00:00:00:00:00",
            "2:0:0:0:0:1",
            "0g:00:00:00:00:00",
        ] {
            assert!(bad.parse::<MacAddr>().is_err(), "{bad}");
        }
    }

    #[test]
    fn network_ids_are_24_bits() {
        assert!(NetworkId::try_from(0).is_err());
        assert_eq!(NetworkId::try_from(1).unwrap().get(), 1);
        assert!(NetworkId::try_from(1 << 24).is_err());
    }
}
