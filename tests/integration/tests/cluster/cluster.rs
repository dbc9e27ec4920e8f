//! Tests several nodes with agents against one real API server.

mod attachments;
mod away;
mod bed;
mod blocks;
mod churn;
mod claims;
mod controllers;
mod egress_owners;
mod egress_refused;
mod egress_writes;
mod exhaustion;
mod faults;
mod figures;
mod members;
mod numbers;
mod quiet;
mod quota;
mod reports;
mod rests;
mod rights;
pub(crate) mod scene;
mod skew;
mod standing;
mod tasks;
mod tenants;
mod units;
