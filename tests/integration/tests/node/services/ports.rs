//! 10 and 15: Tests that families, ports and protocols are served independently, from any number of slices.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use kni_integration::{Pod, require, stage::address, traffic::Servers};
use serde_json::{Value, json};

use super::{
    objects::{BACK, FRONT, State, both, endpoint, service, slice, vip, with},
    scene::{FAMILIES, Scene, Transport, answering, assert_answering, assert_refused, front},
};

const WEB: u8 = 80;
/// The port of additional servers of pods.
const OTHER: u16 = 9090;

fn ready(pod: &Pod, v4: bool) -> Value {
    endpoint(address(pod, v4), State::Ready)
}

fn with_ports(mut slice: Value, ports: Value) -> Value {
    slice["ports"] = ports;
    slice
}

#[tokio::test(flavor = "multi_thread")]
async fn each_family_has_its_own_endpoints() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("families").await?;
    let (four, six) = (scene.backend("four").await?, scene.backend("six").await?);
    let client = scene.stage.pod("client").await?;
    scene
        .apply(&[
            service("web", WEB),
            slice("web", "a", true, [ready(&four.pod, true)]),
            slice("web", "a", false, [ready(&six.pod, false)]),
        ])
        .await?;
    assert_answering(&client.inside, front(true, WEB), &["four"])?;
    assert_answering(&client.inside, front(false, WEB), &["six"])?;
    let single = with(
        service("web", WEB),
        json!({"clusterIP": vip(false, WEB).to_string(), "clusterIPs": [vip(false, WEB).to_string()]}),
    );
    let slices = FAMILIES.map(|v4| slice("web", "a", v4, [ready(&four.pod, v4)]));
    let mut objects = vec![single];
    objects.extend(slices);
    scene.apply(&objects).await?;
    assert_answering(&client.inside, front(false, WEB), &["four"])?;
    scene.assert_silent(&client, front(true, WEB), "no_service").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_named_port_is_another_number_at_another_endpoint() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("named").await?;
    let (usual, other) = (scene.backend("usual").await?, scene.stage.pod("other").await?);
    let _other_server = Servers::start(&other.inside, "other", OTHER)?;
    let client = scene.stage.pod("client").await?;
    let mut objects = vec![service("web", WEB)];
    for v4 in FAMILIES {
        objects.push(slice("web", "usual", v4, [ready(&usual.pod, v4)]));
        objects.push(with_ports(slice("web", "other", v4, [ready(&other, v4)]), both(OTHER)));
    }
    scene.apply(&objects).await?;
    for v4 in FAMILIES {
        assert_answering(&client.inside, front(v4, WEB), &["usual", "other"])?;
        // No server listens at the other number.
        assert_refused(&client.inside, SocketAddr::new(address(&other, v4), BACK))?;
        assert_refused(&client.inside, SocketAddr::new(address(&usual.pod, v4), OTHER))?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_and_protocols_of_one_address_are_independent() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("ports").await?;
    let pod = scene.stage.pod("pod").await?;
    let _first = Servers::start(&pod.inside, "first", BACK)?;
    let _second = Servers::start(&pod.inside, "second", OTHER)?;
    let client = scene.stage.pod("client").await?;
    let port = |name: &str, protocol: &str, port: u16| json!({"name": name, "protocol": protocol, "port": port});
    // For one number, TCP and UDP have different backends; for the next, UDP is not served; for the last, both have the
    // same.
    let web = with(
        service("web", WEB),
        json!({"ports": [
            port("a", "TCP", FRONT), port("b", "UDP", FRONT), port("c", "SCTP", FRONT),
            port("d", "TCP", FRONT + 1), port("e", "TCP", FRONT + 2), port("f", "UDP", FRONT + 2),
        ]}),
    );
    let numbers = json!([
        port("a", "TCP", BACK),
        port("b", "UDP", OTHER),
        port("c", "SCTP", BACK),
        port("d", "TCP", OTHER),
        port("e", "TCP", BACK),
        port("f", "UDP", BACK),
    ]);
    let mut objects = vec![web];
    objects.extend(FAMILIES.map(|v4| with_ports(slice("web", "only", v4, [ready(&pod, v4)]), numbers.clone())));
    scene.apply(&objects).await?;
    for v4 in FAMILIES {
        let at = |port: u16| SocketAddr::new(vip(v4, WEB), port);
        for (transport, port, who) in [
            (Transport::Tcp, FRONT, Some("first")),
            (Transport::Udp, FRONT, Some("second")),
            (Transport::Tcp, FRONT + 1, Some("second")),
            (Transport::Udp, FRONT + 1, None),
            (Transport::Tcp, FRONT + 2, Some("first")),
            (Transport::Udp, FRONT + 2, Some("first")),
        ] {
            let answer = transport.ask(&client.inside, at(port)).map(|answer| answer.identity);
            let expected = who.map_or(Err(kni_integration::traffic::NoAnswer::Refused), |who| Ok(who.into()));
            ensure!(
                answer == expected,
                "{transport:?} {}: {answer:?} instead of {expected:?}",
                at(port)
            );
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn many_slices_are_one_service_and_a_pod_in_two_counts_once() -> Result<()> {
    const TIMES: usize = 150;
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("slices").await?;
    let (a, b, c) = (
        scene.backend("a").await?,
        scene.backend("b").await?,
        scene.backend("c").await?,
    );
    let client = scene.stage.pod("client").await?;
    let mut objects = vec![service("web", WEB)];
    for v4 in FAMILIES {
        objects.push(slice("web", "1", v4, [ready(&a.pod, v4), ready(&b.pod, v4)]));
        objects.push(slice("web", "2", v4, [ready(&b.pod, v4)]));
        // It moves to another slice: a late update of the first slice does not remove it.
        objects.push(slice("web", "3", v4, [endpoint(address(&b.pod, v4), State::Gone)]));
        objects.push(slice("web", "4", v4, [ready(&c.pod, v4)]));
    }
    scene.apply(&objects).await?;
    let listed = scene.list().await?;
    let ours = listed.iter().filter(|port| port.service.starts_with("team/web"));
    let counts: Vec<usize> = ours.map(|port| port.backends.len()).collect();
    ensure!(counts == [3; 4], "endpoints by port and family: {counts:?}");
    for v4 in FAMILIES {
        let found = answering(&client.inside, front(v4, WEB), TIMES)?;
        println!("IPv4 {v4}: {found:?}");
        // 300 flows over three endpoints: 100 each, with a deviation of 8. If one were counted twice, it would get 150.
        ensure!(
            found.len() == 3 && found.values().all(|times| (55..=145).contains(times)),
            "IPv4 {v4}: {found:?}"
        );
    }
    // 250 hosts outside in three slices, as the control plane splits them.
    let mut objects = vec![service("web", WEB)];
    for (name, numbers) in [("1", 0..100), ("2", 100..200), ("3", 200..250)] {
        let endpoints =
            numbers.map(|n: u16| endpoint([198, 51, 100, u8::try_from(n).expect("<250")].into(), State::Ready));
        objects.push(slice("web", name, true, endpoints));
    }
    scene.apply(&objects).await?;
    let listed = scene.list().await?;
    let of_v4 = vip(true, WEB).to_string();
    let counts: Vec<usize> = listed
        .iter()
        .filter(|port| port.address == of_v4)
        .map(|port| port.backends.len())
        .collect();
    ensure!(counts == [250; 2], "endpoints by port: {counts:?}");
    Ok(())
}
