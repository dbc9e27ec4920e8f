//! Tests Services whose backends are on other nodes, in every network.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Service;
use kni_integration::{
    cluster::{PATIENCE, objects},
    require,
    traffic::{tcp_get, udp_ask},
    wait,
};
use kube::Api;
use serde_json::{Value, json};

use super::{
    super::scene::{ANSWER, PORT, address, identity},
    bed::{Bed, NODES, TEAMS},
};

/// The port of the Services.
const FRONT: u16 = 80;
/// Their names, and whether they are of IPv4.
const FRONTS: [(&str, bool); 2] = [("front4", true), ("front6", false)];

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_service_leads_to_backends_on_other_nodes() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let bed = Bed::start("fabric-services", &[], None).await?;
    bed.connected().await?;
    let mut services: Vec<Value> = Vec::new();
    for team in TEAMS {
        for (name, v4) in FRONTS {
            let backend = address(bed.pod(team, 1), v4).to_string();
            // The network that the Service belongs to; without the label the default one.
            let labels = match team.strip_suffix("-team") {
                Some(network) => json!({ "kni.dev/network": network }),
                None => json!({}),
            };
            services.extend(objects::service(team, name, FRONT, (&backend, PORT), &labels));
        }
    }
    bed.cluster.apply(&services).await?;
    for team in TEAMS {
        for (name, v4) in FRONTS {
            let api: Api<Service> = Api::namespaced(bed.cluster.client.clone(), team);
            let spec = api.get(name).await?.spec.unwrap_or_default();
            let front = spec.cluster_ip.unwrap_or_default().parse()?;
            let backend = identity(bed.pod(team, 1));
            // From the backend's own node, from other nodes, and from the backend itself.
            for node in 1..=NODES {
                let from = bed.pod(team, node);
                let what = format!("{} asks {team}/{name} at {front}", identity(from));
                wait::until(&what, PATIENCE, async || {
                    let tcp = tcp_get(&from.inside, front, FRONT, ANSWER)?;
                    let udp = udp_ask(&from.inside, front, FRONT, ANSWER)?;
                    ensure!(tcp.identity == backend && udp.identity == backend, "{tcp:?} {udp:?}");
                    ensure!(node == 1 || tcp.client.ip() == address(from, v4), "{tcp:?}");
                    Ok(true)
                })
                .await?;
            }
        }
    }
    Ok(())
}
