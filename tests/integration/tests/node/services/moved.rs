//! 2: Tests UDP, which has no end of connection: flows move when their backend no longer serves, unless there is no
//! other, and when their destination becomes a Service.

use std::net::SocketAddr;

use anyhow::Result;
use kni_integration::{
    Pod,
    node::{FABRIC_V4, FABRIC_V6},
    require,
    traffic::{Servers, UdpClient},
};
use serde_json::json;

use super::{
    objects::{FRONT, State, labelled, served, service, with},
    scene::{FAMILIES, Scene, assert_refused, front},
};

const DNS: u8 = 53;

#[tokio::test(flavor = "multi_thread")]
async fn udp_moves_when_its_endpoint_serves_no_more() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("moved").await?;
    let (old, new) = (scene.backend("old").await?, scene.backend("new").await?);
    let client = scene.stage.pod("client").await?;
    for gone in [None, Some(State::Gone)] {
        scene
            .apply(&served(service("dns", DNS), &[(&old.pod, State::Ready)]))
            .await?;
        let asking = FAMILIES.map(|v4| UdpClient::open(&client.inside, front(v4, DNS)));
        let asking = asking.into_iter().collect::<Result<Vec<_>>>()?;
        asking.iter().try_for_each(|one| one.assert_answered("old"))?;
        // A terminating endpoint gets no new flows and retains the existing ones.
        let draining = [(&old.pod, State::Draining), (&new.pod, State::Ready)];
        scene.apply(&served(service("dns", DNS), &draining)).await?;
        asking.iter().try_for_each(|one| one.assert_answered("old"))?;
        for v4 in FAMILIES {
            UdpClient::open(&client.inside, front(v4, DNS))?.assert_answered("new")?;
        }
        // The old pod still answers, but no flow may reach it.
        let mut pods = vec![(&new.pod, State::Ready)];
        pods.extend(gone.map(|state| (&old.pod, state)));
        scene.apply(&served(service("dns", DNS), &pods)).await?;
        asking.iter().try_for_each(|one| one.assert_answered("new"))?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_any_endpoint_udp_flows_are_left_alone() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("unmoved").await?;
    let (old, new) = (scene.backend("old").await?, scene.backend("new").await?);
    let client = scene.stage.pod("client").await?;
    let dns = |pods: &[(&Pod, State)]| served(service("dns", DNS), pods);
    scene.apply(&dns(&[(&old.pod, State::Ready)])).await?;
    let asking = FAMILIES.map(|v4| UdpClient::open(&client.inside, front(v4, DNS)));
    let asking = asking.into_iter().collect::<Result<Vec<_>>>()?;
    asking.iter().try_for_each(|one| one.assert_answered("old"))?;
    for none in [vec![], vec![(&old.pod, State::Gone)]] {
        scene.apply(&dns(&none)).await?;
        asking.iter().try_for_each(|one| one.assert_answered("old"))?;
        for v4 in FAMILIES {
            assert_refused(&client.inside, front(v4, DNS))?;
        }
    }
    // The first new endpoint gets all flows.
    scene.apply(&dns(&[(&new.pod, State::Ready)])).await?;
    asking.iter().try_for_each(|one| one.assert_answered("new"))
}

/// The rows of a Service without endpoints name no backend that an agent could take over.
#[tokio::test(flavor = "multi_thread")]
async fn flows_to_a_backend_from_before_the_agent_move_too() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("moved-later").await?;
    let (old, new) = (scene.backend("old").await?, scene.backend("new").await?);
    let client = scene.stage.pod("client").await?;
    let dns = |pods: &[(&Pod, State)]| served(service("dns", DNS), pods);
    scene.apply(&dns(&[(&old.pod, State::Ready)])).await?;
    let asking = FAMILIES.map(|v4| UdpClient::open(&client.inside, front(v4, DNS)));
    let asking = asking.into_iter().collect::<Result<Vec<_>>>()?;
    asking.iter().try_for_each(|one| one.assert_answered("old"))?;
    scene.apply(&dns(&[])).await?;
    scene.stage.agent.kill9()?;
    scene.stage.agent.restart()?;
    asking.iter().try_for_each(|one| one.assert_answered("old"))?;
    scene.apply(&dns(&[(&new.pod, State::Ready)])).await?;
    asking.iter().try_for_each(|one| one.assert_answered("new"))
}

#[tokio::test(flavor = "multi_thread")]
async fn flows_to_an_address_that_becomes_virtual_reach_the_service() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("becomes-virtual").await?;
    let backend = scene.backend("backend").await?;
    let client = scene.stage.pod("client").await?;
    let _host = Servers::start(scene.stage.node.fabric(), "host", FRONT)?;
    let of_host = [FABRIC_V4, FABRIC_V6];
    let asking = of_host.map(|ip| UdpClient::open(&client.inside, SocketAddr::new(ip.parse()?, FRONT)));
    let asking = asking.into_iter().collect::<Result<Vec<_>>>()?;
    asking.iter().try_for_each(|one| one.assert_answered("host"))?;
    // Of another network's Services the flow is no business.
    let ips = json!({"clusterIP": FABRIC_V4, "clusterIPs": of_host});
    let virtual_ = with(service("late", 1), ips);
    let elsewhere = labelled(virtual_.clone(), "kni.dev/network", "blue");
    scene.apply(&served(elsewhere, &[(&backend.pod, State::Ready)])).await?;
    asking.iter().try_for_each(|one| one.assert_answered("host"))?;
    scene.apply(&served(virtual_, &[(&backend.pod, State::Ready)])).await?;
    asking.iter().try_for_each(|one| one.assert_answered("backend"))
}
