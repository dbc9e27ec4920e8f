//! Tests several nodes with agents against one real API server.

mod attachments;
mod away;
mod bed;
mod blocks;
mod churn;
mod exhaustion;
mod figures;
mod quiet;
mod quota;
mod reports;
mod scene;
mod standing;
mod tenants;
