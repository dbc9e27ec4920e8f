//! Compiles the .proto files with protox, so that no system protoc is needed.

use std::{env, error::Error, path::PathBuf};

use prost::Message as _;

fn main() -> Result<(), Box<dyn Error>> {
    let protos = ["kni.proto", "networking.proto", "runtime.proto"];
    for proto in protos {
        println!("cargo::rerun-if-changed={proto}");
    }
    let descriptors = protox::compile(protos, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?).join("descriptors.bin");
    std::fs::write(out, descriptors.encode_to_vec())?;
    tonic_prost_build::configure().btree_map(".").compile_fds(descriptors)?;
    Ok(())
}
