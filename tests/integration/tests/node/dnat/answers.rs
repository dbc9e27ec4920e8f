//! Tests the source and destination addresses of translated connections.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result};
use kni_integration::{
    Namespaces,
    echo::{tcp_echo, udp_echo},
    node::{FABRIC_V4, FABRIC_V6},
    require,
    stage::address,
    traffic::{NoAnswer, new_token, tcp_get_to, udp_ask_to},
    wait::patience,
};

use super::{ECHO, FAMILIES, HOST_PORT, NODE_PORT, Scene, VIP_CLOSED, VIP_ECHO, VIP_PORT, node, vip_at};

/// Sends requests to the backend over TCP and UDP. Both sockets are connected, so the answer must come from the
/// requested address.
fn ask(scene: &Scene, from: &Namespaces, to: SocketAddr, seen_as: IpAddr) -> Result<()> {
    for (protocol, get) in [
        ("TCP", tcp_get_to as fn(&Namespaces, SocketAddr, &str, Duration) -> _),
        ("UDP", udp_ask_to),
    ] {
        let what = || format!("{protocol} from {} to {to}", from.name());
        let token = new_token();
        let answer = get(from, to, &token, patience()).with_context(what)?;
        assert_eq!(answer.identity, "backend", "{}", what());
        assert!(scene.server.saw(&token), "{}", what());
        assert_eq!(
            answer.client.ip().to_canonical(),
            seen_as,
            "whom the backend sees, {}",
            what()
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_virtual_address_leads_to_the_pod() -> Result<()> {
    require!(root, netns, bpf, ip, nft);
    let scene = Scene::set("virtual").await?;
    for v4 in FAMILIES {
        let to = vip_at(v4, VIP_PORT);
        ask(&scene, &scene.client.inside, to, address(&scene.client, v4))?;
        ask(&scene, &scene.stage.node, to, node(v4))?;
        // Through its own service a pod has the node's address; otherwise the answer would not pass through the node.
        ask(&scene, &scene.backend.inside, to, node(v4))?;
        // Traffic without translation is not affected.
        let direct = SocketAddr::new(address(&scene.backend, v4), super::PORT);
        ask(&scene, &scene.client.inside, direct, address(&scene.client, v4))?;
        ask(&scene, &scene.stage.node, direct, node(v4))?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_of_the_node_leads_to_the_pod() -> Result<()> {
    require!(root, netns, bpf, ip, nft);
    let scene = Scene::set("node-port").await?;
    for v4 in FAMILIES {
        let fabric: IpAddr = if v4 { FABRIC_V4 } else { FABRIC_V6 }.parse()?;
        let host_port = SocketAddr::new(node(v4), HOST_PORT);
        ask(&scene, scene.stage.node.fabric(), host_port, fabric)?;
        ask(&scene, &scene.stage.node, host_port, node(v4))?;
        ask(&scene, &scene.client.inside, host_port, address(&scene.client, v4))?;
        ask(&scene, &scene.backend.inside, host_port, node(v4))?;
        // Node ports are masqueraded: all clients have the node's address.
        let node_port = SocketAddr::new(node(v4), NODE_PORT);
        for from in [
            scene.stage.node.fabric(),
            &scene.stage.node,
            &scene.client.inside,
            &scene.backend.inside,
        ] {
            ask(&scene, from, node_port, node(v4))?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn much_data_passes_the_translation() -> Result<()> {
    require!(root, netns, bpf, ip, nft);
    let scene = Scene::set("translated-volume").await?;
    for v4 in FAMILIES {
        let to = vip_at(v4, VIP_ECHO);
        for from in [&scene.client.inside, &*scene.stage.node, &scene.backend.inside] {
            tcp_echo(from, to, &scene.backend.inside, ECHO, 1 << 20)?;
            for length in [1000, 4000, 60_000] {
                udp_echo(from, to, &scene.backend.inside, ECHO, length)?;
            }
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_port_refuses_through_the_translation() -> Result<()> {
    require!(root, netns, bpf, ip, nft);
    let scene = Scene::set("translated-error").await?;
    for v4 in FAMILIES {
        let to = vip_at(v4, VIP_CLOSED);
        for from in [&scene.client.inside, &*scene.stage.node] {
            let what = format!("from {} to {to}", from.name());
            // The ICMP error quotes the backend's address; a connected socket gets it only if the translation is
            // reversed.
            let udp = udp_ask_to(from, to, &new_token(), patience());
            assert_eq!(udp, Err(NoAnswer::Refused), "UDP {what}");
            let tcp = tcp_get_to(from, to, &new_token(), patience());
            assert_eq!(tcp, Err(NoAnswer::Refused), "TCP {what}");
        }
    }
    Ok(())
}
