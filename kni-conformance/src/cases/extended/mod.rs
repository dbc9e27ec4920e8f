//! Lists the cases of level extended: features that a server may offer.

mod details;
mod families;
mod host_ports;
mod names;
mod node;

use super::{Case, Check, Level};

const fn extended(name: &'static str, about: &'static str, check: Check) -> Case {
    super::case(Level::Extended, name, about, check)
}

/// The cases.
pub(super) const CASES: &[Case] = &[
    extended(
        "isolation-domain-methods",
        "CreateIsolationDomain and DeleteIsolationDomain act as CreateNetwork and DeleteNetwork",
        |session| Box::pin(names::isolation_domain(session)),
    ),
    extended(
        "attach-network-methods",
        "AttachNetwork and DetachNetwork act as AttachInterface and DetachInterface",
        |session| Box::pin(names::attach_network(session)),
    ),
    extended(
        "dual-stack",
        "pods have working addresses of both families",
        |session| Box::pin(families::dual_stack(session)),
    ),
    extended(
        "address-details",
        "extradata[\"addresses\"] of an interface has family, prefix and gateway of each address",
        |session| Box::pin(details::addresses(session)),
    ),
    extended("host-port-tcp", "a TCP host port leads to the pod", |session| {
        Box::pin(host_ports::tcp(session))
    }),
    extended("host-port-udp", "a UDP host port leads to the pod", |session| {
        Box::pin(host_ports::udp(session))
    }),
    extended(
        "features",
        "QueryNodeNetworks lists the features of each network",
        |session| Box::pin(node::features(session)),
    ),
    extended(
        "setup-node-network",
        "SetupNodeNetwork may be repeated and does not affect pods",
        |session| Box::pin(node::set_up(session)),
    ),
    extended(
        "readiness-reason",
        "a network that is not ready has a reason",
        |session| Box::pin(node::readiness_reason(session)),
    ),
    extended(
        "netns-path-prefix",
        "CreateNetwork returns a path with the requested prefix",
        |session| Box::pin(names::path_prefix(session)),
    ),
    extended(
        "odd-ids",
        "teardown of ids that no runtime makes succeeds and does not affect pods",
        |session| Box::pin(names::odd_ids(session)),
    ),
    extended(
        "long-names",
        "names longer than 253 bytes, as container runtimes make them, are accepted",
        |session| Box::pin(names::long_names(session)),
    ),
];
