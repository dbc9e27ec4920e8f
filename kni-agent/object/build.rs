//! Embeds the eBPF object that `cargo xtask build-ebpf` made, or nothing: the crate must build without the toolchain.

use std::{env, error::Error, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed=KNI_EBPF_OBJECT");
    let built = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../target/ebpf/kni-ebpf.o");
    let object = env::var_os("KNI_EBPF_OBJECT").map_or(built, PathBuf::from);
    println!("cargo::rerun-if-changed={}", object.display());
    // Without a file the object is empty; the agent then reports this when it starts.
    let bytes = fs::read(&object).unwrap_or_default();
    fs::write(PathBuf::from(env::var("OUT_DIR")?).join("kni-ebpf.o"), bytes)?;
    Ok(())
}
