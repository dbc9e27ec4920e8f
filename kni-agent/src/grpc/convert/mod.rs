//! Between the messages of `kni.KNI` and the agent's own words.

mod answer;
mod attach;
mod bounds;
mod error;
mod identity;
mod ports;
mod primary;
mod teardown;
#[cfg(test)]
mod tests;

pub(super) use answer::{created, node_networks, pod_network};
pub(super) use attach::{attach_request, claim, create_request};
pub(super) use error::RequestError;
pub(super) use teardown::{delete_request, sandbox_id};
