//! Tests that members of networks are confirmed, that an agent asks for what concerns its node only, and what one
//! change costs.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_api::{NetworkMembers, PodInterface, network_members, pod_interface};
use kni_integration::{
    Cluster, Pod,
    cluster::{Member, audit::Audit, objects, patience},
    require, wait,
};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;

use super::scene::{ask, assert_silent, friends, identity, serve, tenants, wait_for_silence};

/// Time in which reports that follow a change are written.
const REST: Duration = Duration::from_millis(1500);
/// Pods that are created at once.
const MANY: usize = 20;
/// The UID of a static pod: a hash of its manifest.
const STATIC: &str = "9fd2a1c8d3e94f0e8a4bb1c2d3e4f506";
/// An object is written at most once in this time.
const PAUSE: Duration = Duration::from_millis(200);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_agent_asks_for_what_concerns_its_node() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-members", 2).await?;
    tenants(&cluster).await?;
    cluster
        .run(&[
            objects::pod("red-team", "a", "node1"),
            objects::pod_with("red-team", "b", "node2", &json!({ "labels": { "role": "db" } })),
            objects::pod("blue-team", "c", "node2"),
        ])
        .await?;
    confirmed(&cluster, "red", "node1", 1).await?;
    let status = confirmed(&cluster, "red", "node2", 1).await?;
    ensure!(
        status.kinds[0].labels.get("role").is_some_and(|role| role == "db"),
        "{status:?}"
    );
    confirmed(&cluster, "blue", "node2", 1).await?;
    narrow(&cluster.audit()?, &cluster.nodes[0], &["red"], &["blue"])?;

    cluster.run(&[objects::pod("blue-team", "d", "node1")]).await?;
    wait::until("node1 follows blue, too", patience(), async || {
        let audit = cluster.audit()?;
        Ok(narrow(&audit, &cluster.nodes[0], &["red", "blue"], &[]).is_ok())
    })
    .await?;

    each_change_costs_few_writes(&cluster).await?;
    requests_have_their_priority(&cluster).await
}

/// The runtime knows a static pod by another UID than the API server. On another node it has the labels of its mirror
/// pod; an annotation that names another pod changes nothing for that pod.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "long: a second cluster of two nodes"]
async fn a_static_pod_is_known_to_other_nodes() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-static", 2).await?;
    tenants(&cluster).await?;
    cluster.apply(&[friends()]).await?;
    let friend =
        |mirror_of: &str| json!({ "labels": { "friend": "yes" }, "annotations": { objects::MIRROR: mirror_of } });
    let pods = cluster
        .run(&[
            objects::pod_with("red-team", "server", "node1", &json!({ "labels": { "app": "server" } })),
            objects::pod_with("red-team", "fixed-node2", "node2", &friend(STATIC)),
            objects::pod("red-team", "stranger", "node2"),
        ])
        .await?;
    let [server, fixed, stranger] = &pods[..] else {
        unreachable!("as many as were asked for");
    };
    ensure!(fixed.uid == STATIC, "the runtime sends {}", fixed.uid);
    let _server = serve(server)?;
    wait_for_silence(stranger, server).await?;
    let reaches = async |pod: &Pod| {
        let what = format!("{} reaches the server of the other node", pod.name);
        wait::until(&what, patience(), async || {
            Ok(ask(pod, server) == [Ok(identity(server)), Ok(identity(server))])
        })
        .await
    };
    reaches(fixed).await?;
    is_reported_as_its_mirror_pod(&cluster, &fixed.name).await?;

    let forged = objects::pod_with("red-team", "forged", "node2", &friend(&stranger.uid));
    let forged = cluster.run(&[forged]).await?;
    reaches(&forged[0]).await?;
    assert_silent(stranger, server);
    Ok(())
}

/// `PodInterface` and members have the UID of the object, to which the interface belongs.
async fn is_reported_as_its_mirror_pod(cluster: &Cluster, name: &str) -> Result<()> {
    let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(cluster.client.clone(), "red-team");
    let uid = pods.get(name).await?.metadata.uid.context("no UID")?;
    ensure!(uid != STATIC, "the API server chooses its own");
    let interfaces: Api<PodInterface> = Api::namespaced(cluster.client.clone(), "red-team");
    let object = pod_interface::name(name, &uid, "eth0");
    let interface = wait::until_some("the interface is reported", patience(), async || {
        Ok(interfaces.get_opt(&object).await?)
    })
    .await?;
    let owners = interface.metadata.owner_references.unwrap_or_default();
    let owners: Vec<&str> = owners.iter().map(|owner| owner.uid.as_str()).collect();
    ensure!(owners == [uid.as_str()] && interface.spec.pod_uid == uid, "{owners:?}");
    let members: Api<NetworkMembers> = Api::all(cluster.client.clone());
    let of_node = ListParams::default().fields("spec.nodeName=node2,spec.network=red");
    let objects = members.list(&of_node).await?.items.into_iter();
    let confirmed = objects
        .filter_map(|object| object.status)
        .flat_map(|status| status.members);
    let confirmed = confirmed.filter(|confirmed| confirmed.member.pod_name == name);
    let uids: Vec<String> = confirmed.map(|confirmed| confirmed.member.pod_uid).collect();
    ensure!(uids == [uid], "{uids:?}");
    Ok(())
}

async fn each_change_costs_few_writes(cluster: &Cluster) -> Result<()> {
    let relabelled = changes(cluster, "the labels of a pod change", async || {
        let api: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(cluster.client.clone(), "red-team");
        let labels = json!({ "metadata": { "labels": { "role": "web" } } });
        api.patch("b", &PatchParams::default(), &Patch::Merge(&labels)).await?;
        Ok(())
    })
    .await?;
    ensure!(relabelled == (0, 1), "one status is written: {relabelled:?}");
    let status = confirmed(cluster, "red", "node2", 1).await?;
    ensure!(
        status.kinds[0].labels.get("role").is_some_and(|role| role == "web"),
        "{status:?}"
    );

    let begun = Instant::now();
    let many = changes(cluster, "many pods are created", async || {
        let pods: Vec<_> = (0..MANY)
            .map(|number| objects::pod("red-team", &format!("many-{number}"), "node2"))
            .collect();
        cluster.run(&pods).await?;
        Ok(())
    })
    .await?;
    confirmed(cluster, "red", "node2", MANY + 1).await?;
    let most = usize::try_from(begun.elapsed().as_millis() / PAUSE.as_millis())? + 1;
    ensure!(
        many.0 <= most.min(MANY),
        "{} writes of reports for {MANY} pods, at most {most}",
        many.0
    );

    let deleted = changes(cluster, "a pod is deleted", async || {
        let one = objects::pod("red-team", "many-0", "node2");
        cluster.delete(&one).await
    })
    .await?;
    ensure!(deleted.0 == 1 && deleted.1 <= 2, "one report is written: {deleted:?}");
    confirmed(cluster, "red", "node2", MANY).await?;
    Ok(())
}

async fn requests_have_their_priority(cluster: &Cluster) -> Result<()> {
    let metrics = cluster
        .client
        .request_text(http::Request::get("/metrics").body(Vec::new())?)
        .await?;
    for schema in ["kni-critical", "kni-reports"] {
        ensure!(dispatched(&metrics, schema) > 0, "no request has flow schema {schema}");
    }
    Ok(())
}

/// The number of requests of a flow schema according to the API server's metrics.
fn dispatched(metrics: &str, schema: &str) -> u64 {
    let label = format!("flow_schema=\"{schema}\"");
    let rows = metrics
        .lines()
        .filter(|line| line.starts_with("apiserver_flowcontrol_dispatched_requests_total{") && line.contains(&label));
    rows.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
        .sum()
}

/// The status of a node's only object in a network, once it has this number of confirmed members and refuses none.
async fn confirmed(
    cluster: &Cluster,
    network: &str,
    node: &str,
    count: usize,
) -> Result<kni_api::NetworkMembersStatus> {
    let api: Api<NetworkMembers> = Api::all(cluster.client.clone());
    let name = network_members::name(network, node, 0);
    let found = wait::until_some(
        &format!("{count} members of {network} on {node}"),
        patience(),
        async || {
            let status = api.get_opt(&name).await?.and_then(|object| object.status);
            Ok(status.filter(|status| status.summary == format!("{count}/{count}")))
        },
    )
    .await?;
    let of_node = ListParams::default().fields(&format!("spec.nodeName={node},spec.network={network}"));
    let objects = api.list(&of_node).await?;
    let names: Vec<String> = objects.iter().map(kube::ResourceExt::name_any).collect();
    ensure!(names == [name], "{names:?}");
    Ok(found)
}

/// Checks that an agent lists and watches pods and interfaces of its node only, and members of these networks only.
fn narrow(audit: &Audit, member: &Member, networks: &[&str], others: &[&str]) -> Result<()> {
    let requests = audit.of(&member.user);
    let reads = |resource: &str| -> Vec<&str> {
        let path = format!("/{resource}?");
        let read = requests.iter().map(|request| request.what.as_str());
        read.filter(|what| (what.starts_with("list ") || what.starts_with("watch ")) && what.contains(&path))
            .collect()
    };
    let own = format!("fieldSelector=spec.nodeName%3D{}", member.name);
    for resource in ["v1/pods", "podinterfaces"] {
        let reads = reads(resource);
        ensure!(!reads.is_empty(), "no request for {resource}");
        let wide: Vec<_> = reads.iter().filter(|what| !what.contains(&own)).collect();
        ensure!(wide.is_empty(), "{resource} of other nodes: {wide:#?}");
    }
    let members = reads("networkmembers");
    let (own, of_networks): (Vec<_>, Vec<_>) = members.into_iter().partition(|what| what.contains(&own));
    ensure!(!own.is_empty(), "its own objects are not read");
    ensure!(
        of_networks.iter().all(|what| what.contains("labelSelector=")),
        "{of_networks:#?}"
    );
    let named = |network: &&&str| {
        let selected = of_networks
            .iter()
            .filter_map(|what| what.split("labelSelector=").nth(1));
        let mut selected = selected.map(|rest| rest.split('&').next().unwrap_or_default());
        selected.any(|selector| selector.contains(**network))
    };
    let missing: Vec<_> = networks.iter().filter(|network| !named(network)).collect();
    let needless: Vec<_> = others.iter().filter(named).collect();
    ensure!(
        missing.is_empty() && needless.is_empty(),
        "not {missing:?}, but {needless:?}"
    );
    Ok(())
}

/// The number of writes of reports and of confirmations that a change causes.
async fn changes(cluster: &Cluster, what: &str, change: impl AsyncFnOnce() -> Result<()>) -> Result<(usize, usize)> {
    tokio::time::sleep(REST).await;
    let before = cluster.audit()?;
    change().await.with_context(|| what.to_owned())?;
    tokio::time::sleep(REST).await;
    let summary: BTreeMap<String, usize> = cluster.audit()?.since(&before)?.summary();
    let written = |is_status: bool| -> usize {
        let rows = summary.iter().filter(|(row, _)| {
            let writes = ["patch ", "delete ", "create "]
                .iter()
                .any(|verb| row.contains(&format!(" {verb}")));
            writes && row.contains("/networkmembers/") && row.ends_with("/status") == is_status
        });
        rows.map(|(_, count)| count).sum()
    };
    let counts = (written(false), written(true));
    println!(
        "{what}: {} reports, {} confirmations; all requests: {summary:#?}",
        counts.0, counts.1
    );
    Ok(counts)
}
