use std::path::Path;

use anyhow::{Result, ensure};
use kni_integration::{Manifest, agent::MANIFESTS, eventually, kubelet::Sandbox, require, traffic, wait::patience};
use kni_proto::runtime::{ListNetworksRequest, ListNetworksResponse};
use tonic::Code;

use crate::watched::Watched;

async fn listed(stage: &Watched) -> Result<ListNetworksResponse> {
    Ok(stage
        .kubelet
        .runtime()
        .list_networks(ListNetworksRequest {})
        .await?
        .into_inner())
}

/// Waits until the agent's list of networks is as expected.
async fn until(stage: &Watched, wanted: impl Fn(&ListNetworksResponse) -> bool) -> Result<ListNetworksResponse> {
    eventually(patience(), async || {
        let now = listed(stage).await?;
        ensure!(wanted(&now), "the networks do not change: {now:#?}");
        Ok(now)
    })
    .await
}

fn write(stage: &Watched, manifest: Manifest) -> Result<()> {
    Manifest::apply(&[manifest], &stage.node)
}

fn remove(stage: &Watched, file: &str) -> Result<()> {
    Ok(stage
        .node
        .enter(|| std::fs::remove_file(Path::new(MANIFESTS).join(file)))??)
}

/// Checks that the network in the annotations accepts no pod.
async fn assert_refused(stage: &Watched, name: &str, annotations: &[(&str, &str)]) -> Result<()> {
    let netns = stage.kubelet.create_network("team", name).await?;
    let mut sandbox = Sandbox::new("team", name, &netns);
    sandbox.annotate(annotations);
    let refused = stage
        .kubelet
        .attach(&sandbox)
        .await
        .expect_err("there is no such network");
    assert_eq!(refused.code(), Code::NotFound, "{refused:?}");
    Ok(stage.kubelet.delete_network(&sandbox.id).await?)
}

fn names(list: &ListNetworksResponse) -> Vec<&str> {
    list.networks.iter().map(|network| network.name.as_str()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn networks_come_change_and_go_while_the_agent_runs() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("networks").await?;
    let before = stage.picture().await?;
    let green = [("kni.dev/network", "green")];
    assert_refused(&stage, "early", &green).await?;
    write(&stage, Manifest::network("green", &["10.60.0.0/24"]))?;
    until(&stage, |now| names(now).contains(&"green")).await?;
    let first = stage.kubelet.run_pod("team", "first", &green).await?;
    assert_eq!(first.interfaces["eth0"].ip, ["10.60.0.2"]);

    // After a change, attached interfaces remain unchanged, new ones get the new settings.
    write(
        &stage,
        Manifest::network("green", &["10.60.0.0/24", "fd60::/64"]).spec("mtu: 1300"),
    )?;
    let changed = until(&stage, |now| {
        now.networks.iter().any(|n| n.name == "green" && n.mtu == 1300)
    })
    .await?;
    let second = stage.kubelet.run_pod("team", "second", &green).await?;
    assert_eq!(second.ips().len(), 2, "{changed:?}");
    assert!(
        second
            .inside
            .run("ip", &["link", "show", "dev", "eth0"])?
            .contains("mtu 1300")
    );
    assert_eq!(stage.kubelet.query(&first.id).await?.ipconfigs, first.interfaces);
    let servers = traffic::Servers::start(&first.inside, "first", 8080)?;
    let stream = traffic::Stream::udp(&second.inside, (first.ips()[0], 8080).into())?;

    // After its removal the network accepts no new pods, but the attached ones continue, and it is removed with the
    // last of them.
    remove(&stage, "green.yaml")?;
    let closed = until(&stage, |now| now.networks.iter().any(|n| n.name == "green" && !n.ready)).await?;
    let network = closed.networks.iter().find(|n| n.name == "green").expect("just found");
    assert!(network.attachments == 2 && !network.reason.is_empty(), "{network:?}");
    assert_refused(&stage, "late", &green).await?;
    traffic::tcp_get(&second.inside, first.ips()[0], 8080, patience())?;
    stream.stop().assert_whole("first");
    drop(servers);
    for pod in [first, second] {
        stage.kubelet.kill_pod(pod).await?;
    }
    // The next change of the folder finds it unused.
    write(&stage, Manifest::network("last", &["10.61.0.0/24"]))?;
    until(&stage, |now| {
        !names(now).contains(&"green") && names(now).contains(&"last")
    })
    .await?;
    remove(&stage, "last.yaml")?;
    until(&stage, |now| !names(now).contains(&"last")).await?;
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_manifest_is_named_and_the_rest_works() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("invalid").await?;
    let before = stage.picture().await?;
    write(&stage, Manifest::network("bad", &["10.62.0.0/24", "10.62.0.0/33"]))?;
    let text = "apiVersion: kni.dev/v1alpha1\nkind: PodNetwork\nmetadata:\n  name: worse\nspec:\n  subnets: [10.63.0.0/24]\n  mut: 9000\n";
    write(&stage, Manifest::file("worse.yaml", text))?;
    write(&stage, Manifest::default_network("zweite", &["10.64.0.0/24"]))?;
    write(&stage, Manifest::network("good", &["10.65.0.0/24"]))?;
    let now = until(&stage, |now| now.refused.len() == 3 && names(now).contains(&"good")).await?;
    for (file, line, field) in [
        ("bad.yaml", 8, "spec.subnets[1]"),
        ("worse.yaml", 7, "mut"),
        ("zweite.yaml", 9, "spec.default"),
    ] {
        let refused = now.refused.iter().find(|refused| refused.file.ends_with(file));
        let refused = refused.unwrap_or_else(|| panic!("{file} is not in {:?}", now.refused));
        assert_eq!(refused.line, line, "{refused:?}");
        assert!(
            refused.field.contains(field) && !refused.reason.is_empty(),
            "{refused:?}"
        );
    }
    assert!(stage.status().await?.ready);
    for network in ["good", "blue", "default"] {
        let pod = stage
            .kubelet
            .run_pod("team", network, &[("kni.dev/network", network)])
            .await?;
        stage.kubelet.kill_pod(pod).await?;
    }
    // Corrected manifests are applied.
    write(&stage, Manifest::network("bad", &["10.62.0.0/24"]))?;
    let now = until(&stage, |now| now.refused.len() == 2 && names(now).contains(&"bad")).await?;
    assert!(!now.refused.iter().any(|refused| refused.file.ends_with("bad.yaml")));
    for file in ["bad.yaml", "worse.yaml", "zweite.yaml", "good.yaml"] {
        remove(&stage, file)?;
    }
    until(&stage, |now| now.refused.is_empty() && now.networks.len() == 3).await?;
    stage.assert_as(&before).await
}
