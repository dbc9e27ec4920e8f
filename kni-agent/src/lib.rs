//! The node agent's modules, listed in layer order: an import may only point downward (`cargo xtask arch`).
//!
//! | layer | modules | rule |
//! |---|---|---|
//! | root | `agent`, `cli`, `footprint`, `privileges`, `telemetry` | wire everything together |
//! | edge | `grpc`, `manifests` | speak a protocol, decide nothing |
//! | service | `attach` | owns order, locks, undo |
//! | driver | `netlink`, `dataplane`, `store` | one outside thing each; never import each other |
//! | engine | `ipam` | pure: no I/O, no async, no clock |
//! | model | `model`, `crd` | the words |

pub mod agent;
pub mod attach;
pub mod cli;
pub mod crd;
pub mod dataplane;
pub mod footprint;
pub mod grpc;
pub mod ipam;
pub mod manifests;
pub mod model;
pub mod netlink;
pub mod privileges;
pub mod store;
pub mod telemetry;
