//! Tests calls of the real grpc-go, in the version of the kubelet and in a current one.

use std::{
    env,
    io::{Seek as _, Write as _},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Stage,
    agent::{KUBELET_SOCKET, SOCKET},
    require,
};
use kni_proto::kni::{QueryPodNetworkRequest, QueryPodNetworkResponse};
use prost::Message as _;

use super::{ATTACH, QUERY, addresses, attach, filled, sandbox};

const VERSIONS: [&str; 2] = ["grpc-1.58.mod", "go.mod"];
const REQUESTS: usize = 1000;

/// Whether Go is required: by its name, or as one of the tools of a node. The project itself does not need it, so "all"
/// does not include it.
fn demanded() -> bool {
    env::var("KNI_REQUIRE").is_ok_and(|list| list.split(',').any(|need| matches!(need.trim(), "go" | "machine")))
}

/// Builds the client, or returns `None` and prints the reason if this machine cannot.
fn build(version: &str) -> Result<Option<PathBuf>> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("grpc-go-client");
    let module = format!("-modfile={version}");
    let output = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("grpc-go-client-{version}"));
    let go = |args: &[&str]| Command::new("go").args(args).arg(&module).current_dir(&source).output();
    let missing = match go(&["mod", "download"]) {
        Ok(got) if got.status.success() => None,
        Ok(got) => Some(String::from_utf8_lossy(&got.stderr).trim().to_owned()),
        Err(error) => Some(format!("go: {error}")),
    };
    if let Some(why) = missing {
        ensure!(!demanded(), "KNI_REQUIRE names go, but {why}");
        println!("not tested with grpc-go: {why}");
        return Ok(None);
    }
    let path = output.to_str().context("not UTF-8")?;
    let built = Command::new("go")
        .args(["build", "-buildvcs=false", &module, "-o", path, "."])
        .current_dir(&source)
        .output()?;
    ensure!(
        built.status.success(),
        "go build: {}",
        String::from_utf8_lossy(&built.stderr)
    );
    Ok(Some(output))
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

fn unhex(text: &str) -> Result<Vec<u8>> {
    let pairs = (0..text.len()).step_by(2);
    pairs.map(|at| Ok(u8::from_str_radix(&text[at..at + 2], 16)?)).collect()
}

/// Runs the client to completion. Its input is a file, because it writes more output while it reads than a pipe holds.
fn run(stage: &Stage, program: &str, socket: &str, input: &str) -> Result<String> {
    let mut file = tempfile::tempfile()?;
    file.write_all(input.as_bytes())?;
    file.rewind()?;
    let output = stage.node.command(program).arg(socket).stdin(file).output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {stderr}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_go_is_served() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut clients = Vec::new();
    for version in VERSIONS {
        let Some(client) = build(version)? else { return Ok(()) };
        clients.push((version, client));
    }
    let stage = Stage::start("grpc-go", Manifest::overlapping()).await?;
    for (version, client) in clients {
        let program = stage.node.install(&client)?;
        let program = program.to_str().context("not UTF-8")?;
        for socket in [SOCKET, KUBELET_SOCKET] {
            let name = format!("go-{}-{}", version.len(), socket.len());
            let sandbox = sandbox(&stage, &name).await?;
            let mut query = QueryPodNetworkRequest::default();
            query.id.clone_from(&sandbox.id);
            let mut input = vec![
                format!("{ATTACH} {}\n", hex(&attach(&sandbox))),
                format!("{ATTACH} {}\n", hex(&filled(attach(&sandbox), 1 << 20))),
            ];
            input.resize(2 + REQUESTS, format!("{QUERY} {}\n", hex(&query.encode_to_vec())));
            let output =
                run(&stage, program, socket, &input.concat()).with_context(|| format!("{version} on {socket}"))?;
            let answers: Vec<_> = output.lines().collect();
            assert_eq!(answers.len(), 2 + REQUESTS, "{version} on {socket}");
            let expected = stage.kubelet.query(&sandbox.id).await?.ipconfigs["eth0"].ip.clone();
            assert_eq!(expected.len(), 2);
            for (number, answer) in answers.iter().enumerate() {
                let what = || format!("{version} on {socket}, answer {number}: {answer:.200}");
                let message = unhex(answer.strip_prefix("ok ").with_context(what)?)?;
                let got = if number < 2 {
                    addresses(&message)?
                } else {
                    QueryPodNetworkResponse::decode(&*message)?.ipconfigs["eth0"].ip.clone()
                };
                assert_eq!(got, expected, "{}", what());
            }
        }
    }
    Ok(())
}
