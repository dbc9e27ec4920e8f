//! Attaches and detaches pod sandboxes: owns the order of steps, the locks, the undo and the state in memory.
//! Layer: service.
//!
//! ```text
//! request: pending deletes -> labels and networks from the cluster -> attach the pod
//!          -> attach its additional interfaces
//! attach:  plan (pure) -> record Pending -> policies enforced -> per interface: device, programs, addresses, routes
//!          -> rules by source address, if the pod has several interfaces -> dataplane rows -> record Ready
//! detach:  record Deleting -> dataplane rows, devices -> release addresses, queue veth pairs
//!          -> (background) delete them
//! ```
//!
//! A failed attach is undone by the same code that detaches, driven by the record: it lists every effect (I5).
//!
//! | from top to bottom | owns |
//! |---|---|
//! | [`Pods`], `prepare`, `journal` | the calls of clients, completed from the cluster, after pending deletes |
//! | `takeover`, `recovery` | the start; records that were lost |
//! | `background`, `repair` | the work for later pods; detached programs, lost pins and the state's file |
//! | `sandboxes` | attach and detach of one sandbox, and its lock |
//! | `namespaces` | the namespaces that the agent makes, and the prewarmed ones |
//! | `reaper`, `networks` | queued removals; networks and their numbers |
//! | `rests` | addresses that no other pod may have yet |
//! | `interfaces` | one provider for each kind of interface |
//! | `registry` | the state in memory and its store, under one lock |

mod alias;
mod background;
mod cleanup;
mod clock;
mod error;
mod interfaces;
mod journal;
mod kernel;
mod namespaces;
mod networks;
mod plan;
mod pods;
mod prepare;
mod queries;
mod reaper;
mod recovery;
mod registry;
mod repair;
mod rests;
mod sandboxes;
mod takeover;

pub use cleanup::cleanup;
pub use error::{AttachError, ErrorKind, GateError, Subject};
pub use interfaces::{host_end_exists, problems_without_row};
pub use journal::remove_pending_deletes;
pub use namespaces::PoolSize;
pub use pods::{Pods, PodsOptions};
pub use queries::Counts;
pub use recovery::Recovery;
pub use sandboxes::{DeleteRequest, Garbage, GarbageRequest, LostRight};
