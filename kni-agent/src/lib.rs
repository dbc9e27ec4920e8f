//! Parses arguments, wires the layers, starts and stops the agent.
//! Layer: root.
//!
//! The layers below are crates of their own, `kni-agent/*`; each depends only on crates of lower layers, so that cargo
//! refuses an upward import (`cargo xtask arch` checks the rest):
//!
//! | layer | crates `kni-*` | rule |
//! |---|---|---|
//! | root | `agent` | wires everything together; orders the application of desired state |
//! | edge | `grpc`, `http`, `manifests` | speak a protocol, decide nothing |
//! | service, by rank | `controllers` above `inspect` above `pods` above `uplink`, `fabric` and `reflectors` above `claims`, `cluster`, `enforcement` and `flows` above `tasks` | own order, locks, undo |
//! | driver | `netlink`, `dataplane`, `store`, `plugins` | one outside thing each; never import each other |
//! | engine | `ipam`, `policy`, `services` | pure: no I/O, no async, no clock |
//! | model | `crd` above `model`; `metrics` | shared types |

pub mod agent;
pub mod allocator;
pub mod cli;
pub mod cni_install;
pub mod config_file;
pub mod container;
pub mod footprint;
pub mod privileges;
pub mod telemetry;
