//! The life of sandboxes as clients see it, on the real agent: calls in every order, failures, crowds, and no leaks.

mod access;
mod crowd;
mod interfaces;
mod networks;
mod order;
mod refused;
