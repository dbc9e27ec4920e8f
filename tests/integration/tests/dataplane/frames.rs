//! Runs crafted frames through the programs and compares three verdicts: the expected one in the test, the predicted
//! one of the model, and the counted one of the kernel.

mod affinity;
mod budget;
mod delivery;
mod events;
mod extensions;
mod fragments;
mod icmp;
mod isolated_link;
mod lengths;
mod lifecycle;
mod lifetimes;
mod link;
mod metadata;
mod options;
mod outside_services;
mod own_ports;
mod policy;
mod policy_changes;
mod reasons;
mod refusals;
mod services;
mod shares;
mod spoofing;
mod stack;
mod table;
mod translated_errors;
mod truncated;
mod tuples;
mod uplink;
mod xdp_pod;
mod xdp_uplink;
