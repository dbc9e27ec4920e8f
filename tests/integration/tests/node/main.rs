//! Tests a node with an agent: pods and their networks, policies, services, egress, and the clients of the agent.

mod attack;
mod authority;
mod bandwidth;
mod cni;
mod conformance;
mod dnat;
mod egress;
mod harness;
mod isolation;
mod lifecycle;
mod node_traffic;
mod policy;
mod providers;
mod restart;
mod runtime_clients;
mod services;
mod several_interfaces;
mod watched;
