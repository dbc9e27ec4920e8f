//! Checks over its unix socket that a server of the KNI gRPC API (KEP-4410) behaves as the kubelet needs it.
//!
//! [`run`] executes the cases of [`cases`] and returns a [`Report`]. It needs root, and must run where the paths of the
//! server's network namespaces are visible, in the network namespace that is the server's host. Nothing in it depends
//! on one implementation.

#![forbid(unsafe_code)]

mod cases;
mod client;
mod error;
mod limits;
mod links;
mod namespace;
mod report;
mod run;
mod sandbox;
mod session;
mod traffic;
mod wait;
mod wire;

pub use cases::{Case, Level, cases};
pub use error::Error;
pub use report::{CaseResult, Outcome, Report};
pub use run::{Options, run};
