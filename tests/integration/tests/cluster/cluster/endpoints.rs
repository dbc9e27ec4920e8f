//! Tests that agents report where their nodes are reached, that false reports are not confirmed, and that the reports
//! of nodes that are gone are removed.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::{
    core::v1::{Node, Service},
    discovery::v1::EndpointSlice,
};
use kni_api::{NodeEndpoint, NodeEndpointStatus};
use kni_integration::{
    Cluster,
    cluster::{MemberOptions, connect, patience, token},
    require, wait,
};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::scene::tenants;

/// The objects of a node that is gone are deleted after a minute.
const GONE: Duration = Duration::from_secs(90);

/// Holds an agent, which would report again what is true; it continues when dropped.
struct Held(Pid);

impl Held {
    fn new(pid: u32) -> Result<Self> {
        let pid = Pid::from_raw(i32::try_from(pid)?);
        kill(pid, Signal::SIGSTOP)?;
        Ok(Self(pid))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // The signal fails for a process that has ended.
        kill(self.0, Signal::SIGCONT).ok();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nodes_report_where_they_are_reached_and_false_reports_are_refused() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::start("cluster-endpoints", 1).await?;
    let mut options = MemberOptions::default();
    let more = ["--underlay-family", "ipv6", "--overlay-port", "4790"];
    options.args.extend(more.map(str::to_owned));
    cluster.add_node(options).await?;
    tenants(&cluster).await?;
    reported(&cluster).await?;
    ghost(&cluster).await?;
    changes(&cluster).await?;
    forged(&cluster).await?;
    chosen_by_tenants(&mut cluster).await?;
    wait::until("the objects of the node that is gone are deleted", GONE, async || {
        let endpoint = endpoints(&cluster).get_opt("ghost").await?;
        Ok(endpoint.is_none() && cluster.get(&ghost_interface()).await?.is_none())
    })
    .await
    .map(drop)
}

/// Both nodes report their addresses in their order, and both are confirmed.
async fn reported(cluster: &Cluster) -> Result<()> {
    for (member, ipv4_first, port) in [(&cluster.nodes[0], true, 4789), (&cluster.nodes[1], false, 4790)] {
        let [ipv4, ipv6] = member.node.addresses();
        let expected = if ipv4_first { [ipv4, ipv6] } else { [ipv6, ipv4] };
        let object = wait_for_confirmed(cluster, &member.name, &expected).await?;
        ensure!(
            object.spec.addresses == expected && object.spec.port == port,
            "{:?}",
            object.spec
        );
        let uid = node_api(cluster).get(&member.name).await?.metadata.uid;
        ensure!(uid.as_ref() == Some(&object.spec.node_uid), "{:?}", object.spec);
        let interfaces = member.node.run("ip", &["-o", "link"])?;
        ensure!(
            interfaces.contains(&format!("mtu {} ", object.spec.mtu)),
            "{}: {interfaces}",
            object.spec.mtu
        );
        println!("{}: {:?}", member.name, object.spec);
    }
    Ok(())
}

/// What changes on a node is reported with another epoch, and nothing else is.
async fn changes(cluster: &Cluster) -> Result<()> {
    let member = &cluster.nodes[0];
    let [ipv4, ipv6] = member.node.addresses();
    let before = endpoints(cluster).get(&member.name).await?;
    let routes = member.node.run("ip", &["-o", "addr", "show", "to", ipv4])?;
    let interface = routes
        .split_whitespace()
        .nth(1)
        .context("no interface has the address")?
        .to_owned();
    member.node.run("ip", &["link", "set", &interface, "mtu", "1400"])?;
    let after = wait::until_some("the MTU is reported", patience(), async || {
        let object = endpoints(cluster).get(&member.name).await?;
        Ok((object.spec.mtu == 1400).then_some(object))
    })
    .await?;
    ensure!(
        after.spec.epoch != before.spec.epoch && after.spec.addresses == [ipv4, ipv6],
        "{:?}",
        after.spec
    );
    let mtu = before.spec.mtu.to_string();
    member.node.run("ip", &["link", "set", &interface, "mtu", &mtu])?;
    wait::until("the MTU is reported again", patience(), async || {
        let object = endpoints(cluster).get(&member.name).await?;
        Ok(object.spec.mtu == before.spec.mtu && object.spec.epoch != after.spec.epoch)
    })
    .await?;
    let written = endpoints(cluster).get(&member.name).await?.metadata.resource_version;
    node_api(cluster)
        .patch(
            &member.name,
            &PatchParams::default(),
            &Patch::Merge(&json!({ "metadata": { "labels": { "zone": "a" } } })),
        )
        .await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let object = endpoints(cluster).get(&member.name).await?;
    ensure!(
        object.metadata.resource_version == written,
        "it was written without a change"
    );
    Ok(())
}

/// A node whose kubelet lies about its addresses, and whose token reports them, is sent nothing.
async fn forged(cluster: &Cluster) -> Result<()> {
    let api_server = api_server_address(cluster).await?;
    let (attacker, victim) = (&cluster.nodes[0], &cluster.nodes[1]);
    let own = attacker.node.addresses();
    let [other, _] = victim.node.addresses();
    let service = service(cluster).await?;
    let agent = Held::new(attacker.agent.pid())?;
    let token = token(&cluster.client, "kni-agent", Some(&attacker.name)).await?;
    let client = connect(cluster.fabric.inside(), &cluster.control.token_kubeconfig(&token)).await?;
    let forger: Api<NodeEndpoint> = Api::all(client);
    let all = [own[0], other, &api_server, &service, "10.244.7.7"];
    set_addresses(cluster, &attacker.name, &all).await?;
    for (address, reason) in [
        ("203.0.113.9", "no InternalIP or ExternalIP of node node1"),
        (other, "is confirmed for node node2"),
        (&api_server, "an address of the API server"),
        (&service, "the address of Service default/reached"),
        ("10.244.7.7", "of PodNetwork default"),
    ] {
        report(&forger, &attacker.name, address).await?;
        let status = wait_for_refusal(cluster, &attacker.name, address).await?;
        let told = &status.refused[0].reason;
        ensure!(
            status.addresses.is_empty() && told.contains(reason),
            "{address}: {status:?}"
        );
        println!("{address}: {told}");
    }
    wait_for_confirmed(cluster, &victim.name, &[victim.node.addresses()[1], other]).await?;
    no_status(&forger, &attacker.name, other).await?;

    report(&forger, &attacker.name, &api_server).await?;
    control_plane(cluster, &attacker.name, json!("")).await?;
    wait_for_confirmed(cluster, &attacker.name, &[&api_server]).await?;
    control_plane(cluster, &attacker.name, Value::Null).await?;
    wait_for_confirmed(cluster, &attacker.name, &[]).await?;

    set_addresses(cluster, &attacker.name, &own).await?;
    drop(agent);
    wait_for_confirmed(cluster, &attacker.name, &own).await.map(drop)
}

/// A Service with the addresses of nodes, as its tenant or a load balancer writes them, keeps no node off the fabric:
/// neither one that is confirmed, nor one that joins.
async fn chosen_by_tenants(cluster: &mut Cluster) -> Result<()> {
    let [known, next] = [&cluster.nodes[0], &cluster.nodes[1]].map(|member| member.node.addresses()[0].to_owned());
    let (network, host) = next.rsplit_once('.').context("an address of IPv4")?;
    let next = format!("{network}.{}", host.parse::<u8>()? + 1);
    let object = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "balanced", "namespace": "default" },
        "spec": { "type": "LoadBalancer", "ports": [{ "port": 80 }], "externalIPs": [known, next] },
    });
    cluster.apply(&[object]).await?;
    let services: Api<Service> = Api::namespaced(cluster.client.clone(), "default");
    let balancer =
        Patch::Merge(json!({ "status": { "loadBalancer": { "ingress": [{ "ip": known }, { "ip": next }] } } }));
    services
        .patch_status("balanced", &PatchParams::default(), &balancer)
        .await?;
    let joined = cluster.add_node(MemberOptions::default()).await?;
    let (name, own) = (joined.name.clone(), joined.node.addresses().map(str::to_owned));
    ensure!(own[0] == next, "the next node has {}, not {next}", own[0]);
    wait_for_confirmed(cluster, &name, &[own[0].as_str(), own[1].as_str()]).await?;
    let first = &cluster.nodes[0];
    wait_for_confirmed(cluster, &first.name, &first.node.addresses())
        .await
        .map(drop)
}

/// The token of a node cannot write the status of the node's own object.
async fn no_status(forger: &Api<NodeEndpoint>, node: &str, address: &str) -> Result<()> {
    let status = Patch::Merge(json!({ "status": { "addresses": [address] } }));
    match forger.patch_status(node, &PatchParams::default(), &status).await {
        Err(kube::Error::Api(refusal)) if refusal.code == 403 => Ok(()),
        other => bail!("the status of {node}: {other:?}"),
    }
}

/// Writes the addresses of a node, as its kubelet may.
async fn set_addresses(cluster: &Cluster, node: &str, addresses: &[&str]) -> Result<()> {
    let of_type = |address: &&str| json!({ "type": "InternalIP", "address": address });
    let addresses: Vec<Value> = addresses.iter().map(of_type).collect();
    let status = Patch::Merge(json!({ "status": { "addresses": addresses } }));
    let params = PatchParams::default();
    node_api(cluster).patch_status(node, &params, &status).await?;
    Ok(())
}

/// Writes or removes the label of the control plane, as an administrator.
async fn control_plane(cluster: &Cluster, node: &str, value: Value) -> Result<()> {
    let labels = json!({ "node-role.kubernetes.io/control-plane": value });
    let patch = Patch::Merge(json!({ "metadata": { "labels": labels } }));
    node_api(cluster).patch(node, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// A node without an agent, which leaves the cluster: its endpoint is not confirmed any more.
async fn ghost(cluster: &Cluster) -> Result<()> {
    let nodes = node_api(cluster);
    let object = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "ghost" } });
    let node = nodes
        .patch("ghost", &PatchParams::apply("test"), &Patch::Apply(&object))
        .await?;
    let addresses = json!([{ "type": "ExternalIP", "address": "203.0.113.7" }]);
    let status = Patch::Merge(json!({ "status": { "addresses": addresses } }));
    nodes.patch_status("ghost", &PatchParams::default(), &status).await?;
    let endpoint = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "NodeEndpoint", "metadata": { "name": "ghost" },
        "spec": {
            "nodeName": "ghost", "nodeUID": node.metadata.uid, "addresses": ["203.0.113.7"], "port": 4789, "mtu": 1500,
            "epoch": 1,
        },
    });
    cluster.apply(&[endpoint]).await?;
    wait_for_confirmed(cluster, "ghost", &["203.0.113.7"]).await?;
    cluster.apply(&[ghost_interface()]).await?;
    cluster.delete(&object).await?;
    wait_for_confirmed(cluster, "ghost", &[]).await.map(drop)
}

/// An object of a pod that never existed, on that node.
fn ghost_interface() -> Value {
    json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "PodInterface",
        "metadata": { "name": "ghost.eth0", "namespace": "plain" },
        "spec": {
            "podName": "ghost", "podUid": "0", "nodeName": "ghost", "podNetworkName": "red", "interfaceName": "eth0",
            "sandboxId": "0",
        },
    })
}

/// Writes an address into the node's own object with its token, over what its agent wrote.
async fn report(forger: &Api<NodeEndpoint>, node: &str, address: &str) -> Result<()> {
    let patch = Patch::Merge(json!({ "spec": { "addresses": [address] } }));
    forger.patch(node, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// The internal address of a new Service.
async fn service(cluster: &Cluster) -> Result<String> {
    let object = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "reached", "namespace": "default" },
        "spec": { "ports": [{ "port": 80 }] },
    });
    let service = cluster.apply_one(&object).await?;
    let internal = service.data["spec"]["clusterIP"].as_str().context("no clusterIP")?;
    Ok(internal.to_owned())
}

async fn api_server_address(cluster: &Cluster) -> Result<String> {
    let slices: Api<EndpointSlice> = Api::namespaced(cluster.client.clone(), "default");
    let slice = slices.get("kubernetes").await?;
    let first = slice.endpoints.iter().flatten().next().context("no endpoint")?;
    first.addresses.first().cloned().context("no address")
}

fn endpoints(cluster: &Cluster) -> Api<NodeEndpoint> {
    Api::all(cluster.client.clone())
}

fn node_api(cluster: &Cluster) -> Api<Node> {
    Api::all(cluster.client.clone())
}

async fn wait_for_confirmed(cluster: &Cluster, node: &str, addresses: &[&str]) -> Result<NodeEndpoint> {
    let what = format!("{addresses:?} of {node} are confirmed");
    wait::until_some(&what, patience(), async || {
        let object = endpoints(cluster).get_opt(node).await?.context("no object")?;
        let confirmed: Vec<&str> = object.confirmed().collect();
        ensure!(object.status.is_some() && confirmed == addresses, "{:?}", object.status);
        Ok(Some(object))
    })
    .await
}

async fn wait_for_refusal(cluster: &Cluster, node: &str, address: &str) -> Result<NodeEndpointStatus> {
    wait::until_some(&format!("{address} of {node} is refused"), patience(), async || {
        let status = endpoints(cluster).get(node).await?.status;
        Ok(status.filter(|status| status.refused.iter().any(|refused| refused.address == address)))
    })
    .await
}
