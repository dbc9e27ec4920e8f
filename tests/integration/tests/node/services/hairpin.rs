//! 7: Tests a pod that reaches itself through its own Service, with the virtual address as the source.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    echo::{tcp_echo, udp_echo},
    require,
    stage::address,
    traffic::Stream,
};
use serde_json::json;

use super::{
    objects::{BACK, FRONT, State, both, served, service, vip, with},
    scene::{FAMILIES, Scene, Transport, answering, front, seen},
};

const WEB: u8 = 50;
/// A port with a server of the test, and its service port.
const ECHO: u16 = 9090;
const ECHO_FRONT: u16 = 90;

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_reaches_itself_through_its_service() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("hairpin").await?;
    let itself = scene.backend("itself").await?;
    scene
        .apply(&served(service("web", WEB), &[(&itself.pod, State::Ready)]))
        .await?;
    for v4 in FAMILIES {
        for transport in Transport::BOTH {
            let to = front(v4, WEB);
            let answer = transport.ask(&itself.pod.inside, to);
            let answer = answer.with_context(|| format!("{transport:?} to {to}"))?;
            ensure!(answer.identity == "itself", "{transport:?}: {answer:?}");
            ensure!(itself.server.saw(&answer.request), "{transport:?}: {answer:?}");
            ensure!(seen(&answer) == to.ip(), "{transport:?}: whom the pod sees: {answer:?}");
            // The pod still reaches itself at its own address.
            let direct = SocketAddr::new(address(&itself.pod, v4), BACK);
            let answer = transport.ask(&itself.pod.inside, direct)?;
            ensure!(seen(&answer) == direct.ip(), "{transport:?} directly: {answer:?}");
        }
        Stream::tcp(&itself.pod.inside, front(v4, WEB))?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn much_data_of_a_pod_to_itself_arrives_unchanged() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("hairpin-volume").await?;
    let itself = scene.stage.pod("itself").await?;
    let mut objects = served(
        with(service("web", WEB), json!({"ports": both(ECHO_FRONT)})),
        &[(&itself, State::Ready)],
    );
    for slice in &mut objects[1..] {
        slice["ports"] = both(ECHO);
    }
    scene.apply(&objects).await?;
    for v4 in FAMILIES {
        let to = SocketAddr::new(vip(v4, WEB), ECHO_FRONT);
        tcp_echo(&itself.inside, to, &itself.inside, ECHO, 1 << 20)?;
        for length in [1, 1400, 4000, 30_000] {
            udp_echo(&itself.inside, to, &itself.inside, ECHO, length)?;
        }
    }
    Ok(())
}

/// Among several endpoints the pod itself is chosen like the others.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_one_of_its_services_endpoints_to_itself() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("hairpin-one-of").await?;
    let (itself, other) = (scene.backend("itself").await?, scene.backend("other").await?);
    let pods = [(&itself.pod, State::Ready), (&other.pod, State::Ready)];
    scene.apply(&served(service("web", WEB), &pods)).await?;
    for v4 in FAMILIES {
        let found = answering(&itself.pod.inside, SocketAddr::new(vip(v4, WEB), FRONT), 50)?;
        ensure!(found.len() == 2, "IPv4 {v4}: {found:?}");
        ensure!(found.values().all(|times| *times > 20), "IPv4 {v4}: {found:?}");
    }
    Ok(())
}
