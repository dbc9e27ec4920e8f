//! Kinds of text that fields of several objects hold, each with its length and the rules that make it legal.

use std::borrow::Cow;

use kube::core::Rule;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use crate::rules::{self, attachment, endpoint, provider, text};

/// Declares a kind of text: nothing but its schema.
macro_rules! kind_of_text {
    ($(#[$doc:meta])* $name:ident, $length:expr, $rules:expr) => {
        $(#[$doc])*
        pub(crate) enum $name {}

        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                of_text($length, &$rules)
            }
        }
    };
}

/// The longest range: IPv6 with an IPv4 tail, and a prefix length.
const CIDR_LENGTH: usize = 49;
/// The longest address: IPv6 with an IPv4 tail.
const IP_LENGTH: usize = 45;
/// The longest name of a network: with the prefix of its extended resource it is still a legal name of one.
const NETWORK_NAME_LENGTH: usize = 50;
/// `IFNAMSIZ` of Linux, less the terminator.
const INTERFACE_NAME_LENGTH: usize = 15;

kind_of_text!(
    /// A range without host bits.
    Cidr,
    CIDR_LENGTH,
    text::cidr()
);

kind_of_text!(
    /// A range whose addresses pods or services shall have.
    Subnet,
    CIDR_LENGTH,
    [text::cidr(), text::subnet()].concat()
);

kind_of_text!(
    /// An address that a host may have, without prefix length.
    HostAddress,
    IP_LENGTH,
    text::host_address()
);

kind_of_text!(
    /// An address of a node that other nodes send to.
    NodeAddress,
    IP_LENGTH,
    [text::host_address(), endpoint::address()].concat()
);

kind_of_text!(
    /// The name of an interface.
    InterfaceName,
    INTERFACE_NAME_LENGTH,
    text::interface_name()
);

kind_of_text!(
    /// The name of a pod's interface beside its primary one.
    SecondName,
    INTERFACE_NAME_LENGTH,
    [text::interface_name(), attachment::interface_name()].concat()
);

kind_of_text!(
    /// The name of a CNI configuration.
    CniName,
    255,
    provider::plain_name()
);

kind_of_text!(
    /// The name of a file with a CNI configuration.
    CniFile,
    255,
    provider::file_name()
);

kind_of_text!(
    /// The name of a `PodNetwork`.
    NetworkName,
    NETWORK_NAME_LENGTH,
    [rules::network_name("self")]
);

kind_of_text!(
    /// A unicast Ethernet address.
    MacAddress,
    17,
    text::mac()
);

kind_of_text!(
    /// The key of a label: 253 characters of prefix, a slash and 63 of a name.
    LabelKey,
    317,
    [text::label_key()]
);

kind_of_text!(
    /// The value of a label.
    LabelValue,
    63,
    [text::label_value()]
);

fn of_text(length: usize, rules: &[Rule]) -> Schema {
    json_schema!({
        "type": "string",
        "maxLength": length,
        "x-kubernetes-validations": rules,
    })
}
