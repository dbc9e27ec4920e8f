//! What the dataplane can fail at.

use std::{io, path::PathBuf};

/// Failure of a dataplane operation; names the map, program, interface or path.
#[derive(Debug, thiserror::Error)]
pub enum DataplaneError {
    /// The agent was built without the eBPF object and none was named.
    #[error(
        "this kni-agent holds no eBPF object: build it with `cargo xtask build-ebpf` first, or name one with --ebpf-object"
    )]
    NoObject,
    /// The ELF could not be loaded.
    #[error("eBPF object: {0}")]
    Object(#[source] Box<aya::EbpfError>),
    /// The object lacks a program or map that this agent needs.
    #[error("eBPF object has no {what} {name}: it is not of this agent's version")]
    Missing {
        /// "program" or "map".
        what: &'static str,
        /// Its name.
        name: &'static str,
    },
    /// A program could not be loaded; the verifier's last words are in the message.
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
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        #[source]
        source: Box<aya::maps::MapError>,
    },
    /// A map takes no more rows.
    #[error("map {map} is full: it takes {capacity} rows")]
    Full {
        /// Name.
        map: &'static str,
        /// Rows that fit.
        capacity: u32,
    },
    /// An endpoint was to be published before policy had spoken of it.
    #[error("endpoint {endpoint}: nothing says yet what its policies allow, so it may not be published")]
    NotEnforced {
        /// The endpoint.
        endpoint: u32,
    },
    /// A question was asked at an interface that is not there.
    #[error("endpoint {endpoint} has no host interface (index {ifindex}) in the agent's network namespace")]
    NoInterface {
        /// The endpoint.
        endpoint: u32,
        /// Index that the interface would have.
        ifindex: u32,
    },
    /// A dry run ended without saying what it decided.
    #[error("program {program}: a dry run left no explanation: the object is not of this agent's version")]
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
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A path on bpffs.
    #[error("{}: {operation}", path.display())]
    Pin {
        /// The path.
        path: PathBuf,
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The kernel's version could not be read, or lacks what is asked for.
    #[error("kernel: {0}")]
    Kernel(String),
    /// An endpoint id beyond the configured maximum.
    #[error("endpoint {id} is beyond the configured {capacity}")]
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
