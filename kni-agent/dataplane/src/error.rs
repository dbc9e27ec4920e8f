//! Defines the errors of the dataplane.

use std::{io, path::PathBuf};

use kni_common::layout::LAYOUT_VERSION;

/// Failure of a dataplane operation; names the map, program, interface or path.
#[derive(Debug, thiserror::Error)]
pub enum DataplaneError {
    /// The ELF could not be loaded.
    #[error("eBPF object: {0}")]
    Object(#[source] Box<aya::EbpfError>),
    /// The object lacks a program or map that this agent needs.
    #[error("eBPF object has no {what} {name}: it is of another version than this agent")]
    Missing {
        /// "program" or "map".
        what: &'static str,
        /// Its name.
        name: &'static str,
    },
    /// A program could not be loaded; the message has the end of the verifier's log.
    #[error("program {program}: {reason}")]
    Load {
        /// Name.
        program: &'static str,
        /// Summary of the verifier's log, or the system error.
        reason: String,
    },
    /// A map operation failed.
    #[error("map {map}: {operation}")]
    Map {
        /// Name.
        map: &'static str,
        /// The failed operation.
        operation: &'static str,
        /// The cause.
        #[source]
        source: Box<aya::maps::MapError>,
    },
    /// A map has no room for a row.
    #[error("map {map} is full: it has room for {capacity} rows")]
    Full {
        /// Name.
        map: &'static str,
        /// Rows that fit.
        capacity: u32,
    },
    /// The cluster has more nodes than the programs can know.
    #[error("map NODES is full: pods here cannot reach pods of more than {capacity} other nodes")]
    TooManyNodes {
        /// Nodes that fit.
        capacity: u32,
    },
    /// An endpoint must not be published before its policies are applied.
    #[error("endpoint {endpoint}: its policies are not applied yet, so it must not be published")]
    NotEnforced {
        /// The endpoint.
        endpoint: u32,
    },
    /// The host interface of a dry run does not exist.
    #[error("endpoint {endpoint} has no host interface (index {ifindex}) in the agent's network namespace")]
    NoInterface {
        /// The endpoint.
        endpoint: u32,
        /// Index that the interface would have.
        ifindex: u32,
    },
    /// A dry run wrote no explanation.
    #[error("program {program}: a dry run wrote no explanation: the object is of another version than this agent")]
    NoExplanation {
        /// Name.
        program: &'static str,
    },
    /// A program could not be attached.
    #[error("{program} at {ifname}: {operation}")]
    Attach {
        /// Name of the program.
        program: &'static str,
        /// Interface.
        ifname: String,
        /// The failed operation.
        operation: &'static str,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An operation on bpffs failed.
    #[error("{}: {operation}", path.display())]
    Pin {
        /// The path.
        path: PathBuf,
        /// The failed operation.
        operation: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The node has maps of another layout than this agent's.
    #[error(
        "{}: maps of layout {found}, and this agent has layout {LAYOUT_VERSION}: start the agent that made them, or \
         drain the node and remove them by `kni-agent cleanup`",
        path.display()
    )]
    OtherLayout {
        /// Their folder.
        path: PathBuf,
        /// Their layout.
        found: u32,
    },
    /// No control group has all processes of the node.
    #[error(
        "cgroup2 is not mounted, or only a part of it is visible: mount the node's /sys/fs/cgroup at /host/sys/fs/cgroup of the agent's container"
    )]
    NoCgroup,
    /// The kernel lacks a feature, or a property of it could not be read.
    #[error("kernel: {0}")]
    Kernel(String),
    /// An endpoint id exceeds the configured maximum.
    #[error("endpoint {id} exceeds the configured {capacity}")]
    EndpointRange {
        /// The id.
        id: u32,
        /// How many fit.
        capacity: u32,
    },
}

impl DataplaneError {
    pub(super) fn map(map: &'static str, operation: &'static str) -> impl FnOnce(aya::maps::MapError) -> Self {
        move |source| Self::Map {
            map,
            operation,
            source: Box::new(source),
        }
    }

    pub(super) fn pin(path: &std::path::Path, operation: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Pin {
            path: path.to_owned(),
            operation,
            source,
        }
    }
}
