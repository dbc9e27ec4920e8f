//! An API server: the definitions of `kni.dev`, and several nodes whose agents follow it.

mod api;
mod cluster;
