//! 4 and 5: Tests clients without a backend: refused immediately if no backend exists, without an answer if backends
//! are on other nodes or the address is unused.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use kni_integration::{require, stage::address};
use serde_json::json;

use super::{
    objects::{FRONT, State, elsewhere, endpoint, served, service, slice, vip, with},
    scene::{FAMILIES, Scene, Transport, assert_answering, assert_refused, front},
};

const WEB: u8 = 30;

#[tokio::test(flavor = "multi_thread")]
async fn a_service_without_endpoints_refuses_at_once() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("nobody").await?;
    let backend = scene.backend("backend").await?;
    let client = scene.stage.pod("client").await?;
    let empty = vec![slice("web", "only", true, []), slice("web", "only", false, [])];
    for slices in [vec![], empty] {
        let mut objects = vec![service("web", WEB)];
        objects.extend(slices);
        scene.apply(&objects).await?;
        for v4 in FAMILIES {
            assert_refused(&client.inside, front(v4, WEB))?;
        }
    }
    let objects = served(service("web", WEB), &[(&backend.pod, State::Ready)]);
    scene.apply(&objects).await?;
    for v4 in FAMILIES {
        assert_answering(&client.inside, front(v4, WEB), &["backend"])?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn with_local_policy_and_endpoints_elsewhere_only_nothing_is_said() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("elsewhere").await?;
    let backend = scene.backend("backend").await?;
    let client = scene.stage.pod("client").await?;
    for here in [false, true] {
        let mut objects = vec![with(service("web", WEB), json!({"internalTrafficPolicy": "Local"}))];
        objects.extend(FAMILIES.map(|v4| {
            let endpoint = endpoint(address(&backend.pod, v4), State::Ready);
            slice("web", "only", v4, [if here { endpoint } else { elsewhere(endpoint) }])
        }));
        scene.apply(&objects).await?;
        for v4 in FAMILIES {
            if here {
                assert_answering(&client.inside, front(v4, WEB), &["backend"])?;
            } else {
                scene.assert_silent(&client, front(v4, WEB), "no_local_backend").await?;
            }
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_that_the_service_lacks_is_refused_at_once() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("port").await?;
    let backend = scene.backend("backend").await?;
    let client = scene.stage.pod("client").await?;
    let web = service("web", WEB);
    scene
        .apply(&served(web.clone(), &[(&backend.pod, State::Ready)]))
        .await?;
    for v4 in FAMILIES {
        let other = SocketAddr::new(vip(v4, WEB), FRONT + 1);
        assert_refused(&client.inside, other)?;
        // Not even the backend's own port is open at the virtual address.
        assert_refused(&client.inside, SocketAddr::new(vip(v4, WEB), super::objects::BACK))?;
        assert_answering(&client.inside, front(v4, WEB), &["backend"])?;
    }
    let moved = with(web, json!({"ports": super::objects::both(FRONT + 1)}));
    scene.apply(&served(moved, &[(&backend.pod, State::Ready)])).await?;
    for v4 in FAMILIES {
        let other = SocketAddr::new(vip(v4, WEB), FRONT + 1);
        assert_answering(&client.inside, other, &["backend"])?;
        assert_refused(&client.inside, front(v4, WEB))?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_of_no_service_says_nothing() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("no-service").await?;
    let backend = scene.backend("backend").await?;
    let client = scene.stage.pod("client").await?;
    // An external host would answer forwarded packets.
    for v4 in FAMILIES {
        let prefix = if v4 { "32" } else { "128" };
        let fabric = scene.stage.node.fabric();
        fabric.add_address("lo", &format!("{}/{prefix}", vip(v4, WEB)))?;
    }
    let _outside = kni_integration::traffic::Servers::start(scene.stage.node.fabric(), "outside", FRONT)?;
    let web = || served(service("web", WEB), &[(&backend.pod, State::Ready)]);
    for v4 in FAMILIES {
        let outside = Transport::Tcp.ask(&scene.stage.node, front(v4, WEB))?;
        ensure!(outside.identity == "outside", "the node is answered by {outside:?}");
        scene.apply(&[]).await?;
        scene.assert_silent(&client, front(v4, WEB), "no_service").await?;
        scene.apply(&web()).await?;
        assert_answering(&client.inside, front(v4, WEB), &["backend"])?;
        scene.apply(&[]).await?;
        scene.assert_silent(&client, front(v4, WEB), "no_service").await?;
    }
    Ok(())
}
