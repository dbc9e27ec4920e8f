//! Tests exits and restarts of the agent, of every kind and at every moment: pods and their traffic continue, and
//! nothing leaks.

mod chaos;
mod lost_state;
mod steps;
mod takeover;
mod under_policy;
mod xdp;
