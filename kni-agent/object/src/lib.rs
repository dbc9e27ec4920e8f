//! Embeds the eBPF object.
//! Layer: model.
//!
//! A crate of its own below the programs that load it: a changed object compiles neither the driver of the dataplane
//! nor the services above it again.

#![forbid(unsafe_code)]

/// The object, empty where the build found none.
static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kni-ebpf.o"));

/// The build found no object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this kni-agent holds no eBPF object: build it with `cargo xtask build-ebpf` first, or name one with --ebpf-object"
)]
pub struct Missing;

/// The object that the build embedded.
pub fn embedded() -> Result<Vec<u8>, Missing> {
    if OBJECT.is_empty() {
        Err(Missing)
    } else {
        Ok(OBJECT.to_vec())
    }
}
