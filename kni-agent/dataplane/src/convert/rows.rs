//! Declares the rows of layout 2 that differ from today's, as the programs of that layout wrote them.

use kni_common::flow::Ports;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Declares row types, with zerocopy's proof that they have no padding.
macro_rules! rows {
    ($($(#[$meta:meta])* pub(in crate::convert) struct $name:ident { $($body:tt)* })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        pub(in crate::convert) struct $name { $($body)* }

        // SAFETY: `repr(C)`, `Copy`, and zerocopy's derives above compile only for types in which every byte is
        // initialised and every bit pattern is valid.
        unsafe impl aya::Pod for $name {}
    )*};
}

rows! {
    /// Value of `ENDPOINTS`.
    pub(in crate::convert) struct Endpoint {
        /// Network id, 0 when the row is free.
        pub(in crate::convert) network: u32,
        /// Increases with every change that flows depend on.
        pub(in crate::convert) generation: u32,
        /// The generation at which the row got its owner.
        pub(in crate::convert) incarnation: u32,
        /// Bits `FLAG_*`: today's.
        pub(in crate::convert) flags: u32,
        /// Policy set.
        pub(in crate::convert) policy: u32,
        /// Identity of the IPv4 address.
        pub(in crate::convert) identity4: u32,
        /// Identity of the IPv6 address.
        pub(in crate::convert) identity6: u32,
        /// IPv4 address, network byte order.
        pub(in crate::convert) ipv4: [u8; 4],
        /// IPv6 address, network byte order.
        pub(in crate::convert) ipv6: [u8; 16],
        /// MAC address of the pod end.
        pub(in crate::convert) mac: [u8; 6],
        /// MAC address of the host end.
        pub(in crate::convert) host_mac: [u8; 6],
        /// Index of the host interface.
        pub(in crate::convert) ifindex: u32,
    }

    /// Value of `CONFIG`; times in jiffies.
    pub(in crate::convert) struct Config {
        /// jiffies per second.
        pub(in crate::convert) hz: u32,
        /// Flow events per endpoint, CPU and window.
        pub(in crate::convert) flow_events: u32,
        /// Most open flows of an endpoint.
        pub(in crate::convert) flows_per_endpoint: u32,
        /// Lifetime of TCP until the first reply.
        pub(in crate::convert) tcp_new: u32,
        /// Lifetime of TCP after it.
        pub(in crate::convert) tcp_established: u32,
        /// Lifetime of TCP after FIN from both sides.
        pub(in crate::convert) tcp_closing: u32,
        /// Lifetime of other protocols until the first reply.
        pub(in crate::convert) other_new: u32,
        /// Lifetime of UDP after it.
        pub(in crate::convert) udp_established: u32,
        /// Lifetime of SCTP after it.
        pub(in crate::convert) sctp_established: u32,
        /// Lifetime of other protocols after it.
        pub(in crate::convert) other_established: u32,
        /// Index of the uplink, 0 for none.
        pub(in crate::convert) uplink: u32,
    }

    /// Value of `ROUTES`.
    pub(in crate::convert) struct Route {
        /// One of `ACTION_*`: today's numbers.
        pub(in crate::convert) action: u32,
    }

    /// Value of `SERVICES`; the key is today's.
    pub(in crate::convert) struct Service {
        /// Id of the service port.
        pub(in crate::convert) id: u32,
        /// List of backends.
        pub(in crate::convert) backends: u32,
        /// Backends in the list.
        pub(in crate::convert) count: u32,
        /// Bits `SERVICE_*`: today's.
        pub(in crate::convert) flags: u32,
        /// jiffies of session affinity.
        pub(in crate::convert) affinity: u32,
    }

    /// Value of `BACKENDS`; the key is today's.
    pub(in crate::convert) struct Backend {
        /// Address, network byte order.
        pub(in crate::convert) address: [u8; 16],
        /// Port, network byte order.
        pub(in crate::convert) port: [u8; 2],
        /// Zero.
        pub(in crate::convert) zero: u16,
    }

    /// Key of `FLOWS4`: the packets of one direction.
    pub(in crate::convert) struct FlowKey4 {
        /// Network id.
        pub(in crate::convert) network: u32,
        /// Source address, network byte order.
        pub(in crate::convert) source: [u8; 4],
        /// Destination address, network byte order.
        pub(in crate::convert) destination: [u8; 4],
        /// Ports.
        pub(in crate::convert) ports: Ports,
        /// IP protocol number.
        pub(in crate::convert) protocol: u32,
    }

    /// Key of `FLOWS6`.
    pub(in crate::convert) struct FlowKey6 {
        /// Network id.
        pub(in crate::convert) network: u32,
        /// Source address, network byte order.
        pub(in crate::convert) source: [u8; 16],
        /// Destination address, network byte order.
        pub(in crate::convert) destination: [u8; 16],
        /// Ports.
        pub(in crate::convert) ports: Ports,
        /// Transport protocol number.
        pub(in crate::convert) protocol: u32,
    }

    /// Value of both flow tables.
    pub(in crate::convert) struct FlowValue {
        /// jiffies of the last packet.
        pub(in crate::convert) last_seen: u64,
        /// Generation of the sending endpoint, 0 when it is not a local one.
        pub(in crate::convert) source_generation: u32,
        /// Generation of the receiving endpoint, likewise.
        pub(in crate::convert) destination_generation: u32,
        /// Id of the receiving endpoint, 0 when it is not a local one.
        pub(in crate::convert) destination: u32,
        /// jiffies after `last_seen` at which the row expires.
        pub(in crate::convert) lifetime: u32,
        /// One of `KIND_*`.
        pub(in crate::convert) kind: u16,
        /// Bits of [`flags`].
        pub(in crate::convert) flags: u16,
        /// Where an address is translated: the packet's ports after translation.
        pub(in crate::convert) ports: Ports,
        /// With `TO` the destination address, with `FROM` the source address that the packet gets. With both the
        /// destination address, the new source being the packet's own destination; at the uplink (IPv4 only) the source
        /// address in the first four bytes and the destination address in the next four.
        pub(in crate::convert) address: [u8; 16],
    }
}

/// Codes of verdicts that drop were smaller by this number.
pub(super) const DROPS_MOVED: u32 = 24;

/// Code of the first verdict that dropped.
pub(super) const FIRST_DROP: u32 = 8;

/// The mark of packets that passed policy, towards pods with a limited rate.
pub(super) const JUDGED_MARK: u32 = 0x4b4e_494a;

/// Between two endpoints of the node.
pub(super) const KIND_LOCAL: u16 = 1;
/// From a pod into the node's stack.
pub(super) const KIND_TO_STACK: u16 = 2;
/// From the node's stack to a pod.
pub(super) const KIND_FROM_STACK: u16 = 3;
/// Across the uplink, in either direction.
pub(super) const KIND_UPLINK: u16 = 4;

/// Bits of [`FlowValue::flags`].
pub(super) mod flags {
    /// The row is of the reply direction.
    pub(in crate::convert) const REPLY: u16 = 1;
    /// A reply was seen.
    pub(in crate::convert) const CONFIRMED: u16 = 2;
    /// TCP: this direction sent its FIN.
    pub(in crate::convert) const FIN: u16 = 4;
    /// TCP: closed by FIN from both sides.
    pub(in crate::convert) const CLOSED: u16 = 8;
    /// The destination is translated.
    pub(in crate::convert) const TO: u16 = 16;
    /// The source is translated.
    pub(in crate::convert) const FROM: u16 = 32;
    /// The pod reaches itself through a service.
    pub(in crate::convert) const HAIRPIN: u16 = 64;
    /// Opened by the node itself.
    pub(in crate::convert) const NODE: u16 = 128;
}

const _: () = assert!(
    size_of::<Endpoint>() == 64
        && size_of::<Config>() == 44
        && size_of::<Route>() == 4
        && size_of::<FlowKey4>() == 20
        && size_of::<FlowKey6>() == 44
        && size_of::<FlowValue>() == 48
);
