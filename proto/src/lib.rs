//! The gRPC services of KNI: messages, clients and servers, generated from the .proto files beside this crate.

#![forbid(unsafe_code)]

use serde::{Serialize, Serializer};

mod attach_network;
pub mod cni;

/// Encoded `FileDescriptorSet` of all services, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Serializes an absent message as its default.
#[expect(clippy::ref_option, reason = "serde passes a reference to the field")]
fn or_default<T: Serialize + Default, S: Serializer>(message: &Option<T>, serializer: S) -> Result<S::Ok, S::Error> {
    match message {
        Some(message) => message.serialize(serializer),
        None => T::default().serialize(serializer),
    }
}

/// `kni`: the Kubernetes Networking Interface (KEP-4410).
#[expect(
    missing_docs,
    clippy::pedantic,
    clippy::clone_on_ref_ptr,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated; kni.proto is the documentation"
)]
pub mod kni {
    tonic::include_proto!("kni");
}

/// `containerd.services.networking.v1`: containerd's draft of a pod network service.
#[expect(
    missing_docs,
    clippy::pedantic,
    clippy::clone_on_ref_ptr,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated; networking.proto is the documentation"
)]
pub mod networking {
    tonic::include_proto!("containerd.services.networking.v1");
}

/// `kni.runtime.v1`: the agent's own service behind knictl.
#[expect(
    missing_docs,
    clippy::pedantic,
    clippy::clone_on_ref_ptr,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated; runtime.proto is the documentation"
)]
pub mod runtime {
    tonic::include_proto!("kni.runtime.v1");
}
