//! Compiles the part of the container runtime interface that we call.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let schema = "proto/cri.proto";
    println!("cargo::rerun-if-changed={schema}");
    let descriptors = protox::compile([schema], ["proto"])?;
    tonic_prost_build::configure()
        .build_server(false)
        .compile_fds(descriptors)?;
    Ok(())
}
