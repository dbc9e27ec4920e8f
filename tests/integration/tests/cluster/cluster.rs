//! Tests several nodes with agents against one real API server.

mod attachments;
mod away;
mod bed;
mod blocks;
mod churn;
mod egress_owners;
mod egress_refused;
mod egress_writes;
mod exhaustion;
mod figures;
mod quiet;
mod reports;
mod scene;
mod standing;
mod tenants;
