//! Tests the kinds of `kni.dev` at a real API server: accepted and refused objects, error messages, printed columns.

mod accepted;
mod changes;
mod explained;
mod invalid;
mod refused;
mod scene;
mod shown;

pub(crate) use scene::repository;
