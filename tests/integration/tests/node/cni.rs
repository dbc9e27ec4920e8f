//! Tests the CNI plugin as container runtimes run it: the real program, one process per call, with the real agent.
//! Tests `b01` to `b20` each cover one behaviour that runtimes rely on.

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
