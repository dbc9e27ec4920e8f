//! Tests with an API server: the definitions of `kni.dev`, the Helm chart, and several nodes whose agents watch it.

mod access;
mod api;
mod chart;
mod cluster;
