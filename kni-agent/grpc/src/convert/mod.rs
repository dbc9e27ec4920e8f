//! Converts between the messages of `kni.KNI` and the agent's model.

mod answer;
mod attach;
mod bandwidth;
mod bounds;
mod cni;
mod container_ports;
mod error;
mod extradata;
mod identity;
mod labels;
mod layout;
pub(super) mod pod_network;
mod ports;
mod primary;
mod teardown;
#[cfg(test)]
mod tests;

pub(super) use answer::{created, node_networks, pod_network};
pub(super) use attach::{NetnsAnnotation, attach_request, claim, create_request};
pub(super) use cni::{garbage, garbage_request, invocation};
pub(super) use error::RequestError;
pub(super) use extradata::Extradata;
pub(super) use identity::Identity;
pub(super) use layout::attach_network;
pub(super) use teardown::{delete_request, sandbox_id};
