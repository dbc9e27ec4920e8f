use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use kni_integration::{AgentOptions, Manifest, eventually, kubelet::Sandbox, patience, require};
use kni_proto::runtime::ListNetworksRequest;
use tonic::{Code, Status};

use crate::watched::{Watched, entries, warm};

const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";

/// Annotations, the code of the refusal, and texts that its message must contain.
type Case = (&'static [(&'static str, &'static str)], Code, &'static [&'static str]);

const CASES: [Case; 21] = [
    (&[("kni.dev/network", "nope")], Code::NotFound, &["network nope"]),
    (&[(NETWORKS, "blue,nope")], Code::NotFound, &["network nope"]),
    (
        &[("kni.io/multi-network", "nope@x0")],
        Code::NotFound,
        &["network nope"],
    ),
    (
        &[("kni.dev/network", "closed")],
        Code::FailedPrecondition,
        &["network closed", "disabled"],
    ),
    (
        &[("kni.dev/network", "Not_A_Name")],
        Code::InvalidArgument,
        &["kni.dev/network", "Not_A_Name"],
    ),
    (
        &[("kni.dev/ips", "10.244.0.0/16")],
        Code::InvalidArgument,
        &["kni.dev/ips"],
    ),
    (
        &[("kni.dev/ips", "192.0.2.1")],
        Code::InvalidArgument,
        &["network default", "192.0.2.1"],
    ),
    (
        &[("kni.dev/ips", "10.244.0.5,10.244.0.6")],
        Code::InvalidArgument,
        &["network default"],
    ),
    (
        &[("kni.dev/mac", "ff:ff:ff:ff:ff:ff")],
        Code::InvalidArgument,
        &["kni.dev/mac"],
    ),
    (&[(NETWORKS, "[{\"name\":")], Code::InvalidArgument, &[NETWORKS]),
    (
        &[(NETWORKS, r#"[{"name":"blue","bandwidth":{}}]"#)],
        Code::InvalidArgument,
        &[NETWORKS, "bandwidth"],
    ),
    (&[(NETWORKS, "blue@eth0")], Code::InvalidArgument, &[NETWORKS, "eth0"]),
    (
        &[(NETWORKS, "blue@x0,red@x0")],
        Code::InvalidArgument,
        &[NETWORKS, "x0"],
    ),
    (
        &[("kni.io/multi-network", "blue@lo")],
        Code::InvalidArgument,
        &["kni.io/multi-network", "lo"],
    ),
    (
        &[("kni.dev/network", "tiny")],
        Code::ResourceExhausted,
        &["network tiny"],
    ),
    (&[(NETWORKS, "blue,tiny")], Code::ResourceExhausted, &["network tiny"]),
    // Networks that do not let the pod in.
    (
        &[("kni.dev/network", "nobodys")],
        Code::PermissionDenied,
        &["network nobodys", "spec.access.namespaces", "namespace team"],
    ),
    (
        &[(NETWORKS, "blue,others")],
        Code::PermissionDenied,
        &["network others", "spec.access.namespaces", "namespace team"],
    ),
    (
        &[("kni.dev/network", "plain"), ("kni.dev/ips", "10.43.0.7")],
        Code::PermissionDenied,
        &["network plain", "spec.access.allowAddresses", "10.43.0.7"],
    ),
    (
        &[("kni.dev/network", "plain"), ("kni.dev/mac", "02:00:00:00:00:07")],
        Code::PermissionDenied,
        &["network plain", "spec.access.allowMac"],
    ),
    (
        &[(NETWORKS, r#"[{"name":"plain","default-route":["169.254.1.1"]}]"#)],
        Code::PermissionDenied,
        &["network plain", "spec.access.allowDefaultRoute"],
    ),
];

/// The overlapping networks, a disabled one, and one with space for one pod.
fn options(sandboxes: u32) -> AgentOptions {
    let mut manifests = Manifest::overlapping();
    manifests.push(Manifest::network("closed", &["10.20.0.0/16"]).spec("enabled: false"));
    // Without the network address, the broadcast and the gateway's address.
    manifests.push(Manifest::network("tiny", &["10.30.0.0/30"]));
    manifests.extend(guarded());
    AgentOptions {
        manifests,
        ..warm(sandboxes)
    }
}

/// Networks that let some namespaces in, by the label of their name and by a label of a manifest.
fn guarded() -> Vec<Manifest> {
    let selecting = |label: &str| {
        format!("access: {{ namespaces: {{ from: Selected, selector: {{ matchLabels: {{ {label} }} }} }} }}")
    };
    vec![
        Manifest::without_access("nobodys", &["10.41.0.0/16"]),
        Manifest::without_access("others", &["10.42.0.0/16"]).spec(&selecting("kubernetes.io/metadata.name: other")),
        Manifest::without_access("plain", &["10.43.0.0/16"]).spec("access: { namespaces: { from: All } }"),
        Manifest::without_access("labelled", &["10.44.0.0/16"]).spec(&selecting("tenant: shop")),
        Manifest::file(
            "namespaces.yaml",
            "apiVersion: v1\nkind: Namespace\nmetadata: { name: shop, labels: { tenant: shop } }\n",
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn namespaces_of_manifests_are_let_in_and_unknown_ones_by_name() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::with("let-in", options(0)).await?;
    for (namespace, network, admitted) in [
        ("other", "others", true),
        ("shop", "others", false),
        ("shop", "labelled", true),
        ("other", "labelled", false),
    ] {
        let answer = stage
            .kubelet
            .run_pod(namespace, "web", &[("kni.dev/network", network)])
            .await;
        match answer {
            Ok(pod) if admitted => stage.kubelet.kill_pod(pod).await?,
            Err(status) if !admitted => assert_eq!(status.code(), Code::PermissionDenied, "{status:?}"),
            answer => panic!("{namespace} joins {network}: {answer:?}"),
        }
    }
    // A manifest that changes applies to the next pod.
    let changed = Manifest::file(
        "namespaces.yaml",
        "apiVersion: v1\nkind: Namespace\nmetadata: { name: other, labels: { tenant: shop } }\n",
    );
    Manifest::apply(&[changed], &stage.node)?;
    let pod = eventually(patience(), async || {
        let pod = stage
            .kubelet
            .run_pod("other", "web", &[("kni.dev/network", "labelled")])
            .await;
        Ok(pod?)
    })
    .await?;
    stage.kubelet.kill_pod(pod).await?;
    Ok(())
}

async fn used_addresses(stage: &Watched) -> Result<Vec<String>> {
    let listed = stage.kubelet.runtime().list_networks(ListNetworksRequest {}).await?;
    let used = |network: kni_proto::runtime::NetworkStatus| format!("{}: {}", network.name, network.used_addresses);
    Ok(listed.into_inner().networks.into_iter().map(used).collect())
}

/// Creates a sandbox, attaches unsuccessfully, and deletes as the kubelet does.
async fn refused(stage: &Watched, annotations: &[(&str, &str)]) -> Result<Status> {
    let netns = stage.kubelet.create_network("team", "refused").await?;
    let mut sandbox = Sandbox::new("team", "refused", &netns);
    sandbox.annotate(annotations);
    let attached = stage.kubelet.attach(&sandbox).await;
    let status = attached
        .err()
        .with_context(|| format!("{annotations:?} was attached"))?;
    assert!(stage.kubelet.query(&sandbox.id).await?.ipconfigs.is_empty());
    stage.kubelet.delete_network(&sandbox.id).await?;
    assert!(
        !stage.node.enter(|| std::path::Path::new(&netns).exists())?,
        "{annotations:?}: {netns}"
    );
    Ok(status)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_attach_leaves_nothing() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    for sandboxes in [0, 2] {
        let stage = Watched::with("refusals", options(sandboxes)).await?;
        let holder = stage
            .kubelet
            .run_pod("team", "holder", &[("kni.dev/network", "tiny")])
            .await?;
        let (before, used) = (stage.picture().await?, used_addresses(&stage).await?);
        for (annotations, code, named) in CASES {
            let status = refused(&stage, annotations).await?;
            assert_eq!(status.code(), code, "{annotations:?}: {status:?}");
            for name in named.iter().chain(&["team/refused"]) {
                assert!(status.message().contains(name), "no {name} in {status:?}");
            }
            assert_eq!(used_addresses(&stage).await?, used, "{annotations:?}");
        }
        stage.assert_as(&before).await?;
        // The address that the only other pod has released is available.
        stage.kubelet.kill_pod(holder).await?;
        let next = stage.kubelet.run_pod("team", "next", &[(NETWORKS, "tiny")]).await?;
        assert_eq!(next.ips_of("net1"), ["10.30.0.2".parse::<std::net::IpAddr>()?]);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_in_use_is_refused_with_its_owner() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("in-use").await?;
    let wanted = &[("kni.dev/network", "blue"), ("kni.dev/ips", "10.10.0.9,fd10::9")];
    let owner = stage.kubelet.run_pod("team", "owner", wanted).await?;
    assert_eq!(owner.interfaces["eth0"].ip, ["10.10.0.9", "fd10::9"]);
    let before = stage.picture().await?;
    let status = refused(&stage, wanted).await?;
    assert_eq!(status.code(), Code::AlreadyExists);
    for named in ["10.10.0.9", "network blue", "team/owner"] {
        assert!(status.message().contains(named), "no {named} in {status:?}");
    }
    stage.assert_as(&before).await?;
    // The same addresses in the other network are independent.
    let same = &[("kni.dev/network", "red"), ("kni.dev/ips", "10.10.0.9,fd10::9")];
    let twin = stage.kubelet.run_pod("team", "twin", same).await?;
    assert_eq!(twin.ips(), owner.ips());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_network_namespace_that_is_not_the_nodes_is_attached() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("wrong-netns").await?;
    stage
        .node
        .enter(|| std::fs::write("/run/plain-file", "not a namespace"))??;
    stage.node.run("mkfifo", &["/run/fifo"])?;
    let before = stage.picture().await?;
    for (path, code, named) in [
        ("/run/netns/absent", Code::NotFound, "does not exist"),
        ("/run/plain-file", Code::InvalidArgument, "not a network namespace"),
        ("/run/fifo", Code::InvalidArgument, "not a network namespace"),
        ("/run", Code::InvalidArgument, "not a network namespace"),
        ("/dev/zero", Code::InvalidArgument, "not a network namespace"),
        ("/proc/self/ns/mnt", Code::InvalidArgument, "not a network namespace"),
        (
            "/proc/self/ns/net",
            Code::InvalidArgument,
            "the node's own network namespace",
        ),
        ("relative/path", Code::InvalidArgument, "not an absolute path"),
    ] {
        let sandbox = Sandbox::new("team", "web-0", path);
        let status = stage
            .kubelet
            .attach(&sandbox)
            .await
            .err()
            .with_context(|| format!("{path} was attached"))?;
        assert_eq!(status.code(), code, "{path}: {status:?}");
        for name in [path, named, "team/web-0"] {
            assert!(status.message().contains(name), "no {name} in {status:?}");
        }
        stage.kubelet.delete_network(&sandbox.id).await?;
    }
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn somebody_elses_interface_in_the_pod_is_left_alone() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("occupied").await?;
    let before = stage.picture().await?;
    let netns = stage.kubelet.create_network("team", "web-0").await?;
    let mut sandbox = Sandbox::new("team", "web-0", &netns);
    let inside = stage.node.net_at("web-0", std::path::Path::new(&netns))?;
    for (theirs, networks) in [("eth0", ""), ("net1", "blue")] {
        inside.ip(&[&format!("link add {theirs} type veth peer name theirs")])?;
        sandbox.annotate(&[(NETWORKS, networks)]);
        let status = stage.kubelet.attach(&sandbox).await.expect_err("the name is taken");
        assert!(status.message().contains(theirs), "{status:?}");
        assert!(stage.kubelet.query(&sandbox.id).await?.ipconfigs.is_empty());
        stage.settled().await?;
        let links = inside.run("ip", &["-o", "link", "show", "type", "veth"])?;
        assert_eq!(
            links.lines().count(),
            2,
            "theirs is gone or ours is still there: {links}"
        );
        assert!(links.contains(&format!("{theirs}@theirs")), "{links}");
        inside.ip(&[&format!("link del {theirs}")])?;
    }
    // Without the obstacle the same request succeeds.
    stage.kubelet.attach(&sandbox).await?;
    assert_eq!(stage.kubelet.query(&sandbox.id).await?.ipconfigs.len(), 2);
    stage.kubelet.delete_network(&sandbox.id).await?;
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conflicting_attach_is_refused_and_the_first_goes_on() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("conflicts").await?;
    let first = stage
        .kubelet
        .run_pod("team", "web-0", &[("kni.dev/network", "blue")])
        .await?;
    let before = stage.picture().await?;
    let elsewhere = stage.kubelet.create_network("team", "web-0").await?;
    let mut others = vec![(*first).clone(), (*first).clone(), (*first).clone(), (*first).clone()];
    others[0].annotate(&[("kni.dev/network", "red")]);
    others[1].annotate(&[(NETWORKS, "red")]);
    others[2].extradata = entries(&[("netns", &elsewhere)]);
    others[3].id = "another".into();
    for other in &others {
        let status = stage.kubelet.attach(other).await.expect_err("it conflicts");
        assert_eq!(status.code(), Code::AlreadyExists, "{status:?}");
        assert!(status.message().contains("team/web-0"), "{status:?}");
    }
    assert_eq!(stage.kubelet.query(&first.id).await?.ipconfigs, first.interfaces);
    assert!(stage.interfaces().await?[0].healthy);
    // The namespace that the third request named belongs to the sandbox now, and is removed with it.
    stage.kubelet.detach("another").await?;
    stage.kubelet.delete_network("another").await?;
    stage.kubelet.attach(&first).await?;
    let unused = kni_proto::kni::DeleteNetworkRequest {
        netns_path: elsewhere,
        ..Default::default()
    };
    if let Err(status) = stage.kubelet.kni().delete_network(unused).await {
        panic!("{status:?}");
    }
    assert_eq!(
        stage.kubelet.query(&first.id).await?.ipconfigs,
        first.interfaces,
        "the other namespace's delete hit it"
    );
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_node_refuses_and_recovers() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    for sandboxes in ["0", "8"] {
        let args = ["--max-endpoints", "5", "--warm-sandboxes", sandboxes];
        let options = AgentOptions::new(Manifest::overlapping(), &args);
        let mut stage = Watched::unsettled("full", options).await?;
        let mut pods = Vec::new();
        for index in 0..4 {
            pods.push(stage.kubelet.run_pod("team", &format!("web-{index}"), &[]).await?);
        }
        let status = refused(&stage, &[]).await?;
        assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
        assert!(status.message().contains("4 endpoints"), "{status:?}");
        // At once: an attach waits for the endpoint of a pod that is being removed.
        for turn in 0..5 {
            stage.kubelet.kill_pod(pods.remove(0)).await?;
            let again = stage.kubelet.run_pod("team", &format!("again-{turn}"), &[]).await;
            pods.push(again.with_context(|| format!("turn {turn}, {sandboxes} prewarmed"))?);
        }
        // Three at once, for numbers that become free one after the other.
        for pod in pods.drain(1..) {
            stage.kubelet.kill_pod(pod).await?;
        }
        let names = ["together-0", "together-1", "together-2"];
        let together = try_join_all(names.map(|name| stage.kubelet.run_pod("team", name, &[]))).await;
        together.with_context(|| format!("at once, {sandboxes} prewarmed"))?;
        stage.agent.terminate()?;
    }
    Ok(())
}
