//! Tests that connections lead to pods of the Service's network and to hosts outside, and to nothing else, in networks
//! with the same addresses.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Pod, eventually, patience, require, stage::address, traffic::Servers};
use serde_json::{Value, json};

use super::{
    objects::{BACK, FRONT, State, endpoint, labelled, service, shared_vip, slice, with},
    scene::{FAMILIES, Scene, assert_answering, assert_refused, front},
};

const DB: u8 = 80;
const BLUE_DB: u8 = 81;
/// Addresses of the database in blue; red has the same subnets.
const IPS: &str = "10.10.0.50,fd10::50";

/// A Service with a pod as its endpoint, as the API server's controller writes it.
fn of_pod(service: Value, name: &str, pod: &Pod) -> Vec<Value> {
    let service_name = service["metadata"]["name"].as_str().expect("a name").to_owned();
    let mut objects = vec![service];
    objects.extend(FAMILIES.map(|v4| {
        let mut endpoint = endpoint(address(pod, v4), State::Ready);
        endpoint["targetRef"] = json!({"kind": "Pod", "namespace": "team", "name": name, "uid": pod.uid});
        slice(&service_name, "only", v4, [endpoint])
    }));
    objects
}

/// The same Service in network blue.
fn in_blue(name: &str) -> Value {
    let ips = FAMILIES.map(|v4| shared_vip(v4, BLUE_DB).to_string());
    let service = with(service(name, BLUE_DB), json!({"clusterIP": ips[0], "clusterIPs": ips}));
    labelled(service, "kni.dev/network", "blue")
}

/// Waits until the list has a row of the Service with this problem.
async fn wait_for_problem(scene: &Scene, service: &str, problem: &str) -> Result<()> {
    eventually(patience(), async || {
        let listed = scene.list().await?;
        let found = listed
            .iter()
            .any(|row| row.service == service && row.problem.contains(problem));
        ensure!(found, "{service} is not listed with {problem:?}: {listed:?}");
        Ok(())
    })
    .await
}

/// An unchanged Service of a tenant, which belongs to the default network, has the addresses of the tenant's pods. A
/// pod of the default network with such an address must not answer for them.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_leads_to_no_pod_of_another_network() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("stranger").await?;
    let db = scene.backend_in("blue", "db", IPS).await?;
    let client = scene.stage.pod("client").await?;
    let blue_client = scene.stage.pod_in("blue", "blue-client", "10.10.0.60,fd10::60").await?;
    // Without the check, packets to the tenant's address leave the node, and a host outside with that address answers.
    for v4 in FAMILIES {
        let prefix = if v4 { 32 } else { 128 };
        let fabric = scene.stage.node.fabric();
        fabric.add_address("lo", &format!("{}/{prefix}", address(&db.pod, v4)))?;
    }
    let _outside = Servers::start(scene.stage.node.fabric(), "outside", BACK)?;
    let mut objects = of_pod(service("db", DB), "db", &db.pod);
    objects.extend(of_pod(in_blue("blue-db"), "db", &db.pod));
    scene.apply(&objects).await?;
    for v4 in FAMILIES {
        assert_refused(&client.inside, front(v4, DB))?;
        let blue = SocketAddr::new(shared_vip(v4, BLUE_DB), FRONT);
        assert_answering(&blue_client.inside, blue, &["db"])?;
    }
    wait_for_problem(
        &scene,
        "team/db",
        "(pod team/db) is neither a pod of network default nor a host outside",
    )
    .await?;
    wait_for_problem(
        &scene,
        "team/db:tcp",
        "no endpoint is a known pod of the network or a host outside",
    )
    .await?;
    let listed = scene.list().await?;
    let blue = listed.iter().filter(|row| row.service.starts_with("team/blue-db"));
    ensure!(
        blue.clone().count() == 4 && blue.clone().all(|row| row.problem.is_empty()),
        "{listed:?}"
    );
    Ok(())
}

/// The endpoint is there first, and stays longer than its pod: an address without a pod of the network gets no
/// connections, also while another network has a pod there.
#[tokio::test(flavor = "multi_thread")]
async fn backends_come_and_go_with_the_pods_of_the_network() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("membership").await?;
    let red = scene.backend_in("red", "red", IPS).await?;
    let client = scene.stage.pod_in("blue", "blue-client", "10.10.0.60,fd10::60").await?;
    let mut objects = vec![in_blue("db")];
    objects.extend(FAMILIES.map(|v4| slice("db", "only", v4, [endpoint(address(&red.pod, v4), State::Ready)])));
    scene.apply(&objects).await?;
    let at = |v4| SocketAddr::new(shared_vip(v4, BLUE_DB), FRONT);
    for round in 0..2 {
        for v4 in FAMILIES {
            assert_refused(&client.inside, at(v4)).with_context(|| format!("round {round}"))?;
        }
        let db = scene.backend_in("blue", &format!("db-{round}"), IPS).await?;
        let name = format!("db-{round}");
        eventually(patience(), async || {
            FAMILIES
                .into_iter()
                .try_for_each(|v4| assert_answering(&client.inside, at(v4), &[&name]))
        })
        .await?;
        drop(db.server);
        scene.stage.kubelet.kill_pod(db.pod).await?;
        wait_for_problem(
            &scene,
            "team/db",
            "endpoint 10.10.0.50 is neither a pod of network blue nor a host",
        )
        .await?;
    }
    Ok(())
}
