//! Networks of other providers: macvlan, devices of the node, taps, and interfaces of CNI plugins.
//! About 90 s of wall clock on two CPUs, most of it kills.

mod devices;
mod kills;
mod plugins;
mod policy;
pub(crate) mod scene;
