//! Tests with an API server: the definitions of `kni.dev`, and several nodes whose agents watch it.

mod api;
mod cluster;
