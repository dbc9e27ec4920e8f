//! Defines objects that the API server refuses, with parts of its message: the field and the correction.

/// A kind, the error, a spec, and parts of the message.
pub(crate) type Invalid = (&'static str, &'static str, &'static str, &'static [&'static str]);

/// Invalid names of `PodNetwork`s.
pub(crate) const NAMES: [&str; 4] = [
    "none",
    "a.b",
    "a23456789-123456789-123456789-123456789-123456789-1",
    "blue.",
];

const NETWORK: &str = "PodNetwork";
const ATTACHMENT: &str = "PodNetworkAttachment";
const EGRESS: &str = "EgressPolicy";
const INTERFACE: &str = "PodInterface";
const POOL: &str = "EgressAddressPool";
const CLAIM: &str = "EgressAddressClaim";
const BLOCK: &str = "AddressBlock";
const NUMBER: &str = "NetworkNumber";
const MEMBERS: &str = "NetworkMembers";
const ENDPOINT: &str = "NodeEndpoint";

/// Invalid names of `NetworkNumber`s.
pub(crate) const NUMBERS: [&str; 5] = ["0", "07", "16777216", "99999999", "blue"];

/// At least one object per rule.
pub(crate) const INVALID: &[Invalid] = &[
    // Ranges.
    (NETWORK, "no subnet", "{}", &["spec.subnets", "is empty: add a range"]),
    (
        NETWORK,
        "no subnet, Ebpf said",
        "{provider: {type: Ebpf}}",
        &["spec.subnets", "is empty: add a range"],
    ),
    (
        NETWORK,
        "an address",
        "{subnets: [10.1.0.0]}",
        &["spec.subnets[0]", "write it in CIDR notation"],
    ),
    (
        NETWORK,
        "no range",
        "{subnets: [nonsense]}",
        &["spec.subnets[0]", "write it in CIDR notation"],
    ),
    (
        NETWORK,
        "IPv4-mapped",
        "{subnets: ['::ffff:10.0.0.0/104']}",
        &["spec.subnets[0]", "write it in CIDR notation"],
    ),
    (
        NETWORK,
        "host bits",
        "{subnets: [10.1.0.1/16]}",
        &["spec.subnets[0]", "10.1.0.1/16", "write the first address"],
    ),
    (
        NETWORK,
        "host bits, IPv6",
        "{subnets: ['fd10::1/64']}",
        &["spec.subnets[0]", "write the first address"],
    ),
    (
        NETWORK,
        "no room",
        "{subnets: [10.1.0.0/31]}",
        &["spec.subnets[0]", "prefix length of 8 to 30 for IPv4"],
    ),
    (
        NETWORK,
        "too much room",
        "{subnets: [16.0.0.0/7]}",
        &["spec.subnets[0]", "prefix length of 8 to 30 for IPv4"],
    ),
    (
        NETWORK,
        "no room, IPv6",
        "{subnets: ['fd11::/127']}",
        &["spec.subnets[0]", "of 16 to 126 for IPv6"],
    ),
    (
        NETWORK,
        "too much room, IPv6",
        "{subnets: ['4000::/15']}",
        &["spec.subnets[0]", "of 16 to 126 for IPv6"],
    ),
    (
        NETWORK,
        "loopback",
        "{subnets: [127.0.0.0/16]}",
        &["spec.subnets[0]", "choose one outside 0.0.0.0/8"],
    ),
    (
        NETWORK,
        "link-local",
        "{subnets: [10.1.0.0/16, 169.254.1.0/30]}",
        &["spec.subnets[1]", "169.254.0.0/16"],
    ),
    (
        NETWORK,
        "multicast",
        "{subnets: [239.0.0.0/8]}",
        &["spec.subnets[0]", "224.0.0.0/4"],
    ),
    (
        NETWORK,
        "around multicast, IPv6",
        "{subnets: ['ff02::/16']}",
        &["spec.subnets[0]", "ff00::/8"],
    ),
    (
        NETWORK,
        "gateways' range",
        "{subnets: ['fe80::/64']}",
        &["spec.subnets[0]", "fe80::/10"],
    ),
    (
        NETWORK,
        "unspecified",
        "{subnets: ['::/16']}",
        &["spec.subnets[0]", "::/64"],
    ),
    (
        NETWORK,
        "overlap",
        "{subnets: [10.0.0.0/8, 10.10.3.0/24]}",
        &["spec.subnets", "remove one of them"],
    ),
    (
        NETWORK,
        "twice",
        "{subnets: [10.1.0.0/16, 10.1.0.0/16]}",
        &["spec.subnets[1]", "Duplicate value"],
    ),
    (
        NETWORK,
        "many",
        "{subnets: [10.0.0.0/16, 10.1.0.0/16, 10.2.0.0/16, 10.3.0.0/16, 10.4.0.0/16, 10.5.0.0/16, \
      10.6.0.0/16, 10.7.0.0/16, 10.8.0.0/16, 10.9.0.0/16, 10.10.0.0/16, 10.11.0.0/16, 10.12.0.0/16, 10.13.0.0/16, \
      10.14.0.0/16, 10.15.0.0/16, 10.16.0.0/16]}",
        &["spec.subnets", "must have at most 16 items"],
    ),
    (
        NETWORK,
        "exclude elsewhere",
        "{subnets: [10.1.0.0/16], excludeSubnets: [10.1.0.0/24, 10.0.0.0/15]}",
        &["spec.excludeSubnets", "write a part of a subnet"],
    ),
    (
        NETWORK,
        "exclude an address",
        "{subnets: [10.1.0.0/16], excludeSubnets: [10.1.0.7]}",
        &["spec.excludeSubnets[0]", "write it in CIDR notation"],
    ),
    (
        NETWORK,
        "service range in a subnet",
        "{subnets: [10.0.0.0/16], serviceSubnets: [10.0.128.0/17]}",
        &["spec.serviceSubnets", "choose ranges outside the subnets"],
    ),
    (
        NETWORK,
        "service range around a subnet",
        "{subnets: [10.0.0.0/16], serviceSubnets: [10.0.0.0/8]}",
        &["spec.serviceSubnets", "choose ranges outside the subnets"],
    ),
    (
        NETWORK,
        "service ranges overlap",
        "{subnets: [10.0.0.0/16], serviceSubnets: [10.96.0.0/12, 10.96.1.0/24]}",
        &["spec.serviceSubnets", "remove one of them"],
    ),
    (
        NETWORK,
        "service range reserved",
        "{subnets: [10.0.0.0/16], serviceSubnets: [169.254.0.0/16]}",
        &["spec.serviceSubnets[0]", "choose one outside"],
    ),
    // Single fields.
    (
        NETWORK,
        "MTU below IPv6",
        "{subnets: [10.1.0.0/16], mtu: 1279}",
        &["spec.mtu", "greater than or equal to 1280"],
    ),
    (
        NETWORK,
        "MTU beyond IP",
        "{subnets: [10.1.0.0/16], mtu: 65536}",
        &["spec.mtu", "less than or equal to 65535"],
    ),
    (
        NETWORK,
        "topology",
        "{subnets: [10.1.0.0/16], topology: Layer2}",
        &["spec.topology", "\"Layer3\""],
    ),
    (
        NETWORK,
        "unknown field",
        "{subnets: [10.1.0.0/16], vlan: 7}",
        &["unknown field \"spec.vlan\""],
    ),
    // Egress.
    (
        NETWORK,
        "routed, not default",
        "{subnets: [10.1.0.0/16], egress: {mode: Route}}",
        &["spec.egress.mode", "write Masquerade or None"],
    ),
    (
        NETWORK,
        "addresses without mode",
        "{subnets: [10.1.0.0/16], egress: {addresses: [192.0.2.1]}}",
        &["spec.egress.addresses", "set mode to Masquerade"],
    ),
    (
        NETWORK,
        "two of a family",
        "{subnets: [10.1.0.0/16], egress: {mode: Masquerade, addresses: [192.0.2.1, 192.0.2.2]}}",
        &["spec.egress.addresses", "keep at most one IPv4"],
    ),
    (
        NETWORK,
        "an address of its own",
        "{subnets: [10.1.0.0/16], egress: {mode: Masquerade, addresses: [10.1.0.1]}}",
        &["spec.egress.addresses", "choose one outside subnets"],
    ),
    (
        NETWORK,
        "an address of a service",
        "{subnets: [10.1.0.0/16], serviceSubnets: [10.96.0.0/16], egress: {mode: Masquerade, addresses: [10.96.0.1]}}",
        &["spec.egress.addresses", "choose one outside subnets"],
    ),
    (
        NETWORK,
        "loopback as source",
        "{subnets: [10.1.0.0/16], egress: {mode: Masquerade, addresses: [127.0.0.1]}}",
        &["spec.egress.addresses[0]", "choose one outside"],
    ),
    (
        NETWORK,
        "a way that there is not",
        "{subnets: [10.1.0.0/16], egress: {mode: masquerade}}",
        &["spec.egress.mode", "\"None\", \"Route\", \"Masquerade\""],
    ),
    // Namespaces and blocks.
    (
        NETWORK,
        "default and selected",
        "{default: true, subnets: [10.1.0.0/16], namespaceSelector: {}}",
        &["spec.namespaceSelector", "set default to false"],
    ),
    (
        NETWORK,
        "block larger than its subnet",
        "{subnets: [10.1.0.0/24], perNodePrefix: {ipv4: 23}}",
        &["spec.perNodePrefix.ipv4", "not smaller than the prefix length"],
    ),
    (
        NETWORK,
        "block larger than its subnet, IPv6",
        "{subnets: ['fd10::/120'], perNodePrefix: {ipv6: 112}}",
        &["spec.perNodePrefix.ipv6", "not smaller than the prefix length"],
    ),
    (
        NETWORK,
        "block smaller than an address",
        "{subnets: [10.1.0.0/24], perNodePrefix: {ipv4: 33}}",
        &["spec.perNodePrefix.ipv4", "less than or equal to 32"],
    ),
    (
        NETWORK,
        "operator",
        "{subnets: [10.1.0.0/16], namespaceSelector: {matchExpressions: [{key: a, operator: Is}]}}",
        &[
            "spec.namespaceSelector.matchExpressions[0].operator",
            "\"In\", \"NotIn\", \"Exists\", \"DoesNotExist\"",
        ],
    ),
    // Providers.
    (
        NETWORK,
        "parent for another",
        "{provider: {type: Tap, parent: eth1}}",
        &["spec.provider.parent", "with type Macvlan only: remove it"],
    ),
    (
        NETWORK,
        "allowUplink for another",
        "{provider: {type: Tap, allowUplink: true}}",
        &["spec.provider.allowUplink", "with type Macvlan only: remove it"],
    ),
    (
        NETWORK,
        "mode for another",
        "{provider: {type: Tap, mode: Bridge}}",
        &["spec.provider.mode", "with type Macvlan only: remove it"],
    ),
    (
        NETWORK,
        "devices for another",
        "{provider: {type: Tap, devices: [eth1]}}",
        &["spec.provider.devices", "with type HostDevice only: remove it"],
    ),
    (
        NETWORK,
        "gateways for another",
        "{subnets: [10.1.0.0/16], provider: {type: Tap, gateways: [10.1.0.1]}}",
        &[
            "spec.provider.gateways",
            "with type Macvlan or HostDevice only: remove it",
        ],
    ),
    (
        NETWORK,
        "owner for another",
        "{subnets: [10.1.0.0/16], provider: {type: Ebpf, owner: 1}}",
        &["spec.provider.owner", "with type Tap only: remove it"],
    ),
    (
        NETWORK,
        "group for another",
        "{subnets: [10.1.0.0/16], provider: {type: Ebpf, group: 1}}",
        &["spec.provider.group", "with type Tap only: remove it"],
    ),
    (
        NETWORK,
        "queues for another",
        "{subnets: [10.1.0.0/16], provider: {type: Ebpf, multiQueue: true}}",
        &["spec.provider.multiQueue", "with type Tap only: remove it"],
    ),
    (
        NETWORK,
        "configuration for another",
        "{provider: {type: Tap, confName: a}}",
        &["spec.provider.confName", "with type CNI only: remove it"],
    ),
    (
        NETWORK,
        "file for another",
        "{provider: {type: Tap, file: a.conf}}",
        &["spec.provider.file", "with type CNI only: remove it"],
    ),
    (
        NETWORK,
        "no parent",
        "{provider: {type: Macvlan}}",
        &["spec.provider.parent", "needs the name of an interface"],
    ),
    (
        NETWORK,
        "parent of no name",
        "{provider: {type: Macvlan, parent: a/b}}",
        &["spec.provider.parent", "write 1 to 15 of A-Z"],
    ),
    (
        NETWORK,
        "parent of a long name",
        "{provider: {type: Macvlan, parent: abcdefghijklmnop}}",
        &["spec.provider.parent", "may not be more than 15"],
    ),
    (
        NETWORK,
        "parent that is loopback",
        "{provider: {type: Macvlan, parent: lo}}",
        &["spec.provider.parent", "choose another than"],
    ),
    (
        NETWORK,
        "no devices",
        "{provider: {type: HostDevice}}",
        &["spec.provider.devices", "needs the names of interfaces"],
    ),
    (
        NETWORK,
        "a device twice",
        "{provider: {type: HostDevice, devices: [eth1, eth1]}}",
        &["spec.provider.devices[1]", "Duplicate value"],
    ),
    (
        NETWORK,
        "gateway elsewhere",
        "{subnets: [10.1.0.0/16], provider: {type: Macvlan, parent: eth1, gateways: [10.2.0.1]}}",
        &["spec.provider.gateways", "add the subnet"],
    ),
    (
        NETWORK,
        "two gateways",
        "{subnets: [10.1.0.0/16], provider: {type: Macvlan, parent: eth1, gateways: [10.1.0.1, 10.1.0.2]}}",
        &["spec.provider.gateways", "keep at most one IPv4"],
    ),
    (
        NETWORK,
        "nobody",
        "{provider: {type: Tap, owner: 4294967295}}",
        &["spec.provider.owner", "less than or equal to 4294967294"],
    ),
    (
        NETWORK,
        "nobody's group",
        "{provider: {type: Tap, group: -1}}",
        &["spec.provider.group", "greater than or equal to 0"],
    ),
    (
        NETWORK,
        "no configuration",
        "{provider: {type: CNI}}",
        &["spec.provider.confName", "write one of them"],
    ),
    (
        NETWORK,
        "two configurations",
        "{provider: {type: CNI, confName: a, file: a.conf}}",
        &["spec.provider.confName", "not both"],
    ),
    (
        NETWORK,
        "configuration without a name",
        "{provider: {type: CNI, confName: ''}}",
        &["spec.provider.confName", "printable characters"],
    ),
    (
        NETWORK,
        "configuration of control characters",
        "{provider: {type: CNI, confName: \"a\\tb\"}}",
        &["spec.provider.confName", "printable characters"],
    ),
    (
        NETWORK,
        "file of another folder",
        "{provider: {type: CNI, file: ../a.conf}}",
        &["spec.provider.file", "without a folder"],
    ),
    (
        NETWORK,
        "file of another kind",
        "{provider: {type: CNI, file: a.txt}}",
        &["spec.provider.file", ".conflist, .conf or .json"],
    ),
    (
        NETWORK,
        "no type",
        "{provider: {parent: eth1}}",
        &["spec.provider.type", "Required value"],
    ),
    (
        NETWORK,
        "provider",
        "{provider: {type: Bridge}}",
        &["spec.provider.type", "\"Ebpf\", \"Macvlan\""],
    ),
    (
        NETWORK,
        "egress of another",
        "{provider: {type: Tap}, egress: {mode: None}}",
        &["spec.egress", "provider Ebpf only: remove it"],
    ),
    (
        NETWORK,
        "services of another",
        "{provider: {type: Tap}, serviceSubnets: [10.9.0.0/16]}",
        &["spec.serviceSubnets", "provider Ebpf only: remove it"],
    ),
    (
        NETWORK,
        "XDP of another",
        "{provider: {type: CNI, confName: a}, xdp: true}",
        &["spec.xdp", "provider Ebpf only: remove it"],
    ),
    (
        NETWORK,
        "default of another",
        "{provider: {type: Tap}, default: true}",
        &["spec.default", "use provider Ebpf or CNI"],
    ),
    (
        NETWORK,
        "excludes of plugins",
        "{subnets: [10.1.0.0/16], excludeSubnets: [10.1.0.9/32], provider: {type: CNI, confName: a}}",
        &["spec.excludeSubnets", "plugins assign the addresses: remove it"],
    ),
    (
        NETWORK,
        "blocks of plugins",
        "{perNodePrefix: {ipv4: 26}, provider: {type: CNI, confName: a}}",
        &["spec.perNodePrefix", "plugins assign the addresses: remove it"],
    ),
    (
        NETWORK,
        "resource of plugins",
        "{extendedResource: true, provider: {type: CNI, confName: a}}",
        &["spec.extendedResource", "plugins assign the addresses: remove it"],
    ),
    // Attachments.
    (
        NETWORK,
        "device of the node for unnamed namespaces",
        "{provider: {type: Macvlan, parent: eth1}}",
        &["spec.access", "name the namespaces that may join"],
    ),
    (
        NETWORK,
        "device of the node with an access that names none",
        "{provider: {type: HostDevice, devices: [eth1]}, access: {allowMac: true}}",
        &["spec.access", "name the namespaces that may join"],
    ),
    (
        NETWORK,
        "selected without a selector",
        "{subnets: [10.1.0.0/16], access: {namespaces: {from: Selected}}}",
        &["spec.access.namespaces.selector", "add one, or write All or None"],
    ),
    (
        NETWORK,
        "selector without a meaning",
        "{subnets: [10.1.0.0/16], access: {namespaces: {from: All, selector: {}}}}",
        &["spec.access.namespaces.selector", "remove it, or write Selected"],
    ),
    (
        NETWORK,
        "from elsewhere",
        "{subnets: [10.1.0.0/16], access: {namespaces: {from: Same}}}",
        &["spec.access.namespaces.from", "\"All\", \"Selected\", \"None\""],
    ),
    (
        NETWORK,
        "ranges of addresses that may not be chosen",
        "{subnets: [10.1.0.0/16], access: {addressRanges: [10.1.1.0/24]}}",
        &["spec.access.addressRanges", "set allowAddresses to true"],
    ),
    (
        NETWORK,
        "range outside the subnets",
        "{subnets: [10.1.0.0/16], access: {allowAddresses: true, addressRanges: [10.2.0.0/24]}}",
        &["spec.access.addressRanges", "not inside any of the subnets"],
    ),
    (
        NETWORK,
        "locked namespaces of no network",
        "{subnets: [10.1.0.0/16], access: {lockNamespaces: true}}",
        &["spec.access.lockNamespaces", "add namespaceSelector, or remove"],
    ),
    (
        ATTACHMENT,
        "no network",
        "{podSelector: {}, interfaceName: net1}",
        &["spec.podNetworkName", "Required value"],
    ),
    (
        ATTACHMENT,
        "no selector",
        "{podNetworkName: blue, interfaceName: net1}",
        &["spec.podSelector", "Required value"],
    ),
    (
        ATTACHMENT,
        "no interface",
        "{podNetworkName: blue, podSelector: {}}",
        &["spec.interfaceName", "Required value"],
    ),
    (
        ATTACHMENT,
        "network of no name",
        "{podNetworkName: Blue, podSelector: {}, interfaceName: net1}",
        &["spec.podNetworkName", "1 to 50 of a-z"],
    ),
    (
        ATTACHMENT,
        "network that is none",
        "{podNetworkName: none, podSelector: {}, interfaceName: net1}",
        &["spec.podNetworkName", "not none"],
    ),
    (
        ATTACHMENT,
        "primary interface",
        "{podNetworkName: blue, podSelector: {}, interfaceName: eth0}",
        &["spec.interfaceName", "choose another name, such as net1"],
    ),
    (
        ATTACHMENT,
        "loopback",
        "{podNetworkName: blue, podSelector: {}, interfaceName: lo}",
        &["spec.interfaceName", "choose another than"],
    ),
    (
        ATTACHMENT,
        "parent folder",
        "{podNetworkName: blue, podSelector: {}, interfaceName: ..}",
        &["spec.interfaceName", "choose another than"],
    ),
    (
        ATTACHMENT,
        "interface with a space",
        "{podNetworkName: blue, podSelector: {}, interfaceName: a b}",
        &["spec.interfaceName", "write 1 to 15 of A-Z"],
    ),
    (
        ATTACHMENT,
        "interface of a long name",
        "{podNetworkName: blue, podSelector: {}, interfaceName: abcdefghijklmnop}",
        &["spec.interfaceName", "may not be more than 15"],
    ),
    (
        ATTACHMENT,
        "short MAC",
        "{podNetworkName: blue, podSelector: {}, interfaceName: net1, mac: '02:00:00:00:00'}",
        &["spec.mac", "six hexadecimal bytes"],
    ),
    (
        ATTACHMENT,
        "multicast MAC",
        "{podNetworkName: blue, podSelector: {}, interfaceName: net1, mac: '01:00:5e:00:00:01'}",
        &["spec.mac", "make its second digit even"],
    ),
    (
        ATTACHMENT,
        "no MAC",
        "{podNetworkName: blue, podSelector: {}, interfaceName: net1, mac: '00:00:00:00:00:00'}",
        &["spec.mac", "not all of it zero"],
    ),
    (
        ATTACHMENT,
        "address with a prefix length",
        "{podNetworkName: blue, podSelector: {}, interfaceName: net1, addresses: [10.10.0.7/24]}",
        &["spec.addresses[0]", "without prefix length"],
    ),
    (
        ATTACHMENT,
        "two of a family",
        "{podNetworkName: blue, podSelector: {}, interfaceName: net1, addresses: ['fd10::7', 'fd10::8']}",
        &["spec.addresses", "keep at most one IPv4"],
    ),
    (
        ATTACHMENT,
        "link-local",
        "{podNetworkName: blue, podSelector: {}, interfaceName: net1, addresses: ['fe80::7']}",
        &["spec.addresses[0]", "choose one outside"],
    ),
    (
        ATTACHMENT,
        "label value",
        "{podNetworkName: blue, podSelector: {matchLabels: {app: 'a b'}}, interfaceName: net1}",
        &["spec.podSelector.matchLabels", "is not a label value: write at most 63"],
    ),
    (
        ATTACHMENT,
        "label key",
        "{podNetworkName: blue, podSelector: {matchExpressions: [{key: 'a b', operator: Exists}]}, interfaceName: net1}",
        &[
            "spec.podSelector.matchExpressions[0].key",
            "is not a label key: write a name",
        ],
    ),
    (
        ATTACHMENT,
        "In without values",
        "{podNetworkName: blue, podSelector: {matchExpressions: [{key: a, operator: In}]}, interfaceName: net1}",
        &[
            "spec.podSelector.matchExpressions[0]",
            "need values: add some, or use Exists",
        ],
    ),
    (
        ATTACHMENT,
        "Exists with values",
        "{podNetworkName: blue, podSelector: {matchExpressions: [{key: a, operator: Exists, values: [b]}]}, \
      interfaceName: net1}",
        &["spec.podSelector.matchExpressions[0]", "take no values: remove them"],
    ),
    // Egress policies.
    (EGRESS, "no selector", "{}", &["spec.podSelector", "Required value"]),
    (
        EGRESS,
        "no networks",
        "{podSelector: {}, podNetworkNames: []}",
        &["spec.podNetworkNames", "leave the list out for all networks"],
    ),
    (
        EGRESS,
        "network of no name",
        "{podSelector: {}, podNetworkNames: [blue, a_b]}",
        &["spec.podNetworkNames[1]", "1 to 50 of a-z"],
    ),
    (
        EGRESS,
        "no action",
        "{podSelector: {}, rules: [{to: [{cidr: 192.0.2.0/24}]}]}",
        &["spec.rules[0].action", "Required value"],
    ),
    (
        EGRESS,
        "action",
        "{podSelector: {}, defaultAction: Drop}",
        &["spec.defaultAction", "\"Allow\", \"Deny\""],
    ),
    (
        EGRESS,
        "host bits",
        "{podSelector: {}, rules: [{action: Deny, to: [{cidr: 192.0.2.1/24}]}]}",
        &["spec.rules[0].to[0].cidr", "write the first address"],
    ),
    (
        EGRESS,
        "no range",
        "{podSelector: {}, rules: [{action: Deny, to: [{cidr: example.com}]}]}",
        &["spec.rules[0].to[0].cidr", "write it in CIDR notation"],
    ),
    (
        EGRESS,
        "except elsewhere",
        "{podSelector: {}, rules: [{action: Deny, to: [{cidr: 10.0.0.0/8, except: [11.0.0.0/16]}]}]}",
        &["spec.rules[0].to[0].except", "write a smaller range inside cidr"],
    ),
    (
        EGRESS,
        "except everything",
        "{podSelector: {}, rules: [{action: Deny, to: [{cidr: 10.0.0.0/8, except: [10.0.0.0/8]}]}]}",
        &["spec.rules[0].to[0].except", "write a smaller range inside cidr"],
    ),
    (
        EGRESS,
        "except of the other family",
        "{podSelector: {}, rules: [{action: Deny, to: [{cidr: 10.0.0.0/8, except: ['fd00::/64']}]}]}",
        &["spec.rules[0].to[0].except", "write a smaller range inside cidr"],
    ),
    (
        EGRESS,
        "end without a port",
        "{podSelector: {}, rules: [{action: Deny, ports: [{endPort: 80}]}]}",
        &["spec.rules[0].ports[0].endPort", "add port, or remove endPort"],
    ),
    (
        EGRESS,
        "end before the port",
        "{podSelector: {}, rules: [{action: Deny, ports: [{port: 80, endPort: 79}]}]}",
        &["spec.rules[0].ports[0].endPort", "write the smaller number as port"],
    ),
    (
        EGRESS,
        "port 0",
        "{podSelector: {}, rules: [{action: Deny, ports: [{port: 0}]}]}",
        &["spec.rules[0].ports[0].port", "greater than or equal to 1"],
    ),
    (
        EGRESS,
        "port beyond",
        "{podSelector: {}, rules: [{action: Deny, ports: [{port: 1, endPort: 65536}]}]}",
        &["spec.rules[0].ports[0].endPort", "less than or equal to 65535"],
    ),
    (
        EGRESS,
        "port of a name",
        "{podSelector: {}, rules: [{action: Deny, ports: [{port: http}]}]}",
        &["spec.rules[0].ports[0].port", "must be of type integer"],
    ),
    (
        EGRESS,
        "protocol",
        "{podSelector: {}, rules: [{action: Deny, ports: [{protocol: ICMP}]}]}",
        &["spec.rules[0].ports[0].protocol", "\"TCP\", \"UDP\", \"SCTP\""],
    ),
    (
        EGRESS,
        "address of no host",
        "{podSelector: {}, egressAddresses: [224.0.0.1]}",
        &["spec.egressAddresses[0]", "choose one outside"],
    ),
    (
        EGRESS,
        "two of a family",
        "{podSelector: {}, egressAddresses: [192.0.2.1, 192.0.2.2]}",
        &["spec.egressAddresses", "keep at most one IPv4"],
    ),
    (
        POOL,
        "no ranges",
        "{ranges: [], access: {namespaces: {from: All}}}",
        &["spec.ranges", "should have at least 1 items"],
    ),
    (
        POOL,
        "no access",
        "{ranges: [192.0.2.0/28]}",
        &["spec.access", "Required value"],
    ),
    (
        POOL,
        "an address",
        "{ranges: [192.0.2.1], access: {namespaces: {from: All}}}",
        &["spec.ranges[0]", "write it in CIDR notation"],
    ),
    (
        POOL,
        "ranges that overlap",
        "{ranges: [192.0.2.0/28, 192.0.2.8/29], access: {namespaces: {from: All}}}",
        &["spec.ranges", "overlap each other"],
    ),
    (
        POOL,
        "a whole network",
        "{ranges: [10.0.0.0/8], access: {namespaces: {from: All}}}",
        &["spec.ranges", "larger than /16"],
    ),
    (
        POOL,
        "loopback",
        "{ranges: [127.0.0.0/24], access: {namespaces: {from: All}}}",
        &["spec.ranges", "loopback"],
    ),
    (
        POOL,
        "selected by nothing",
        "{ranges: [192.0.2.0/28], access: {namespaces: {from: Selected}}}",
        &["spec.access.namespaces", "needs a selector"],
    ),
    (
        CLAIM,
        "without a user",
        "{address: 192.0.2.1}",
        &["spec", "write either egressPolicy or podNetworkName"],
    ),
    // Objects that agents write.
    (
        INTERFACE,
        "no pod",
        "{podName: '', podUid: u, nodeName: n1, podNetworkName: blue, interfaceName: eth0, sandboxId: s}",
        &["spec.podName", "at least 1 chars long"],
    ),
    (
        INTERFACE,
        "interface of no name",
        "{podName: p, podUid: u, nodeName: n1, podNetworkName: blue, interfaceName: a/b, sandboxId: s}",
        &["spec.interfaceName", "write 1 to 15 of A-Z"],
    ),
    (
        BLOCK,
        "name of another range",
        "{network: blue, networkUID: u, cidr: 10.1.0.0/26, nodeName: n1, nodeUID: v}",
        &["metadata.name is not that of the range", "blue.v4-10-10-0-64-26"],
    ),
    (
        BLOCK,
        "range in another form",
        "{network: blue, networkUID: u, cidr: 'FD10:0::40/122', nodeName: n1, nodeUID: v}",
        &["spec.cidr", "as the API server prints it"],
    ),
    (
        BLOCK,
        "host bits",
        "{network: blue, networkUID: u, cidr: 10.1.0.1/26, nodeName: n1, nodeUID: v}",
        &["spec.cidr", "write the first address"],
    ),
    (
        BLOCK,
        "no node",
        "{network: blue, networkUID: u, cidr: 10.1.0.0/26, nodeUID: v}",
        &["spec.nodeName", "Required value"],
    ),
    (
        NUMBER,
        "no number",
        "{network: blue, networkUID: u}",
        &["metadata.name is not a number of a network", "from 1 to 16777215"],
    ),
    (
        MEMBERS,
        "the name of another network",
        "{network: blue, networkUID: u, nodeName: n1, nodeUID: v}",
        &[
            "metadata.name does not begin with the network",
            "blue.0123456789abcdef.0",
        ],
    ),
    (
        MEMBERS,
        "two addresses of one family",
        "{network: blue, networkUID: u, nodeName: n1, nodeUID: v, members: [{namespace: a, podName: b, podUID: c, \
         interface: eth0, addresses: [10.1.0.1, 10.1.0.2]}]}",
        &["spec.members[0].addresses", "has two addresses of one family"],
    ),
    (
        MEMBERS,
        "an interface twice",
        "{network: blue, networkUID: u, nodeName: n1, nodeUID: v, members: [{namespace: a, podName: b, podUID: c, \
         interface: eth0, addresses: [10.1.0.1]}, {namespace: a, podName: b, podUID: c, interface: eth0, addresses: \
         [10.1.0.2]}]}",
        &[
            "spec.members",
            "has an interface of a pod twice: keep one entry for each podUID and interface",
        ],
    ),
    (
        ENDPOINT,
        "the name of another node",
        "{nodeName: other, nodeUID: v, addresses: [192.0.2.1], port: 4789, mtu: 1500, epoch: 1}",
        &["metadata.name is not spec.nodeName"],
    ),
    (
        ENDPOINT,
        "no address",
        "{nodeName: bad, nodeUID: v, addresses: [], port: 4789, mtu: 1500, epoch: 1}",
        &["spec.addresses", "at least 1 items"],
    ),
    (
        ENDPOINT,
        "two addresses of one family",
        "{nodeName: bad, nodeUID: v, addresses: [192.0.2.1, 192.0.2.2], port: 4789, mtu: 1500, epoch: 1}",
        &["spec.addresses", "has two addresses of one family"],
    ),
    (
        ENDPOINT,
        "three addresses",
        "{nodeName: bad, nodeUID: v, addresses: [192.0.2.1, 'fd00::1', 192.0.2.2], port: 4789, mtu: 1500, epoch: 1}",
        &["spec.addresses", "at most 2 items"],
    ),
    (
        ENDPOINT,
        "loopback",
        "{nodeName: bad, nodeUID: v, addresses: [127.0.0.1], port: 4789, mtu: 1500, epoch: 1}",
        &["spec.addresses[0]", "choose one outside 0.0.0.0/8"],
    ),
    (
        ENDPOINT,
        "another form",
        "{nodeName: bad, nodeUID: v, addresses: ['FD00:0::1'], port: 4789, mtu: 1500, epoch: 1}",
        &["spec.addresses[0]", "lower case and the shortest form"],
    ),
    (
        ENDPOINT,
        "no port",
        "{nodeName: bad, nodeUID: v, addresses: [192.0.2.1], port: 0, mtu: 1500, epoch: 1}",
        &["spec.port", "greater than or equal to 1"],
    ),
    (
        ENDPOINT,
        "a large port",
        "{nodeName: bad, nodeUID: v, addresses: [192.0.2.1], port: 65536, mtu: 1500, epoch: 1}",
        &["spec.port", "less than or equal to 65535"],
    ),
    (
        ENDPOINT,
        "a small MTU",
        "{nodeName: bad, nodeUID: v, addresses: [192.0.2.1], port: 4789, mtu: 1279, epoch: 1}",
        &["spec.mtu", "greater than or equal to 1280"],
    ),
    (
        ENDPOINT,
        "no epoch",
        "{nodeName: bad, nodeUID: v, addresses: [192.0.2.1], port: 4789, mtu: 1500}",
        &["spec.epoch", "Required value"],
    ),
    (
        NETWORK,
        "no such fabric",
        "{subnets: [10.1.0.0/16], fabric: Geneve}",
        &["spec.fabric", "Overlay"],
    ),
    (
        NETWORK,
        "fabric of a foreign provider",
        "{provider: {type: Macvlan, parent: eth1}, access: {namespaces: {from: None}}, fabric: Overlay}",
        &["spec.fabric", "has a meaning with provider Ebpf only"],
    ),
];
