//! Defines the agent's types: identifiers, networks, attachments; no behaviour except parsing and display.
//! Layer: model.

pub mod access;
pub mod bandwidth;
pub mod durations;
pub mod egress;
pub mod enforcement;
pub mod error_chain;
pub mod flow_view;
pub mod home;
pub mod id;
pub mod joining;
pub mod network;
mod network_number;
pub mod policy;
mod port_mapping;
pub mod provider;
pub mod request;
pub mod sandbox;
pub mod selection;
pub mod service;
pub mod view;

pub use access::Access;
pub use bandwidth::{Bandwidth, Rate};
pub use enforcement::{Enforcement, GoneBackend, PolicyStep, PolicyTables, ServiceStep, ServiceTables};
pub use error_chain::error_chain;
pub use home::Home;
pub use id::{EndpointId, IfName, InvalidId, MacAddr, NetworkId, NetworkName, PodRef, SandboxId};
pub use joining::{AccessRefusal, AccessRule};
pub use network::{Fabric, Network, NetworkSpec};
pub use network_number::{NumberProblem, number_in_use, shared_numbers};
pub use port_mapping::{PortMapping, PortProtocol};
pub use provider::{Feature, InterfaceKind, Provider};
pub use request::{AttachRequest, PluginHints, PrimarySelection};
pub use sandbox::{Attachment, CniAttachment, NetnsIdentity, Phase, Sandbox};
pub use selection::{NetworkSelection, SelectionError, Selections};
