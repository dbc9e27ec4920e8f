//! Serves `kni.KNI` and `kni.runtime.v1.Runtime` on unix sockets. Speaks protocols, makes no decisions.
//! Layer: edge.
//!
//! [`socket::bind`] makes the sockets, [`server::serve`] serves on them until it is asked to stop. A [`Backend`]
//! performs all operations; an [`Insight`] provides flows, policy and services. The root makes both.

pub mod backend;
pub mod health;
pub mod server;
pub mod socket;

mod accept;
mod call;
mod convert;
mod drops;
mod flow_answer;
mod flows;
mod insight;
mod kni_service;
mod pod_network_service;
mod policy_answer;
mod question;
mod runtime_answer;
mod runtime_service;
mod status;
#[cfg(test)]
mod tests;

pub use backend::Backend;
pub use health::Health;
pub use insight::Insight;
pub use server::{ServeError, Sockets, serve};
pub use socket::{BindError, BoundSocket, bind};
