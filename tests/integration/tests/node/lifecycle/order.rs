use std::{collections::BTreeSet, path::Path};

use anyhow::Result;
use kni_integration::{kubelet::Sandbox, require};
use kni_proto::kni::{
    AttachInterfaceRequest, AttachNetworkRequest, CreateNetworkRequest, DeleteNetworkRequest, DetachInterfaceRequest,
    Isolation, QueryPodNetworkRequest, QueryPodNetworkResponse,
};
use tonic::Code;

use crate::watched::{Watched, entries, warm};

fn by_name(namespace: &str, name: &str) -> DeleteNetworkRequest {
    DeleteNetworkRequest {
        name: name.into(),
        namespace: namespace.into(),
        ..Default::default()
    }
}

fn exists(stage: &Watched, path: &str) -> Result<bool> {
    stage.node.enter(|| Path::new(path).exists())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_may_be_repeated() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("twice").await?;
    let before = stage.picture().await?;
    let netns = stage.kubelet.create_network("team", "web-0").await?;
    let sandbox = Sandbox::new("team", "web-0", &netns);
    let request = sandbox.attach_request();
    let first = stage
        .kubelet
        .kni()
        .attach_interface(request.clone())
        .await?
        .into_inner();
    let second = stage.kubelet.kni().attach_interface(request).await?.into_inner();
    assert!(first.ipconfigs["eth0"].ip.len() == 2, "{first:?}");
    assert_eq!(first, second, "a repeated attach has another answer");
    assert_eq!(stage.interfaces().await?.len(), 1);
    let queried = stage.kubelet.query(&sandbox.id).await?;
    assert_eq!(
        (queried.ipconfigs, queried.extradata),
        (first.ipconfigs, first.extradata)
    );
    stage.kubelet.detach(&sandbox.id).await?;
    stage.kubelet.detach(&sandbox.id).await?;
    assert!(exists(&stage, &netns)?, "detach removed the namespace");
    stage.kubelet.delete_network(&sandbox.id).await?;
    stage.kubelet.delete_network(&sandbox.id).await?;
    assert!(!exists(&stage, &netns)?);
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn teardown_of_what_was_never_there_succeeds_and_touches_nothing() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("unknown").await?;
    stage.node.ip(&["netns add foreign"])?;
    let before = stage.picture().await?;
    for id in ["never-seen", "", "a/b", "../../etc", &"x".repeat(300)] {
        stage.kubelet.detach(id).await?;
        stage.kubelet.delete_network(id).await?;
        assert_eq!(
            stage.kubelet.query(id).await?,
            QueryPodNetworkResponse::default(),
            "{id}"
        );
    }
    let mut kni = stage.kubelet.kni();
    for (netns_path, name) in [
        ("/run/netns/foreign", ""),
        ("/run/netns/absent", ""),
        ("/etc", "web-0"),
        ("relative", "web-0"),
        ("", "web-0"),
        ("", ""),
    ] {
        let request = DeleteNetworkRequest {
            netns_path: netns_path.into(),
            ..by_name("team", name)
        };
        kni.delete_network(request).await?;
    }
    kni.detach_interface(DetachInterfaceRequest {
        isolation: Some(Isolation {
            path: "/run/netns/foreign".into(),
            ..Default::default()
        }),
        ..Default::default()
    })
    .await?;
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_orders_end_where_they_should() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("orders").await?;
    let kubelet = &stage.kubelet;
    let before = stage.picture().await?;

    // Teardown before any setup, then a normal lifecycle with the same id.
    let mut sandbox = Sandbox::new("team", "early", "");
    kubelet.delete_network(&sandbox.id).await?;
    kubelet.detach(&sandbox.id).await?;
    let netns = kubelet.create_network("team", "early").await?;
    sandbox.extradata = entries(&[("netns", &netns)]);
    kubelet.detach(&sandbox.id).await?;
    kubelet.attach(&sandbox).await?;
    assert!(kubelet.query(&sandbox.id).await?.ipconfigs.contains_key("eth0"));

    // Detach, then query: nothing. Attach again with the same id in the same namespace, while the old device is being
    // removed.
    kubelet.detach(&sandbox.id).await?;
    assert_eq!(kubelet.query(&sandbox.id).await?, QueryPodNetworkResponse::default());
    kubelet.attach(&sandbox).await?;
    assert!(kubelet.query(&sandbox.id).await?.ipconfigs.contains_key("eth0"));

    // Delete implies detach, after which nothing can be attached.
    kubelet.delete_network(&sandbox.id).await?;
    assert_eq!(kubelet.query(&sandbox.id).await?, QueryPodNetworkResponse::default());
    let late = kubelet.attach(&sandbox).await.expect_err("its namespace is gone");
    assert_eq!(late.code(), Code::NotFound, "{late:?}");
    for expected in ["team/early", &sandbox.id, &netns] {
        assert!(late.message().contains(expected), "no {expected} in {late:?}");
    }
    kubelet.detach(&sandbox.id).await?;
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_create_gives_a_namespace_of_its_own() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    // With and without prewarmed namespaces, and with more pods than prewarmed ones.
    for sandboxes in [0, 3] {
        let stage = Watched::with("creates", warm(sandboxes)).await?;
        let before = stage.picture().await?;
        let mut kni = stage.kubelet.kni();
        let mut paths = Vec::new();
        for _ in 0..4 {
            paths.push(
                kni.create_network(CreateNetworkRequest::default())
                    .await?
                    .into_inner()
                    .netns_path,
            );
            let empty = kni.create_isolation_domain(CreateNetworkRequest::default()).await?;
            paths.push(empty.into_inner().netns_path);
            // A regression: these two had the same path.
            paths.push(stage.kubelet.create_network("a-b", "c").await?);
            paths.push(stage.kubelet.create_network("a", "b-c").await?);
        }
        assert_eq!(paths.iter().collect::<BTreeSet<_>>().len(), 16, "{paths:?}");
        let inodes = stage.node.enter(|| -> std::io::Result<BTreeSet<u64>> {
            let inode = |path| std::fs::metadata(path).map(|file| std::os::unix::fs::MetadataExt::ino(&file));
            paths.iter().map(inode).collect()
        })??;
        assert_eq!(inodes.len(), 16, "two paths lead to one namespace");
        kni.delete_network(by_name("a-b", "c")).await?;
        for (index, path) in paths.iter().enumerate() {
            assert_eq!(exists(&stage, path)?, index % 4 != 2, "{path}");
        }
        // Unnamed namespaces can be deleted by path alone.
        for netns_path in paths {
            kni.delete_isolation_domain(DeleteNetworkRequest {
                netns_path,
                ..Default::default()
            })
            .await?;
        }
        stage.assert_as(&before).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn delete_by_name_takes_only_what_was_never_attached() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("by-name").await?;
    let before = stage.picture().await?;
    let attached = stage.kubelet.run_pod("team", "web-0", &[]).await?;
    let unused = stage.kubelet.create_network("team", "web-0").await?;
    let others = [
        stage.kubelet.create_network("team", "web-1").await?,
        stage.kubelet.create_network("other", "web-0").await?,
    ];
    let mut kni = stage.kubelet.kni();
    kni.delete_network(by_name("team", "web-0")).await?;
    assert!(!exists(&stage, &unused)?, "{unused} is still there");
    for path in others.iter().map(String::as_str).chain(attached.netns.to_str()) {
        assert!(exists(&stage, path)?, "{path} was somebody else's");
    }
    assert_eq!(stage.kubelet.query(&attached.id).await?.ipconfigs, attached.interfaces);
    assert!(stage.interfaces().await?[0].healthy);
    for (namespace, name) in [("team", "web-1"), ("other", "web-0")] {
        kni.delete_network(by_name(namespace, name)).await?;
    }
    stage.kubelet.kill_pod(attached).await?;
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_sandbox_id_never_touches_a_newer_sandbox() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("old-ids").await?;
    let (kubelet, before) = (&stage.kubelet, stage.picture().await?);
    let old = kubelet.run_pod("team", "web-0", &[]).await?;
    kubelet.detach(&old.id).await?;
    let new = kubelet.run_pod("team", "web-0", &[]).await?;
    let unused = kubelet.create_network("team", "web-0").await?;
    for _ in 0..2 {
        kubelet.detach(&old.id).await?;
        kubelet.delete_network(&old.id).await?;
        // The form of containerd: name and path in addition to the id.
        let containerd = DeleteNetworkRequest {
            id: old.id.clone(),
            netns_path: old.netns.display().to_string(),
            ..by_name("team", "web-0")
        };
        kubelet.kni().delete_network(containerd).await?;
        kubelet
            .kni()
            .detach_interface(DetachInterfaceRequest {
                id: old.id.clone(),
                name: "web-0".into(),
                namespace: "team".into(),
                ..Default::default()
            })
            .await?;
    }
    assert_eq!(kubelet.query(&new.id).await?.ipconfigs, new.interfaces);
    assert!(stage.interfaces().await?[0].healthy);
    assert!(exists(&stage, &unused)? && exists(&stage, new.netns.to_str().expect("UTF-8"))?);

    // Even in one and the same namespace.
    let third = Sandbox::new("team", "web-0", new.netns.to_str().expect("UTF-8"));
    kubelet.detach(&new.id).await?;
    kubelet.attach(&third).await?;
    kubelet.detach(&new.id).await?;
    kubelet.delete_network(&new.id).await?;
    assert!(kubelet.query(&third.id).await?.ipconfigs.contains_key("eth0"));
    assert!(
        exists(&stage, new.netns.to_str().expect("UTF-8"))?,
        "the namespace of {} went",
        third.id
    );
    assert!(stage.interfaces().await?[0].healthy);
    kubelet.delete_network(&third.id).await?;
    kubelet.kni().delete_network(by_name("team", "web-0")).await?;
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn methods_of_all_published_versions_share_one_state() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("versions").await?;
    let (mut kni, before) = (stage.kubelet.kni(), stage.picture().await?);
    let create = CreateNetworkRequest {
        name: "web-0".into(),
        namespace: "team".into(),
        ..Default::default()
    };
    let netns = kni.create_isolation_domain(create).await?.into_inner().netns_path;
    let sandbox = Sandbox::new("team", "web-0", &netns);
    let older = AttachNetworkRequest::from(sandbox.attach_request());
    let older = kni.attach_network(older).await?.into_inner();
    let newer = kni.attach_interface(sandbox.attach_request()).await?.into_inner();
    assert_eq!(older, newer);
    let query = QueryPodNetworkRequest {
        id: sandbox.id.clone(),
        name: "another".into(),
        namespace: "elsewhere".into(),
    };
    assert_eq!(
        kni.query_pod_network(query).await?.into_inner().ipconfigs,
        newer.ipconfigs
    );
    let detach = DetachInterfaceRequest {
        id: sandbox.id.clone(),
        ..Default::default()
    };
    kni.detach_network(detach).await?;
    assert!(stage.kubelet.query(&sandbox.id).await?.ipconfigs.is_empty());
    let delete = DeleteNetworkRequest {
        id: sandbox.id.clone(),
        ..Default::default()
    };
    kni.delete_isolation_domain(delete).await?;
    let setup = kni
        .setup_node_network(kni_proto::kni::SetupNodeNetworkRequest {})
        .await?;
    for part in ["bpffs", "tables", "uplink", "networks", "pool"] {
        let key = format!("kni-setup-{part}");
        let entry = setup
            .metadata()
            .get(&key)
            .map(|value| value.to_str().unwrap_or_default());
        assert!(matches!(entry, Some("ok" | "prepared")), "{key}: {entry:?}");
    }
    let networks = kni
        .query_node_networks(kni_proto::kni::QueryNodeNetworksRequest {})
        .await?
        .into_inner()
        .networks;
    assert!(networks[0].name == "default" && networks[0].ready, "{networks:?}");
    assert_eq!(networks.len(), 3);
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_namespace_may_be_the_clients_own_and_stays_the_clients() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("own-netns").await?;
    stage.node.ip(&["netns add theirs"])?;
    let (mut kni, before) = (stage.kubelet.kni(), stage.picture().await?);
    let path = "/run/netns/theirs";
    let bare = |id: &str| AttachInterfaceRequest {
        id: id.into(),
        name: "web-0".into(),
        namespace: "team".into(),
        ..Default::default()
    };
    let isolation = Some(Isolation {
        path: path.into(),
        r#type: "namespace".into(),
        ..Default::default()
    });
    let ways = [
        AttachInterfaceRequest {
            isolation,
            ..bare("by-isolation")
        },
        AttachInterfaceRequest {
            extradata: entries(&[("netns", path)]),
            ..bare("by-extradata")
        },
        AttachInterfaceRequest {
            annotations: entries(&[("kni.dev/netns", path)]),
            ..bare("by-annotation")
        },
    ];
    for request in ways {
        let id = request.id.clone();
        kni.attach_interface(request).await?;
        let inside = stage
            .node
            .run("ip", &["-n", "theirs", "-j", "address", "show", "dev", "eth0"])?;
        let queried = stage.kubelet.query(&id).await?.ipconfigs;
        for ip in &queried["eth0"].ip {
            assert!(inside.contains(ip), "{id}: {ip} is not in {inside}");
        }
        stage.kubelet.detach(&id).await?;
        stage.kubelet.delete_network(&id).await?;
        assert!(exists(&stage, path)?, "{id}: the client's namespace was removed");
    }
    let nowhere = kni
        .attach_interface(bare("nowhere"))
        .await
        .expect_err("no namespace is named");
    assert_eq!(nowhere.code(), Code::InvalidArgument, "{nowhere:?}");
    assert!(nowhere.message().contains("netns"), "{nowhere:?}");
    stage.assert_as(&before).await
}
