//! Rules of kinds of text: ranges, addresses, names, labels.

use kube::core::Rule;

use super::rule;

/// Ranges no address of a pod, a service or a host lies in.
const RESERVED: &str = "['0.0.0.0/8', '127.0.0.0/8', '169.254.0.0/16', '224.0.0.0/4', '255.255.255.255/32', '::/64', \
                        'fe80::/10', 'ff00::/8']";
const RESERVED_ADVICE: &str = "lies in a range that is reserved: choose one outside 0.0.0.0/8, 127.0.0.0/8, \
                               169.254.0.0/16, 224.0.0.0/4, 255.255.255.255/32, ::/64, fe80::/10 and ff00::/8";

/// A range without host bits.
pub(crate) fn cidr() -> Vec<Rule> {
    vec![
        rule(
            "isCIDR(self)",
            "is not a range: write it in CIDR notation, such as 10.10.0.0/16 or fd10::/64",
        ),
        rule(
            "!isCIDR(self) || cidr(self) == cidr(self).masked()",
            "has host bits set: write the first address of the range, such as 10.10.0.0/16 instead of 10.10.1.2/16",
        ),
    ]
}

/// The additional rules for a range in [`cidr`] notation whose addresses pods or services have.
pub(crate) fn subnet() -> Vec<Rule> {
    vec![
        rule(
            "!isCIDR(self) || (cidr(self).ip().family() == 4 ? cidr(self).prefixLength() >= 8 && \
             cidr(self).prefixLength() <= 30 : cidr(self).prefixLength() >= 16 && cidr(self).prefixLength() <= 126)",
            "is too large or too small: choose a prefix length of 8 to 30 for IPv4, of 16 to 126 for IPv6",
        ),
        rule(
            &format!("!isCIDR(self) || {RESERVED}.all(r, !cidr(r).containsCIDR(self) && !cidr(self).containsCIDR(r))"),
            RESERVED_ADVICE,
        ),
    ]
}

/// An address that a host may have.
pub(crate) fn host_address() -> Vec<Rule> {
    vec![
        rule(
            "isIP(self)",
            "is not an address: write it without prefix length, such as 10.10.0.7 or fd10::7",
        ),
        rule(
            &format!("!isIP(self) || {RESERVED}.all(r, !cidr(r).containsIP(self))"),
            RESERVED_ADVICE,
        ),
    ]
}

/// An interface name, by the kernel's rule.
pub(crate) fn interface_name() -> Vec<Rule> {
    vec![
        rule(
            "self.matches('^[A-Za-z0-9._-]{1,15}$')",
            "is not an interface name: write 1 to 15 of A-Z, a-z, 0-9, '.', '_' and '-'",
        ),
        rule(
            "!(self in ['.', '..', 'lo', 'all', 'default'])",
            "is a name that the kernel keeps for itself: choose another than '.', '..', lo, all and default",
        ),
    ]
}

/// A unicast Ethernet address.
pub(crate) fn mac() -> Vec<Rule> {
    vec![
        rule(
            "self.matches('^([0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}$')",
            "is not a MAC address: write six hexadecimal bytes joined by ':', such as 02:00:00:00:00:01",
        ),
        rule(
            "!self.matches('^.[13579bdfBDF]') && self != '00:00:00:00:00:00'",
            "is not the address of one interface: make its second digit even and not all of it zero, such as \
             02:00:00:00:00:01",
        ),
    ]
}

/// The key of a label.
pub(crate) fn label_key() -> Rule {
    rule(
        "self.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?\
         [A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$')",
        "is not a label key: write a name of at most 63 letters, digits, '-', '_' and '.', after an optional DNS \
         subdomain and '/'",
    )
}

/// The value of a label.
pub(crate) fn label_value() -> Rule {
    rule(
        "self.matches('^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$')",
        "is not a label value: write at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter \
         or digit",
    )
}

/// One of the requirements of a selector.
pub(crate) fn requirement() -> Vec<Rule> {
    vec![
        rule(
            "!(self.operator in ['In', 'NotIn']) || (has(self.values) && self.values.size() > 0)",
            "operators In and NotIn need values: add some, or use Exists or DoesNotExist",
        ),
        rule(
            "self.operator in ['In', 'NotIn'] || !has(self.values) || self.values.size() == 0",
            "operators Exists and DoesNotExist take no values: remove them, or use In or NotIn",
        ),
    ]
}
