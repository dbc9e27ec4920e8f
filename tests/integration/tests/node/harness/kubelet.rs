use std::{
    collections::BTreeMap,
    fs,
    net::IpAddr,
    os::unix::{fs::MetadataExt as _, net::UnixListener},
};

use anyhow::Result;
use kni_integration::{Kubelet, Node, agent::KUBELET_SOCKET, require};
use kni_proto::kni::{CreateNetworkRequest, kni_server::KniServer};
use tokio_stream::wrappers::UnixListenerStream;

use super::fake::{Asked, Fake};

const NETNS: &str = "/run/netns/sandbox";

/// Serves `fake` on the socket inside the node until the runtime of the caller ends.
fn serve(fake: Fake, node: &Node) -> Result<()> {
    let listener = node.enter(|| UnixListener::bind(KUBELET_SOCKET))??;
    listener.set_nonblocking(true)?;
    let incoming = UnixListenerStream::new(tokio::net::UnixListener::from_std(listener)?);
    let server = tonic::transport::Server::builder().add_service(KniServer::new(fake));
    tokio::spawn(server.serve_with_incoming(incoming));
    Ok(())
}

/// A node with a sandbox, and a kubelet that is connected to `fake` in it.
async fn connected(fake: &Fake, name: &str) -> Result<(Node, Kubelet)> {
    let node = Node::new(name)?;
    node.ip(&["netns add sandbox"])?;
    serve(fake.clone(), &node)?;
    let kubelet = Kubelet::connect(&node, KUBELET_SOCKET).await?;
    Ok((node, kubelet))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_where_the_answer_says() -> Result<()> {
    require!(root, netns, ip);
    let (node, kubelet) = connected(&Fake::in_netns(NETNS), "placed").await?;
    let pod = kubelet.run_pod("team", "web-0", &[]).await?;
    assert_eq!(pod.ips(), ["10.0.0.7".parse::<IpAddr>()?, "fd00::7".parse()?]);
    assert_eq!(pod.ip(false), Some("fd00::7".parse()?));
    // In the returned namespace, with the node's mounts.
    let own = pod.enter(|| fs::metadata("/proc/thread-self/ns/net").map(|file| file.ino()))??;
    let answered = pod.enter(|| fs::metadata(NETNS).map(|file| file.ino()))??;
    assert_eq!(own, answered);
    assert_ne!(
        own,
        node.enter(|| fs::metadata("/proc/thread-self/ns/net").map(|file| file.ino()))??
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_those_of_the_kubelet() -> Result<()> {
    require!(root, netns, ip);
    let fake = Fake::in_netns(NETNS);
    let (_node, kubelet) = connected(&fake, "kubelet").await?;
    let pod = kubelet.run_pod("team", "web-0", &[("kni.dev/network", "blue")]).await?;
    let (id, uid) = (pod.id.clone(), pod.uid.clone());
    kubelet.kill_pod(pod).await?;
    assert!(id.len() == 64 && id.bytes().all(|b| b.is_ascii_hexdigit()), "{id}");

    let asked = fake.asked();
    let [
        Asked::Create(create),
        Asked::Attach(attach),
        Asked::Query(query),
        Asked::Detach(detach),
        Asked::Delete(delete),
    ] = asked.as_slice()
    else {
        panic!("other calls: {asked:#?}");
    };
    // All other fields have default values.
    let mut by_name = CreateNetworkRequest::default();
    (by_name.name, by_name.namespace) = ("web-0".into(), "team".into());
    assert_eq!(*create, by_name);
    let ids = [&query.id, &detach.id, &delete.id, &attach.id];
    assert_eq!(ids, [&id; 4]);
    let rest = [
        &query.name,
        &query.namespace,
        &detach.name,
        &detach.namespace,
        &delete.name,
        &delete.netns_path,
    ];
    assert_eq!(rest, [""; 6]);

    assert_eq!([&attach.name, &attach.namespace], ["web-0", "team"]);
    assert_eq!(attach.isolation, None);
    let entry = |map: &BTreeMap<String, String>, key: &str| map.get(key).cloned().unwrap_or_default();
    assert_eq!(entry(&attach.extradata, "netns"), NETNS);
    assert_eq!(entry(&attach.annotations, "kni.dev/netns"), NETNS);
    assert_eq!(entry(&attach.annotations, "kni.dev/network"), "blue");
    assert_eq!(entry(&attach.labels, "io.kubernetes.pod.uid"), uid);
    assert!(attach.port_mappings.len() == 1 && attach.port_mappings[0].host_port == 0);
    assert!(attach.dns_config.is_some());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_pod_tells_the_status() -> Result<()> {
    require!(root, netns, ip);
    let fake = Fake::default();
    let (_node, kubelet) = connected(&fake, "refused").await?;
    let status = kubelet
        .run_pod("team", "web-0", &[])
        .await
        .expect_err("create was refused");
    assert_eq!(
        (status.code(), status.message()),
        (tonic::Code::ResourceExhausted, "network blue")
    );
    assert_eq!(fake.asked().len(), 1, "calls went on after a refusal");
    Ok(())
}
