//! Compiles the .proto files with protox, so that no system protoc is needed.

use std::{env, error::Error, path::PathBuf};

use prost::Message as _;

/// Messages in messages that the agent always sets, but that protobuf may omit: documents have their defaults then.
const ALWAYS_SET: [&str; 8] = [
    "Interface.from_pod",
    "Interface.to_pod",
    "Interface.dropped",
    "DropCount.count",
    "Flow.source",
    "Flow.destination",
    "Rule.policy",
    "ExplainResponse.flow",
];

fn main() -> Result<(), Box<dyn Error>> {
    let protos = ["kni.proto", "networking.proto", "runtime.proto"];
    for proto in protos {
        println!("cargo::rerun-if-changed={proto}");
    }
    let descriptors = protox::compile(protos, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?).join("descriptors.bin");
    std::fs::write(out, descriptors.encode_to_vec())?;
    // knictl prints the messages of the runtime service as documents, and reads those of the knictl of other nodes.
    let mut config = tonic_prost_build::configure().btree_map(".").message_attribute(
        ".kni.runtime.v1",
        "#[derive(serde::Serialize, serde::Deserialize)] #[serde(rename_all = \"camelCase\", default)]",
    );
    for field in ALWAYS_SET {
        let attribute = "#[serde(serialize_with = \"crate::or_default\")]";
        config = config.field_attribute(format!(".kni.runtime.v1.{field}"), attribute);
    }
    config.compile_fds(descriptors)?;
    Ok(())
}
