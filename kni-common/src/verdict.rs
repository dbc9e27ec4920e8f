//! Lists every verdict on a packet: counter index, event code, operator-visible word and test expectation in one.

/// The program that saw the packet, from the pod's side of the host interface. "ingress" and "egress" are terms of
/// policy and never of the dataplane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum Direction {
    /// Sent by the pod: TC ingress of the host interface.
    FromPod = 0,
    /// To the pod: TC egress of the host interface, or redirected straight to the pod.
    ToPod = 1,
    /// Into the node: XDP and TC ingress of the uplink.
    FromUplink = 2,
    /// Out of the node: TC egress of the uplink.
    ToUplink = 3,
    /// From another node through the tunnel: TC ingress of the tunnel device.
    FromOverlay = 4,
    /// From the node's stack into the tunnel: TC egress of the tunnel device.
    ToOverlay = 5,
}

impl Direction {
    /// The word that operators see.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::FromPod => "from_pod",
            Self::ToPod => "to_pod",
            Self::FromUplink => "from_uplink",
            Self::ToUplink => "to_uplink",
            Self::FromOverlay => "from_overlay",
            Self::ToOverlay => "to_overlay",
        }
    }

    /// The direction with this code.
    #[must_use]
    pub const fn from_code(code: u16) -> Option<Self> {
        match code {
            0 => Some(Self::FromPod),
            1 => Some(Self::ToPod),
            2 => Some(Self::FromUplink),
            3 => Some(Self::ToUplink),
            4 => Some(Self::FromOverlay),
            5 => Some(Self::ToOverlay),
            _ => None,
        }
    }
}

macro_rules! verdicts {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $word:literal, $explanation:literal;)*) => {
        /// The decision of a program. Codes below [`Verdict::FIRST_DROP`] let the packet continue.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u16)]
        pub enum Verdict { $($(#[$doc])* $name = $code,)* }

        impl Verdict {
            /// Every verdict, by code.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The word that operators see, also the metric label.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $word,)* }
            }

            /// One sentence for operators.
            #[must_use]
            pub const fn explanation(self) -> &'static str {
                match self { $(Self::$name => $explanation,)* }
            }

            /// The verdict with this code.
            #[must_use]
            pub const fn from_code(code: u16) -> Option<Self> {
                match code { $($code => Some(Self::$name),)* _ => None }
            }
        }
    };
}

verdicts! {
    /// Straight to the pod end of a local endpoint (`bpf_redirect_peer`).
    Redirected = 0, "redirected", "delivered directly to a pod on this node";
    /// Passed to the node's stack.
    PassedToStack = 1, "passed_to_stack", "passed to the node's network stack";
    /// Let through from the node's stack to the pod.
    Delivered = 2, "delivered", "accepted from the node's network stack";
    /// ARP request or neighbour solicitation for the gateway, answered by the program.
    Answered = 3, "answered", "neighbour request for the gateway, answered in place";
    /// Link control (duplicate address detection, router solicitation, multicast listener report) that ends here.
    Absorbed = 4, "absorbed", "link control traffic that ends at the host interface";

    /// Sent out of the node with one of the node's addresses as source.
    Masqueraded = 5, "left", "sent out of the node with an address of the node as its source";
    /// Sent through the tunnel to the node that has the destination, or is responsible for the pod's egress address.
    Tunnelled = 6, "tunnelled", "sent through the tunnel to the node of the destination pod or of the egress address";
    /// Sent through the nodes' network to the node that has the destination.
    Routed = 7, "routed", "sent through the network of the nodes to the node of the destination pod";

    /// No endpoint has this interface.
    NoEndpoint = 32, "no_endpoint", "the interface belongs to no endpoint";
    /// The endpoint's row is not ready (being attached or detached).
    EndpointNotReady = 33, "endpoint_not_ready", "the pod interface is being attached or detached, or is revoked";
    /// Shorter than its headers claim.
    Truncated = 34, "truncated", "the frame is shorter than its headers indicate";
    /// A header contradicts itself.
    Malformed = 35, "malformed", "a header contradicts itself";
    /// Has a VLAN tag.
    VlanTagged = 36, "vlan_tagged", "pods may not send or receive VLAN tags";
    /// Neither IPv4, IPv6 nor ARP.
    UnsupportedEthertype = 37, "unsupported_ethertype", "neither IPv4, IPv6 nor ARP";
    /// The source MAC is not the pod's.
    SourceMac = 38, "source_mac", "the source MAC address is not the pod's (spoofed)";
    /// The source address is not the pod's.
    SourceAddress = 39, "source_address", "the source address is not the pod's (spoofed)";
    /// The destination MAC is not the gateway's.
    DestinationMac = 40, "destination_mac", "the destination MAC address is not the gateway's";
    /// Addressed to a pod that does not have the destination address.
    DestinationAddress = 41, "destination_address", "the pod does not have the destination address";
    /// Multicast or broadcast, which is not supported.
    Multicast = 42, "multicast", "multicast and broadcast are not supported";
    /// To an IPv6 link-local address outside link control.
    LinkLocal = 43, "link_local", "link-local addresses are allowed in link control only";
    /// IPv4 source route option, or IPv6 routing header type 0 (RFC 5095, RFC 7126).
    SourceRoute = 44, "source_route", "source routing is not allowed";
    /// More IPv6 extension headers or IPv4 options than the programs parse.
    ExtensionHeaders = 45, "extension_headers", "too many extension headers or options";
    /// A later fragment whose first fragment was not seen.
    FragmentWithoutFirst = 46, "fragment_without_first", "a later fragment came without its first fragment";
    /// An ICMP type that is not allowed between pods.
    IcmpType = 47, "icmp_type", "an ICMP type that is not allowed between pods";
    /// An ICMP error about a packet of no known flow.
    IcmpUnrelated = 48, "icmp_unrelated", "an ICMP error about no known flow";
    /// The network has no route to the destination.
    NoRoute = 49, "no_route", "the network has no route to the destination";
    /// The destination is in the network's subnets but no pod has it.
    NoDestination = 50, "no_destination", "no pod of the network has the destination address";
    /// The destination endpoint is being attached or detached.
    DestinationNotReady = 51, "destination_not_ready", "the destination pod interface is being attached or detached";
    /// A pod sent a packet to its own address.
    SelfAddressed = 52, "self_addressed", "a pod sent a packet to its own address";
    /// The node's stack sent to a pod of a network without host access.
    HostNotAllowed = 53, "host_not_allowed", "the node has no access to this network";
    /// The flow table rejected the entry.
    FlowTableFull = 54, "flow_table_full", "the flow table rejected a new entry";
    /// To a loopback address: with `route_localnet` (kube-proxy sets it) the node would deliver it to its own services.
    Loopback = 55, "loopback", "loopback addresses are not allowed";
    /// The sender's network policies allow no such egress.
    PolicyEgress = 56, "policy_egress", "the sender's network policies do not allow it to send this";
    /// The receiver's network policies allow no such ingress.
    PolicyIngress = 57, "policy_ingress", "the receiver's network policies do not allow it to receive this";
    /// An EgressPolicy of the sender denies it.
    PolicyExternal = 58, "policy_beyond", "an egress policy of the sender does not allow it to leave";
    /// In the range of virtual addresses, but no service has the address.
    NoService = 59, "no_service", "no service has this address of the service range";
    /// The service has no such port: refused (TCP RST, ICMP port unreachable).
    NoServicePort = 60, "no_service_port", "the service has no such port";
    /// The service has no usable backend: refused.
    NoBackend = 61, "no_backend", "the service has no usable backend";
    /// The service has a local traffic policy, and this node has no backend.
    NoLocalBackend = 62, "no_local_backend", "the service has no usable backend on this node";
    /// The endpoint has reached its maximum number of flows.
    FlowQuota = 63, "flow_quota", "the pod has reached its maximum number of flows";
    /// The replies of the translated flow would be those of another live flow.
    TupleInUse = 64, "tuple_in_use", "another connection of the pod uses the same ports towards the same backend";
    /// An ICMP error quotes a fragment of a translated flow, whose flow cannot be determined.
    IcmpFragment = 65, "icmp_fragment", "an ICMP error quotes a fragment of a translated packet";
    /// All masquerade ports are in use for this destination.
    MasqueradePorts = 66, "masquerade_ports", "all masquerade ports towards this destination are in use";
    /// The protocol has no ports to masquerade with.
    MasqueradeProtocol = 67, "masquerade_protocol", "the protocol cannot be masqueraded";
    /// No address to masquerade with, or no route.
    MasqueradeAddress = 68, "masquerade_address", "the node has no address or no route to masquerade with";
    /// The packet exceeds the MTU of the uplink or towards the destination's node: answered with that MTU.
    TooBig = 69, "too_big", "larger than the MTU of the uplink or of the way to another node";
    /// The time to live has expired: answered.
    TimeExceeded = 70, "time_exceeded", "the time to live has expired";
    /// Leaving the node with a pod's address although its network masquerades.
    Untranslated = 71, "untranslated", "would leave the node with a pod's address as source";
    /// From outside with a source address of a pod network.
    BogonSource = 72, "bogon_source", "came from outside with a source address of a pod network";
    /// From outside, from an address of the deny list.
    DenyListed = 73, "deny_listed", "the source address is on the node's deny list";
    /// The address that an egress policy or the network demands is not this node's to use.
    EgressAddress = 74, "egress_address", "the address that the pod must leave with may not be used on this node, or no node answers for it";
    /// `NODES` has no usable row of the node that the destination's route names.
    NoNode = 75, "no_node", "the way to the node of the destination pod, or of the port of the egress address, is not known";
    /// From another node than the one that the source's route names, or by another way.
    ForeignNode = 76, "foreign_node", "came from a node that does not have the source address";
    /// Through the tunnel, for a network without pods here.
    UnknownNetwork = 77, "unknown_network", "came through the tunnel for a network that this node does not have";
    /// From another node, with a source of the network's subnets that no node has as far as this one knows.
    OwnerUnknown = 78, "owner_unknown", "came from another node, and no node is known to have the source address";
    /// Sent to the port of the nodes' tunnels, but not by the tunnel.
    OverlayPort = 79, "overlay_port", "only the nodes may send to the port of the tunnel between them";
    /// From the node that is responsible for an egress address, to a port that no pod of this node has a flow from.
    NoFlow = 80, "no_flow", "came for an egress address, and no pod on this node has such a flow";
}

impl Verdict {
    /// Code of the first dropping verdict. Forwarding ones are below [`crate::counter::FORWARD_VERDICTS`]; the codes in
    /// between are free.
    pub const FIRST_DROP: u16 = 32;

    /// Whether the packet was dropped.
    #[inline(always)]
    #[must_use]
    pub const fn is_drop(self) -> bool {
        self as u16 >= Self::FIRST_DROP
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_words_are_unique_and_round_trip() {
        let mut words: Vec<&str> = Verdict::ALL.iter().map(|v| v.as_str()).collect();
        for verdict in Verdict::ALL {
            assert_eq!(Verdict::from_code(*verdict as u16), Some(*verdict));
            assert!(!verdict.explanation().is_empty());
        }
        assert_eq!(Verdict::from_code(8), None);
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), Verdict::ALL.len());
    }

    #[test]
    fn forwarding_verdicts_fit_their_counters() {
        for verdict in Verdict::ALL.iter().filter(|v| !v.is_drop()) {
            assert!(u32::from(*verdict as u16) < crate::counter::FORWARD_VERDICTS);
        }
    }
}
