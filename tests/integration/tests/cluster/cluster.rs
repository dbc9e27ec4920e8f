//! Tests several nodes with agents against one real API server.

mod attachments;
mod away;
mod bed;
mod blocks;
mod churn;
mod controllers;
mod exhaustion;
mod figures;
mod quiet;
mod reports;
mod rights;
mod scene;
mod standing;
mod tenants;
