//! 12 and 13: Tests endpoints that are not pods, and ICMP errors about their packets.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Namespaces,
    echo::{tcp_echo, udp_echo},
    node::{FABRIC_V4, FABRIC_V6, NODE_V4, NODE_V6},
    require,
    stage::address,
    traffic::{Servers, assert_path_limit},
};
use serde_json::Value;

use super::{
    objects::{BACK, State, both, endpoint, service, slice},
    scene::{FAMILIES, Scene, Transport, assert_answering, assert_refused, front, seen},
};

const API: u8 = 1;
const FAR: u8 = 2;
const ECHO: u16 = 9090;

fn parse(v4: bool, [four, six]: [&str; 2]) -> IpAddr {
    if v4 { four } else { six }.parse().expect("an address")
}

/// A Service whose only endpoint is at these addresses, at `port`.
fn at(name: &str, last: u8, addresses: [&str; 2], port: u16) -> Vec<Value> {
    let mut objects = vec![service(name, last)];
    for v4 in FAMILIES {
        let endpoint = endpoint(parse(v4, addresses), State::Ready);
        let mut slice = slice(name, "only", v4, [endpoint]);
        slice["ports"] = both(port);
        objects.push(slice);
    }
    objects
}

const NODE: [&str; 2] = [NODE_V4, NODE_V6];
const FABRIC: [&str; 2] = [FABRIC_V4, FABRIC_V6];

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_on_the_hosts_network_are_reached() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("host-network").await?;
    let client = scene.stage.pod("client").await?;
    let _api = Servers::start(&scene.stage.node, "api", BACK)?;
    let _far = Servers::start(scene.stage.node.fabric(), "far", BACK)?;
    let mut objects = at("api", API, NODE, BACK);
    objects.extend(at("far", FAR, FABRIC, BACK));
    scene.apply(&objects).await?;
    for v4 in FAMILIES {
        for (last, who) in [(API, "api"), (FAR, "far")] {
            assert_answering(&client.inside, front(v4, last), &[who])?;
            for transport in Transport::BOTH {
                let answer = transport.ask(&client.inside, front(v4, last))?;
                ensure!(
                    seen(&answer) == address(&client, v4),
                    "{transport:?}: {who} sees {answer:?} and not the client"
                );
            }
        }
    }
    Ok(())
}

/// A provisional attach uses clsact filters, which TCX links replace soon after. Packets are translated exactly once,
/// by either of them.
#[tokio::test(flavor = "multi_thread")]
async fn connections_of_a_pod_pass_from_its_first_moment_on() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::with("first-moments", super::objects::networks(), &["--warm-sandboxes", "0"]).await?;
    let _api = Servers::start(&scene.stage.node, "api", BACK)?;
    scene.apply(&at("api", API, NODE, BACK)).await?;
    for number in 0..4 {
        let client = scene.stage.pod(&format!("client-{number}")).await?;
        let attached = Instant::now();
        let mut answered = 0;
        while attached.elapsed() < Duration::from_millis(500) {
            for v4 in FAMILIES {
                for transport in Transport::BOTH {
                    let answer = transport.ask(&client.inside, front(v4, API));
                    let what = || {
                        format!(
                            "{transport:?} IPv4 {v4} of {}, {:?} after it was made",
                            client.name,
                            attached.elapsed()
                        )
                    };
                    ensure!(answer.with_context(what)?.identity == "api", "{}", what());
                    answered += 1;
                }
            }
        }
        println!("{}: {answered} were answered", client.name);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn much_data_passes_to_the_hosts_network() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("host-volume").await?;
    let client = scene.stage.pod("client").await?;
    let mut objects = at("api", API, NODE, ECHO);
    objects.extend(at("far", FAR, FABRIC, ECHO));
    scene.apply(&objects).await?;
    let (node, fabric) = (&*scene.stage.node, scene.stage.node.fabric());
    for v4 in FAMILIES {
        for (last, server) in [(API, node), (FAR, fabric)] {
            tcp_echo(&client.inside, front(v4, last), server, ECHO, 1 << 20)?;
            for length in [1, 1400, 20_000] {
                udp_echo(&client.inside, front(v4, last), server, ECHO, length)?;
            }
        }
    }
    Ok(())
}

/// The error quotes the packet as received by the endpoint; a connected socket gets it only if the translation is
/// reversed.
#[tokio::test(flavor = "multi_thread")]
async fn a_closed_port_behind_a_service_refuses() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("closed").await?;
    let (pod, client) = (scene.stage.pod("pod").await?, scene.stage.pod("client").await?);
    let mut objects = at("api", API, NODE, ECHO);
    objects.extend(at("far", FAR, FABRIC, ECHO));
    let [v4, v6] = FAMILIES.map(|v4| address(&pod, v4).to_string());
    objects.extend(at("pod", FAR + 1, [&v4, &v6], ECHO));
    scene.apply(&objects).await?;
    for v4 in FAMILIES {
        for last in [API, FAR, FAR + 1] {
            assert_refused(&client.inside, front(v4, last))?;
        }
        // A pod that reaches itself through the Service is refused, too.
        assert_refused_by_itself(&pod.inside, front(v4, FAR + 1))?;
    }
    Ok(())
}

fn assert_refused_by_itself(from: &Namespaces, to: SocketAddr) -> Result<()> {
    let asked = Transport::Tcp.ask(from, to);
    let refused = kni_integration::traffic::NoAnswer::Refused;
    ensure!(asked == Err(refused), "from {} to {to}: {asked:?}", from.name());
    Ok(())
}

fn jumbo() -> Vec<Manifest> {
    let mut networks = super::objects::networks();
    networks[0] = networks[0].clone().spec("mtu: 9000");
    networks
}

#[tokio::test(flavor = "multi_thread")]
async fn the_path_mtu_is_learned_through_a_cluster_ip() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::with("path-mtu", jumbo(), &[]).await?;
    let client = scene.stage.pod("client").await?;
    scene.apply(&at("far", FAR, FABRIC, ECHO)).await?;
    for v4 in FAMILIES {
        let to = front(v4, FAR);
        assert_path_limit(&client.inside, to, 4000)?;
        // The path MTU is cached for the virtual address only: TCP has to determine it itself.
        tcp_echo(&client.inside, to, scene.stage.node.fabric(), ECHO, 1 << 20)?;
    }
    Ok(())
}
