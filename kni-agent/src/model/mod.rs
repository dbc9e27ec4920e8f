//! The words of the house: identifiers, networks, attachments; no behaviour beyond parsing and display.
//! Layer: model.

pub mod id;
pub mod network;
pub mod request;
pub mod sandbox;
pub mod selection;
pub mod view;

pub use id::{EndpointId, IfName, InvalidId, MacAddr, NetworkId, NetworkName, PodRef, SandboxId};
pub use network::{Network, NetworkSpec};
pub use request::{AttachRequest, PortMapping, PortProtocol, PrimarySelection};
pub use sandbox::{Attachment, NetnsIdentity, Phase, Sandbox};
pub use selection::{NetworkSelection, SelectionError};
