//! Tests the fields with the namespace's path, which differ between KNI clients: containerd's branch sends only
//! `isolation.path`, the kubelet only `extradata`. Both work at the same time.

use anyhow::{Context as _, Result};
use kni_integration::require;
use kni_proto::kni::{
    AttachInterfaceRequest, CreateNetworkRequest, DeleteNetworkRequest, DetachInterfaceRequest, Isolation,
};

use super::{RuntimeNetns, assert_connected};
use crate::watched::Watched;

#[tokio::test(flavor = "multi_thread")]
async fn isolation_alone_and_extradata_alone_both_work() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("fields").await?;
    let netns = RuntimeNetns::new(&stage.node, "cni-1")?;
    let before = stage.picture().await?;
    let mut kni = stage.kubelet.kni();

    // containerd as the client creates a namespace without a pod's name, and uses a namespace of its own.
    let unused = kni.create_network(CreateNetworkRequest::default()).await?.into_inner();
    let by_isolation = AttachInterfaceRequest {
        name: "web-0_team_7f1c_0".into(),
        id: "by-isolation".into(),
        namespace: "team".into(),
        isolation: Some(Isolation {
            path: netns.path(),
            r#type: "namespace".into(),
            ..Isolation::default()
        }),
        ..AttachInterfaceRequest::default()
    };
    let attached = kni.attach_interface(by_isolation).await?.into_inner();
    let first = attached.ipconfigs["eth0"].ip.first().context("no address")?;

    // The kubelet.
    let pod = stage.kubelet.run_pod("team", "by-extradata", &[]).await?;
    let request = pod.attach_request();
    assert!(request.isolation.is_none() && request.extradata.contains_key("netns"));
    let second = pod.interfaces["eth0"].ip.first().context("no address")?;
    assert_connected([(&netns.inside, first), (&pod.inside, second)])?;

    kni.detach_interface(DetachInterfaceRequest {
        id: "by-isolation".into(),
        ..DetachInterfaceRequest::default()
    })
    .await?;
    for request in [
        DeleteNetworkRequest {
            id: "by-isolation".into(),
            netns_path: netns.path(),
            ..DeleteNetworkRequest::default()
        },
        DeleteNetworkRequest {
            netns_path: unused.netns_path,
            ..DeleteNetworkRequest::default()
        },
    ] {
        kni.delete_network(request).await?;
    }
    stage.kubelet.kill_pod(pod).await?;
    assert!(
        stage.node.enter(|| netns.path.exists())?,
        "the runtime's own namespace was removed"
    );
    stage.assert_as(&before).await
}
