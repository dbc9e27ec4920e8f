//! 9: Tests that Services of other proxies are untouched, and that a virtual address in two networks is two Services.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Result, ensure};
use kni_integration::{
    require,
    stage::address,
    traffic::{NoAnswer, Stream},
};
use serde_json::{Value, json};

use super::{
    objects::{BACK, FRONT, State, labelled, served, service, shared_vip, slices, vip, with},
    proxies::{self, Proxied},
    scene::{Backend, FAMILIES, Scene, Transport, assert_answering, assert_refused, front},
};

const WEB: u8 = 70;

#[tokio::test(flavor = "multi_thread")]
async fn headless_services_are_left_alone() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("headless").await?;
    let backend = scene.backend("backend").await?;
    let client = scene.stage.pod("client").await?;
    let headless = with(
        service("headless", WEB),
        json!({"clusterIP": "None", "clusterIPs": ["None"]}),
    );
    let pods = [(&backend.pod, State::Ready)];
    let mut objects = served(headless, &pods);
    // Slices with the label of headless Services are ignored, even if a Service has an address.
    objects.push(service("web", WEB + 1));
    objects.extend(
        slices("web", &pods)
            .into_iter()
            .map(|slice| labelled(slice, "service.kubernetes.io/headless", "")),
    );
    scene.apply(&objects).await?;
    let listed: Vec<_> = scene.list().await?;
    ensure!(
        listed.iter().all(|port| !port.service.contains("headless")),
        "{listed:?}"
    );
    for v4 in FAMILIES {
        let direct = SocketAddr::new(address(&backend.pod, v4), BACK);
        assert_answering(&client.inside, direct, &["backend"])?;
        assert_refused(&client.inside, front(v4, WEB + 1))?;
    }
    objects.extend(slices("web", &pods));
    objects.drain(4..6);
    scene.apply(&objects).await?;
    for v4 in FAMILIES {
        assert_answering(&client.inside, front(v4, WEB + 1), &["backend"])?;
    }
    Ok(())
}

/// Another proxy on the node serves it: packets of pods to its address must reach the node.
async fn left_to_another_proxy(name: &str, addresses: [IpAddr; 2]) -> Result<()> {
    let mut scene = Scene::set(name).await?;
    let (ours, theirs) = (scene.backend("ours").await?, scene.backend("theirs").await?);
    let client = scene.stage.pod("client").await?;
    for vip in addresses {
        let backend = SocketAddr::new(address(&theirs.pod, vip.is_ipv4()), BACK);
        let proxied = Proxied { vip, backend };
        scene.stage.node.nft(&proxies::nftables(&proxied))?;
    }
    let ips = addresses.map(|vip| vip.to_string());
    let web = with(service("web", WEB), json!({"clusterIP": ips[0], "clusterIPs": ips}));
    let of = |proxy: &str| labelled(web.clone(), "service.kubernetes.io/service-proxy-name", proxy);
    let pods = [(&ours.pod, State::Ready)];
    for (proxy, who) in [("kni", "ours"), ("somebody", "theirs"), ("kni", "ours")] {
        scene.apply(&served(of(proxy), &pods)).await?;
        for vip in addresses {
            assert_answering(&client.inside, SocketAddr::new(vip, FRONT), &[who])?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn services_of_another_proxy_are_left_to_it() -> Result<()> {
    require!(steady, root, netns, bpf, ip, nft);
    // An address outside the range of KNI's Services.
    let [v4, v6] = FAMILIES.map(|v4| vip(v4, WEB).to_string().replace("96", "98"));
    left_to_another_proxy("proxied", [v4.parse()?, v6.parse()?]).await
}

/// An address of the range that belongs to a Service of another proxy does not count as unused.
#[tokio::test(flavor = "multi_thread")]
async fn services_of_another_proxy_are_left_to_it_within_our_range_too() -> Result<()> {
    require!(steady, root, netns, bpf, ip, nft);
    left_to_another_proxy("proxied-within", FAMILIES.map(|v4| vip(v4, WEB))).await
}

/// The Service of a network; the same virtual addresses, ports and backend address in each.
fn of_network(network: &str, pods: &[&Backend]) -> Vec<Value> {
    let ips = [true, false].map(|v4| shared_vip(v4, WEB).to_string());
    let web = with(service(network, WEB), json!({"clusterIP": ips[0], "clusterIPs": ips}));
    let pods: Vec<_> = pods.iter().map(|backend| (&backend.pod, State::Ready)).collect();
    served(labelled(web, "kni.dev/network", network), &pods)
}

#[tokio::test(flavor = "multi_thread")]
async fn one_virtual_address_in_two_networks_is_two_services() -> Result<()> {
    const IPS: &str = "10.10.0.50,fd10::50";
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("two-networks").await?;
    let (blue, red) = (
        scene.backend_in("blue", "blue", IPS).await?,
        scene.backend_in("red", "red", IPS).await?,
    );
    let clients = [
        scene.stage.pod_in("blue", "blue-client", "10.10.0.60,fd10::60").await?,
        scene.stage.pod_in("red", "red-client", "10.10.0.60,fd10::60").await?,
    ];
    let plain = scene.stage.pod("plain").await?;
    let at = |v4| SocketAddr::new(shared_vip(v4, WEB), FRONT);
    let mut objects = of_network("blue", &[&blue]);
    objects.extend(of_network("red", &[&red]));
    scene.apply(&objects).await?;
    let mut streams = Vec::new();
    for v4 in FAMILIES {
        for (client, who) in clients.iter().zip(["blue", "red"]) {
            assert_answering(&client.inside, at(v4), &[who])?;
            streams.push((who, Stream::tcp(&client.inside, at(v4))?));
            streams.push((who, Stream::udp(&client.inside, at(v4))?));
        }
        let elsewhere = Transport::Tcp.ask(&plain.inside, at(v4));
        ensure!(
            matches!(elsewhere, Err(NoAnswer::Timeout | NoAnswer::Unreachable)),
            "a pod of the default network finds {elsewhere:?}"
        );
    }
    // A change of one does not affect the other.
    for red_ones in [of_network("red", &[]), Vec::new()] {
        let mut objects = of_network("blue", &[&blue]);
        let known = !red_ones.is_empty();
        objects.extend(red_ones);
        scene.apply(&objects).await?;
        for v4 in FAMILIES {
            assert_answering(&clients[0].inside, at(v4), &["blue"])?;
            if known {
                assert_refused(&clients[1].inside, at(v4))?;
            } else {
                scene.assert_silent(&clients[1], at(v4), "no_service").await?;
            }
        }
    }
    std::thread::sleep(Duration::from_millis(100));
    for (who, stream) in streams {
        stream.stop().assert_whole(who);
    }
    Ok(())
}
