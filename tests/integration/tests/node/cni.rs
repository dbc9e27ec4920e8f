//! The CNI plugin as container runtimes run it: the real program, a process for each call, against the real agent.
//! Tests `b01` to `b20` show one behaviour each that runtimes rely on.

mod add;
mod check;
mod crash;
mod del;
mod delegate;
mod garbage;
mod install;
mod many;
mod policy;
mod results;
pub(crate) mod scene;
mod size;
mod status;
