//! Provides the harness of the tests on a real kernel: separate nodes, the real agent, the calls of a kubelet, and real
//! packets.
//!
//! A [`Node`] is a network and a mount namespace in which an [`Agent`] runs as on a separate machine; the machine that
//! runs the tests is not changed. A [`Kubelet`] creates [`Pod`]s through KNI as the kubelet does. [`traffic`]
//! identifies the server that answers at an address, [`frames`] builds frames that no socket would send, and a
//! [`NodeSnapshot`] shows leftovers. All resources are released when their values are dropped, also when a test fails.

pub mod agent;
pub mod api_server;
pub mod bind;
pub mod cluster;
pub mod cpu_times;
pub mod dice;
pub mod echo;
pub mod exclusive;
pub mod foreign;
pub mod frames;
pub mod interpreter;
pub mod kubelet;
pub mod machine;
pub mod manifest;
pub mod model;
pub mod one_cpu;
pub mod oracle;
pub mod outside;
pub mod privilege;
pub mod programs;
pub mod simulation;
pub mod snapshot;
pub mod stage;
pub mod syscall;
pub mod trace;
pub mod traffic;
pub mod verifier;
pub mod wait;
pub mod world;

pub use agent::{Agent, AgentOptions};
pub use cluster::Cluster;
pub use kni_local_node::{namespaces, node};
pub use kubelet::{Kubelet, Pod};
pub use machine::Machine;
pub use manifest::Manifest;
pub use namespaces::Namespaces;
pub use node::Node;
pub use one_cpu::on_one_cpu;
pub use outside::{LeakWatch, Outside};
pub use snapshot::NodeSnapshot;
pub use stage::Stage;
pub use wait::{eventually, eventually_sync, patience};

/// Whether long proofs were asked for: `cargo xtask test --long`.
pub fn long() -> bool {
    std::env::var("KNI_LONG").is_ok_and(|value| value == "1")
}

/// The seed of a test for which none is chosen: `fixed` in the gate, so that a change fails by its own defects only;
/// a random one in long tests. A seed that has found a defect becomes one more fixed case.
pub fn default_seed(fixed: u64) -> u64 {
    if long() { fastrand::u64(..) } else { fixed }
}
