//! Serves `kni.KNI` and `kni.runtime.v1.Runtime` on unix sockets. Speaks protocols, makes no decisions.
//! Layer: edge.
//!
//! [`socket::bind`] makes the sockets, [`server::serve`] serves on them until it is asked to stop. A [`Backend`]
//! attaches and detaches, an [`Inspect`] reads the node; the agent's are [`kni_pods::Pods`] and
//! [`kni_inspect::Inspector`].

pub mod backend;
pub mod health;
pub mod server;
pub mod socket;

mod accept;
mod call;
mod convert;
mod drops;
mod features;
mod flow_answer;
mod flows;
mod inspect;
mod kni_service;
mod pod_network_service;
mod policy_answer;
mod question;
mod runtime_answer;
mod runtime_service;
mod services;
mod setup;
mod status;
#[cfg(test)]
mod tests;
mod unknown_keys;

pub use backend::Backend;
pub use health::Health;
pub use inspect::Inspect;
pub use server::{ServeError, Sockets, serve};
pub use services::Services;
pub use setup::{Outcome, PreparedPart, Setup};
pub use socket::{BindError, BoundSocket, bind};
pub use unknown_keys::{MAX_LOGGED_KEYS, UnknownKeys};
