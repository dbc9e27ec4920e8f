//! 6: Tests that with session affinity a client keeps its backend, per port, while it uses it, also across a kill of
//! the agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Pod, require, traffic::Stream};
use serde_json::{Value, json};

use super::{
    objects::{FRONT, State, both, served, service, vip, with},
    scene::{Backend, FAMILIES, Scene, Transport, front},
};

const WEB: u8 = 40;

fn sticky(spec: Value) -> Value {
    with(with(service("web", WEB), json!({"sessionAffinity": "ClientIP"})), spec)
}

fn for_seconds(seconds: u32) -> Value {
    sticky(json!({"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}}}))
}

fn all(backends: &[Backend]) -> Vec<(&Pod, State)> {
    backends.iter().map(|backend| (&backend.pod, State::Ready)).collect()
}

async fn backends(scene: &Scene) -> Result<Vec<Backend>> {
    let mut backends = Vec::new();
    for name in ["a", "b", "c", "d"] {
        backends.push(scene.backend(name).await?);
    }
    Ok(backends)
}

/// The server that answers a client: each of several flows must reach the same one.
fn held(client: &Pod, transport: Transport, to: SocketAddr) -> Result<String> {
    let mut found = BTreeSet::new();
    for _ in 0..10 {
        let answer = transport.ask(&client.inside, to);
        let answer = answer.with_context(|| format!("{transport:?} from {} to {to}", client.name))?;
        found.insert(answer.identity);
    }
    ensure!(
        found.len() == 1,
        "{transport:?} from {} to {to}: {found:?} answer",
        client.name
    );
    found.pop_first().context("nobody answers")
}

/// The backends by client, transport and family.
fn table(clients: &[Pod]) -> Result<BTreeMap<(String, &'static str, bool), String>> {
    let mut table = BTreeMap::new();
    for client in clients {
        for (transport, name) in [(Transport::Tcp, "TCP"), (Transport::Udp, "UDP")] {
            for v4 in FAMILIES {
                let who = held(client, transport, front(v4, WEB))?;
                table.insert((client.name.clone(), name, v4), who);
            }
        }
    }
    Ok(table)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_keeps_its_backend_also_over_the_death_of_the_agent() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("affinity").await?;
    let backends = backends(&scene).await?;
    let mut clients = Vec::new();
    for number in 0..4 {
        clients.push(scene.stage.pod(&format!("client-{number}")).await?);
    }
    scene.apply(&served(sticky(json!({})), &all(&backends))).await?;
    let seconds: BTreeSet<u32> = scene
        .list()
        .await?
        .iter()
        .filter(|port| port.service.starts_with("team/web"))
        .map(|port| port.affinity_seconds)
        .collect();
    ensure!(seconds == BTreeSet::from([10_800]), "by default it lasts {seconds:?} s");
    let before = table(&clients)?;
    let used: BTreeSet<&String> = before.values().collect();
    ensure!(used.len() > 1, "all clients have one backend: {before:?}");
    // Another Service and another endpoint do not affect existing affinities.
    let more = scene.backend("more").await?;
    let mut pods = all(&backends);
    pods.push((&more.pod, State::Ready));
    let mut objects = served(service("another", WEB + 1), &all(&backends));
    objects.extend(served(sticky(json!({})), &pods));
    scene.apply(&objects).await?;
    ensure!(table(&clients)? == before, "changed by a new endpoint");
    scene.stage.agent.kill9()?;
    ensure!(table(&clients)? == before, "changed while no agent runs");
    scene.stage.agent.restart()?;
    ensure!(table(&clients)? == before, "changed by the agent's start");
    scene.wait_until_applied().await?;
    ensure!(
        table(&clients)? == before,
        "changed once the new agent had read everything"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn affinity_ends_with_the_endpoint_and_with_the_ports() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("affinity-ends").await?;
    let backends = backends(&scene).await?;
    let client = scene.stage.pod("client").await?;
    let two_ports = || {
        let mut ports = both(FRONT);
        for port in both(FRONT + 1).as_array().into_iter().flatten() {
            let mut port = port.clone();
            port["name"] = format!("{}-2", port["name"].as_str().unwrap_or_default()).into();
            ports.as_array_mut().expect("a list").push(port);
        }
        sticky(json!({"ports": ports}))
    };
    let mut objects = served(two_ports(), &all(&backends));
    for slice in &mut objects[1..] {
        slice["ports"] = json!([
            {"name": "tcp", "protocol": "TCP", "port": 8080}, {"name": "udp", "protocol": "UDP", "port": 8080},
            {"name": "tcp-2", "protocol": "TCP", "port": 8080}, {"name": "udp-2", "protocol": "UDP", "port": 8080},
        ]);
    }
    scene.apply(&objects).await?;
    // Eight choices; all equal with a probability of 1 in 4^7: neither ports nor protocols share their affinity.
    let mut found = BTreeSet::new();
    for v4 in FAMILIES {
        for transport in Transport::BOTH {
            for port in [FRONT, FRONT + 1] {
                found.insert(held(&client, transport, SocketAddr::new(vip(v4, WEB), port))?);
            }
        }
    }
    ensure!(found.len() > 1, "all ports have the one backend {found:?}");
    for v4 in FAMILIES {
        for transport in Transport::BOTH {
            scene.apply(&served(sticky(json!({})), &all(&backends))).await?;
            let who = held(&client, transport, front(v4, WEB))?;
            let left: Vec<_> = all(&backends).into_iter().filter(|(pod, _)| pod.name != who).collect();
            scene.apply(&served(sticky(json!({})), &left)).await?;
            let next = held(&client, transport, front(v4, WEB))?;
            ensure!(
                next != who,
                "{transport:?} IPv4 {v4}: {who} is no endpoint and still asked"
            );
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn affinity_lasts_while_it_is_used_and_no_longer() -> Result<()> {
    // The clock of the rows is set forward, so that the speed of the machine does not matter.
    const SECONDS: u32 = 2000;
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("affinity-time").await?;
    let backends = backends(&scene).await?;
    let client = scene.stage.pod("client").await?;
    scene.apply(&served(for_seconds(SECONDS), &all(&backends))).await?;
    for v4 in FAMILIES {
        let to = front(v4, WEB);
        let who = held(&client, Transport::Tcp, to)?;
        // More than twice the timeout, never unused for half of it.
        for _ in 0..6 {
            scene.stage.age(Duration::from_secs(800))?;
            ensure!(
                held(&client, Transport::Tcp, to)? == who,
                "IPv4 {v4}: changed although it is used"
            );
        }
    }
    // Unused for longer than the timeout, each choice is new; nine equal ones have a probability of 1 in 4^8.
    let choose = || FAMILIES.map(|v4| held(&client, Transport::Tcp, front(v4, WEB)));
    let first = choose().into_iter().collect::<Result<Vec<_>>>()?;
    let mut changed = BTreeSet::new();
    for _ in 0..8 {
        scene.stage.age(Duration::from_secs(u64::from(SECONDS) + 1))?;
        for (index, now) in choose().into_iter().enumerate() {
            if now? != first[index] {
                changed.insert(index);
            }
        }
        if changed.len() == FAMILIES.len() {
            return Ok(());
        }
    }
    anyhow::bail!("only {changed:?} of the families {first:?} ever changed")
}

/// For UDP, a client's next flow uses the same endpoint as its existing flows, while the endpoint serves.
#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_on_its_way_out_gets_no_new_connections_by_affinity() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("affinity-draining").await?;
    let backends = backends(&scene).await?;
    let client = scene.stage.pod("client").await?;
    for v4 in FAMILIES {
        scene.apply(&served(sticky(json!({})), &all(&backends))).await?;
        let who = held(&client, Transport::Tcp, front(v4, WEB))?;
        let stream = Stream::tcp(&client.inside, front(v4, WEB))?;
        let state = |pod: &Pod| if pod.name == who { State::Draining } else { State::Ready };
        let draining: Vec<_> = backends
            .iter()
            .map(|backend| (&backend.pod, state(&backend.pod)))
            .collect();
        scene.apply(&served(sticky(json!({})), &draining)).await?;
        let next = held(&client, Transport::Tcp, front(v4, WEB))?;
        ensure!(next != who, "IPv4 {v4}: {who} is on its way out and still asked");
        stream.stop().assert_whole(&who);
    }
    Ok(())
}
