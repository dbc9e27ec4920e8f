//! The node agent's modules, listed in layer order: an import may only point downward (`cargo xtask arch`).
//!
//! | layer | modules | rule |
//! |---|---|---|
//! | root | `agent`, `cli`, `cni_install`, `cni_journal`, `config_file`, `container`, `footprint`, `metrics`, `privileges`, `telemetry` | wire everything together |
//! | edge | `controllers`, `grpc`, `http`, `manifests` | speak a protocol, decide nothing |
//! | service | `attach`, `flows`, `policy_sync`, `uplink` | own order, locks, undo |
//! | driver | `cni`, `netlink`, `dataplane`, `store` | one outside thing each; never import each other |
//! | engine | `ipam`, `policy`, `services` | pure: no I/O, no async, no clock |
//! | model | `model`, `crd` | the words |

pub mod agent;
pub mod attach;
pub mod cli;
pub mod cni;
pub mod cni_install;
pub mod cni_journal;
pub mod config_file;
pub mod container;
pub mod controllers;
pub mod crd;
pub mod dataplane;
pub mod flows;
pub mod footprint;
pub mod grpc;
pub mod http;
pub mod ipam;
pub mod manifests;
pub mod metrics;
pub mod model;
pub mod netlink;
pub mod policy;
pub mod policy_sync;
pub mod privileges;
pub mod services;
pub mod store;
pub mod telemetry;
pub mod uplink;
