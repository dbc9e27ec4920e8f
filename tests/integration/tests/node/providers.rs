//! Tests networks of other providers: macvlan, devices of the node, taps, and interfaces of CNI plugins. They take
//! about 90 s on two CPUs, mostly for kills.

mod devices;
mod kills;
mod link;
mod plugins;
mod policy;
pub(crate) mod scene;
