//! The harness of the tests on a real kernel: nodes of their own, the real agent, a kubelet's calls, and real packets.
//!
//! A [`Node`] is a network and a mount namespace in which an [`Agent`] runs as on a machine of its own; the machine
//! the tests run on is not touched. A [`Kubelet`] creates [`Pod`]s through KNI as the kubelet does. [`traffic`] reports
//! who answers at an address, [`frames`] builds what no socket would send, and a [`NodeSnapshot`] shows what was left
//! behind. Everything is taken away when its value is dropped, also when a test fails.

pub mod agent;
pub mod api_server;
pub mod cluster;
pub mod echo;
pub mod exclusive;
pub mod foreign;
pub mod frames;
pub mod kubelet;
pub mod machine;
pub mod manifest;
pub mod model;
pub mod oracle;
pub mod outside;
pub mod privilege;
pub mod programs;
pub mod snapshot;
pub mod stage;
pub mod traffic;
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
pub use outside::{LeakWatch, Outside};
pub use snapshot::NodeSnapshot;
pub use stage::Stage;
pub use wait::{eventually, eventually_sync};
