//! Starts a cluster of several nodes, on which the agents are pods of `deploy/`.

use std::path::Path;

use anyhow::{Context, Result};
use kni_local_node::{Kni, LocalCluster, LocalNode, Namespaces, Programs, StaticPrograms};

use crate::{DEPLOY, Folders, Start, shortcuts};

/// Starts a cluster of `count` nodes; its API server is reached at `server` from outside.
pub(crate) fn start(
    folders: &Folders,
    (programs, statics): (&Programs, &StaticPrograms),
    start: &Start,
    (count, kni): (u8, Option<Kni>),
    server: &str,
) -> Result<LocalCluster> {
    let folder = &folders.folder;
    let image = start.image.as_deref().context("no image")?;
    println!("control plane, {count} node{}", if count == 1 { "" } else { "s" });
    let mut cluster = LocalCluster::start(count, programs, statics, kni.as_ref(), &folder.join("logs"))?;
    let kubeconfig = cluster.control().outside_kubeconfig(server)?;
    shortcuts::kubectl(folders, programs, &kubeconfig)?;
    println!("agents");
    cluster.deploy(Path::new(DEPLOY), folder, image, &start.tag)?;
    println!("DNS");
    cluster.start_dns()?;
    write_shortcuts(&mut cluster, folder)?;
    Ok(cluster)
}

/// Where the API server runs.
pub(crate) fn api_server(cluster: &mut LocalCluster) -> Namespaces {
    let control: &Namespaces = cluster.control().node();
    control.clone()
}

/// Writes scripts that run programs inside a node.
fn write_shortcuts(cluster: &mut LocalCluster, folder: &Path) -> Result<()> {
    let router = cluster.router().net_path();
    let mut cases = vec![format!(
        "router) shift; exec nsenter --net='{}' -- \"$@\" ;;",
        router.display()
    )];
    cases.push(case(cluster.control().local())?);
    let mut imports = Vec::new();
    for node in cluster.nodes() {
        cases.push(case(node)?);
        // The archive is opened outside: a node has its own /tmp.
        imports.push(format!("{} ctr images import - < \"$1\"", shortcuts::enter(node)?));
    }
    cases.push("*) echo \"usage: $0 NODE|control-plane|router PROGRAM [ARGUMENTS]\" >&2; exit 2 ;;".to_owned());
    let enter = format!("case \"$1\" in\n{}\nesac", cases.join("\n"));
    shortcuts::script(folder, "enter", &enter)?;
    shortcuts::script(folder, "import", &format!("set -e\n{}", imports.join("\n")))
}

fn case(node: &LocalNode) -> Result<String> {
    let enter = shortcuts::enter(node)?;
    Ok(format!("{}) shift; exec {enter} \"$@\" ;;", node.name()))
}
