//! Converts between the messages of `kni.KNI` and the agent's model.

mod answer;
mod attach;
mod bandwidth;
mod bounds;
mod cni;
mod container_ports;
mod error;
mod identity;
mod labels;
pub(super) mod pod_network;
mod ports;
mod primary;
mod teardown;
#[cfg(test)]
mod tests;

pub(super) use answer::{created, node_networks, pod_network};
pub(super) use attach::{attach_request, claim, create_request};
pub(super) use cni::{garbage, garbage_request, invocation};
pub(super) use error::RequestError;
pub(super) use teardown::{delete_request, sandbox_id};
