//! Tests addresses of Services outside of the cluster: those of a load balancer lead to the backends, those that the
//! writer of a Service chooses stay with the host that has them.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Pod,
    node::{FABRIC_V4, FABRIC_V6},
    require,
    stage::address,
    traffic::{Servers, UdpClient},
};
use serde_json::{Value, json};

use super::{
    objects::{BACK, FRONT, State, networks, served, service, with},
    scene::{FAMILIES, Scene, Transport, assert_answering, front, seen},
};

const WEB: u8 = 70;

/// An address outside, of a host that answers.
fn outside(v4: bool) -> IpAddr {
    if v4 { FABRIC_V4 } else { FABRIC_V6 }.parse().expect("an address")
}

fn outside_texts() -> [String; 2] {
    FAMILIES.map(|v4| outside(v4).to_string())
}

/// The Service with the addresses of a load balancer.
fn balanced(mut service: Value) -> Value {
    service = with(
        service,
        json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local"}),
    );
    let ingress = outside_texts().map(|ip| json!({"ip": ip}));
    service["status"] = json!({"loadBalancer": {"ingress": ingress}});
    service
}

fn assert_all(from: &Pod, port: u16, who: &str) -> Result<()> {
    FAMILIES
        .into_iter()
        .try_for_each(|v4| assert_answering(&from.inside, SocketAddr::new(outside(v4), port), &[who]))
}

/// Whether the list has a row of the Service with this problem.
async fn has_problem(scene: &Scene, problem: &str) -> Result<bool> {
    let listed = scene.list().await?;
    Ok(listed
        .iter()
        .any(|row| row.service == "team/web" && row.problem.contains(problem)))
}

async fn addresses_outside(name: &str, networks: Vec<Manifest>, routed: bool) -> Result<()> {
    const CHOSEN: &str = "spec.externalIPs is not served";
    const CLIENTS: &str = "spec.loadBalancerSourceRanges does not admit all pods";
    let mut scene = Scene::with(name, networks, &[]).await?;
    let ours = scene.backend("ours").await?;
    let client = scene.stage.pod("client").await?;
    let _far = Servers::start(scene.stage.node.fabric(), "far", FRONT)?;
    let _other = Servers::start(scene.stage.node.fabric(), "other", BACK)?;
    let objects = |service: Value| served(service, &[(&ours.pod, State::Ready)]);
    let plain = service("web", WEB);

    scene.apply(&objects(plain.clone())).await?;
    assert_all(&client, FRONT, "far").context("without an address outside")?;
    let chosen = with(plain.clone(), json!({"externalIPs": outside_texts()}));
    scene.apply(&objects(chosen)).await?;
    assert_all(&client, FRONT, "far").context("with externalIPs")?;
    ensure!(
        has_problem(&scene, CHOSEN).await? != routed,
        "{:?}",
        scene.list().await?
    );

    let asking = FAMILIES.map(|v4| UdpClient::open(&client.inside, SocketAddr::new(outside(v4), FRONT)));
    let asking = asking.into_iter().collect::<Result<Vec<_>>>()?;
    asking.iter().try_for_each(|one| one.assert_answered("far"))?;
    let at_load_balancer = balanced(plain.clone());
    scene.apply(&objects(at_load_balancer.clone())).await?;
    let followed = asking.iter().try_for_each(|one| one.assert_answered("ours"));
    followed.context("a sender from before")?;
    assert_all(&client, FRONT, "ours").context("at a load balancer")?;
    assert_all(&ours.pod, FRONT, "ours").context("the backend itself")?;
    assert_all(&client, BACK, "other").context("another port of the address")?;
    for v4 in FAMILIES {
        assert_answering(&client.inside, front(v4, WEB), &["ours"])?;
        for transport in Transport::BOTH {
            let answer = transport.ask(&client.inside, SocketAddr::new(outside(v4), FRONT))?;
            ensure!(
                seen(&answer) == address(&client, v4),
                "{transport:?}: the backend sees {answer:?} and not the client"
            );
        }
    }

    // The rows know no clients: an address that some pods must not reach is left to the load balancer.
    let limited = with(at_load_balancer, json!({"loadBalancerSourceRanges": ["192.0.2.0/24"]}));
    scene.apply(&objects(limited)).await?;
    assert_all(&client, FRONT, "far").context("with clients that are no pods")?;
    ensure!(
        has_problem(&scene, CLIENTS).await? != routed,
        "{:?}",
        scene.list().await?
    );
    scene.apply(&objects(plain)).await?;
    assert_all(&client, FRONT, "far").context("without an address outside again")?;
    let listed = scene.list().await?;
    let mut ours = listed.iter().filter(|row| row.service.starts_with("team/web"));
    ensure!(ours.all(|row| row.problem.is_empty()), "{listed:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_routed_network_reaches_services_at_their_load_balancers() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    addresses_outside("balanced-routed", networks(), true).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_masquerading_network_reaches_services_at_their_load_balancers() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut networks = networks();
    networks[0] = networks[0].clone().spec("egress: {mode: Masquerade}");
    addresses_outside("balanced-masq", networks, false).await
}
