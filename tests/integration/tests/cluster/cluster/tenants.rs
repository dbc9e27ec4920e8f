//! Tests namespaces that belong to networks: interfaces of pods without annotations, and their reachability.

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Service;
use kni_api::PodInterface;
use kni_integration::{
    Cluster, Pod,
    cluster::{connect, objects, patience},
    require,
    traffic::{Servers, udp_ask},
    wait,
};
use kube::Api;
use serde_json::json;

use super::scene::{
    ANSWER, PORT, address, assert_reached, assert_silent, identity, interface_names, serve, tenants_with,
    wait_for_silence,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[expect(clippy::too_many_lines, reason = "what two tenants reach, with and without policies")]
async fn pods_of_a_namespace_land_in_its_network_and_reach_what_they_did_before() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::start("cluster-tenants", 1).await?;
    // One block covers the whole network, so both networks assign the same addresses.
    let whole = json!({ "perNodePrefix": { "ipv4": 16, "ipv6": 64 } });
    tenants_with(&cluster, &whole).await?;
    let pods = cluster
        .run(&[
            objects::pod("red-team", "a", "node1"),
            objects::pod("red-team", "b", "node1"),
            objects::pod("blue-team", "a", "node1"),
            objects::pod("blue-team", "b", "node1"),
            objects::pod("plain", "a", "node1"),
            with_network("red-team", "other", "blue"),
            with_network("plain", "none", "none"),
        ])
        .await?;
    let [red_a, red_b, blue_a, blue_b, plain, other, none] = &pods[..] else {
        unreachable!("as many as were asked for");
    };
    for (pod, network) in [
        (red_a, "red"),
        (red_b, "red"),
        (blue_a, "blue"),
        (blue_b, "blue"),
        (plain, "default"),
        (other, "blue"),
    ] {
        assert_eq!(network_of(&cluster, pod).await?, network, "{}", identity(pod));
    }
    assert_eq!(interface_names(none)?, Vec::<String>::new(), "no interface but lo");
    assert_eq!(none.ips(), Vec::<IpAddr>::new());

    let servers = [red_a, red_b, blue_a, blue_b, plain, other].map(serve);
    for served in &servers {
        assert!(served.is_ok(), "{served:?}");
    }
    // The same addresses in both networks, and each pod reaches its own neighbour.
    assert_reached(red_a, red_b);
    assert_reached(blue_a, blue_b);
    assert_reached(other, blue_a);
    assert_ne!(address(red_a, true), address(red_b, true));
    let overlap = [red_a, red_b].map(|pod| address(pod, true));
    let same = [blue_a, blue_b, other]
        .iter()
        .any(|pod| overlap.contains(&address(pod, true)));
    assert!(same, "the two networks are meant to hand out the same addresses");
    assert_silent(plain, red_a);

    // A policy of one tenant applies only to that tenant.
    let closed = json!({ "podSelector": {}, "policyTypes": ["Ingress"], "ingress": [] });
    let policy = objects::policy("red-team", "closed", &closed);
    cluster.apply(std::slice::from_ref(&policy)).await?;
    wait_for_silence(red_a, red_b).await?;
    assert_reached(blue_a, blue_b);
    cluster
        .apply(&[objects::policy("blue-team", "closed", &closed)])
        .await?;
    wait_for_silence(blue_a, blue_b).await?;
    cluster.delete(&policy).await?;
    wait::until("red is open again", patience(), async || {
        Ok(super::scene::ask(red_a, red_b) == vec![Ok(identity(red_b)), Ok(identity(red_b))])
    })
    .await?;
    assert_silent(blue_a, blue_b);

    reach_the_api_server(&mut cluster, &[red_a, blue_a, plain]).await?;
    reach_name_servers(&cluster, &[red_a, blue_a, plain]).await
}

/// Uses the address of its service, as every client in a pod does.
async fn reach_the_api_server(cluster: &mut Cluster, pods: &[&Pod]) -> Result<()> {
    let kubeconfig = cluster.control.kubeconfig("pod", "pods")?;
    let kubeconfig = kubeconfig.replace("https://198.51.100.10:6443", "https://10.96.0.1");
    assert!(kubeconfig.contains("https://10.96.0.1\""), "{kubeconfig}");
    for pod in pods {
        let what = format!("{} reaches the API server", identity(pod));
        wait::until_some(&what, patience(), async || {
            let client = connect(&pod.inside, &kubeconfig).await?;
            let version = client.apiserver_version().await.context("ask for its version")?;
            Ok(Some(version.git_version))
        })
        .await?;
    }
    Ok(())
}

/// A UDP service with a backend outside all pod networks.
async fn reach_name_servers(cluster: &Cluster, pods: &[&Pod]) -> Result<()> {
    let _names = Servers::start(cluster.fabric.inside(), "names", PORT)?;
    let objects = objects::service("kube-system", "kube-dns", 53, ("198.51.100.1", PORT), &json!({}));
    cluster.apply(&objects).await?;
    let services: Api<Service> = Api::namespaced(cluster.client.clone(), "kube-system");
    let spec = services.get("kube-dns").await?.spec.context("spec")?;
    let address: IpAddr = spec.cluster_ip.context("address")?.parse()?;
    for pod in pods {
        let what = format!("{} gets an answer of the name server", identity(pod));
        wait::until_some(&what, patience(), async || {
            let answer = udp_ask(&pod.inside, address, 53, ANSWER)?;
            Ok(Some(answer.identity == "names"))
        })
        .await?;
    }
    Ok(())
}

fn with_network(namespace: &str, name: &str, network: &str) -> serde_json::Value {
    let annotated = json!({ "annotations": { "kni.dev/network": network } });
    objects::pod_with(namespace, name, "node1", &annotated)
}

/// The network of a pod's `eth0`, from its object.
async fn network_of(cluster: &Cluster, pod: &Pod) -> Result<String> {
    let api: Api<PodInterface> = Api::namespaced(cluster.client.clone(), &pod.namespace);
    let name = kni_api::pod_interface::name(&pod.name, &pod.uid, "eth0");
    wait::until_some(&format!("PodInterface {name}"), patience(), async || {
        let object = api.get_opt(&name).await?;
        Ok(object.map(|object| object.spec.pod_network_name))
    })
    .await
}
