//! Tests the lifecycle of sandboxes from the clients' view, with the real agent: calls in every order, failures,
//! concurrency, and leaks.

mod access;
mod crowd;
mod interfaces;
mod memory;
mod networks;
mod order;
mod refused;
