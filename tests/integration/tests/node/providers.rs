//! Networks whose interfaces are no veth pairs of ours: macvlan, devices of the node, taps, and what CNI plugins make.
//! About 90 s of wall clock on two CPUs, most of it kills.

mod devices;
mod kills;
mod plugins;
mod policy;
pub(crate) mod scene;
