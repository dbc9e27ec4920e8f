//! Tests each row of the tenancy table at the API server's admission, and without it at the agent.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, stream};
use kni_integration::{
    Cluster,
    cluster::{HELD, deployed, objects, patience},
    kubelet::Sandbox,
    require, wait,
};
use kni_proto::cni;
use kube::{
    Api,
    api::{DynamicObject, PostParams},
};
use serde_json::{Value, json};

use super::{
    rows::{Choice, ROWS, Row, Way},
    scene,
};

const MAC_PREFIX: &str = "02:00:00:00:01:";
/// A node without a kubelet: its pods are known to the agents, and nothing starts them.
const ABSENT: &str = "absent";

/// What happened to a row.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Answers {
    /// The API server's refusal, if there is one.
    admission: Option<String>,
    /// The network of the interface, or the agent's refusal.
    agent: Result<String, String>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_way_in_is_guarded_at_admission_and_by_the_agent() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cluster = scene::start("cluster-access").await?;
    let start = Instant::now();
    let admission = admission(&cluster).await?;
    println!("{} answers at admission after {:?}", admission.len(), start.elapsed());
    let agent = agent(&cluster).await?;
    println!("{} answers of the agent after {:?}", agent.len(), start.elapsed());
    let mut wrong = Vec::new();
    for (number, row) in ROWS.iter().enumerate() {
        let answers = Answers {
            admission: admission.get(&number).cloned(),
            agent: agent.get(&number).cloned().context("no answer")?,
        };
        println!("{}", line(number, row, &answers));
        if !is_expected(row, &answers) {
            wrong.push(line(number, row, &answers));
        }
    }
    ensure!(
        wrong.is_empty(),
        "{} of {} rows:\n{}",
        wrong.len(),
        ROWS.len(),
        wrong.join("\n")
    );
    ensure!(ROWS.len() >= 60, "{} rows", ROWS.len());
    super::changes::run(&cluster).await?;
    println!("the whole took {:?}", start.elapsed());
    Ok(())
}

fn is_expected(row: &Row, answers: &Answers) -> bool {
    let agent = match (&row.agent, &answers.agent) {
        (Ok(expected), Ok(joined)) => joined == expected,
        (Err(field), Err(refusal)) => refusal.contains(field) && refusal.contains(row.who),
        (Ok(_), Err(_)) | (Err(_), Ok(_)) => false,
    };
    let admission = match (&answers.admission, &row.agent) {
        (None, _) => !row.early,
        // What the agent would allow is never refused.
        (Some(refusal), Err(field)) => row.early && refusal.contains(field) && refusal.contains(row.who),
        (Some(_), Ok(_)) => false,
    };
    agent && admission
}

fn line(number: usize, row: &Row, answers: &Answers) -> String {
    let Row {
        who,
        way,
        network,
        choice,
        ..
    } = row;
    let early = answers.admission.as_deref().map_or("admitted", |_| "refused");
    let agent = match &answers.agent {
        Ok(network) => format!("joins {network}"),
        Err(refusal) => format!(
            "refused: {}",
            refusal.split_once("network ").map_or(&**refusal, |(_, rest)| rest)
        ),
    };
    let (way, choice) = (format!("{way:?}"), format!("{choice:?}"));
    format!("{number:3} {who:10} {way:11} {network:14} {choice:19} {early:9} {agent}")
        .trim_end()
        .to_owned()
}

/// The API server's refusals of the objects of the rows, which are not made.
async fn admission(cluster: &Cluster) -> Result<BTreeMap<usize, String>> {
    let guards = deployed("base/access.yaml")?;
    cluster.apply(&guards).await?;
    wait::until("the API server refuses", patience(), async || {
        let refused = refused_ways(cluster).await?;
        Ok(refused.into_values().all(|is_refused| is_refused))
    })
    .await?;
    let refusals: Vec<Result<Option<(usize, String)>>> = stream::iter(ROWS.iter().enumerate())
        .map(
            |(number, row)| async move { Ok(refusal_of(cluster, number, row).await?.map(|refusal| (number, refusal))) },
        )
        .buffer_unordered(16)
        .collect()
        .await;
    for guard in guards.iter().rev() {
        cluster.delete(guard).await?;
    }
    wait::until("the API server admits", patience(), async || {
        let refused = refused_ways(cluster).await?;
        Ok(!refused.into_values().any(|is_refused| is_refused))
    })
    .await?;
    let refusals: Result<Vec<Option<(usize, String)>>> = refusals.into_iter().collect();
    Ok(refusals?.into_iter().flatten().collect())
}

/// Whether the API server refuses the first row that it should refuse, for each way in and each field: it begins and
/// ends to enforce each policy at a time of its own.
async fn refused_ways(cluster: &Cluster) -> Result<BTreeMap<String, bool>> {
    let mut refused = BTreeMap::new();
    for (number, row) in ROWS.iter().enumerate().filter(|(_, row)| row.early) {
        if let Entry::Vacant(way) = refused.entry(format!("{:?} {:?}", row.way, row.agent)) {
            way.insert(refusal_of(cluster, number, row).await?.is_some());
        }
    }
    Ok(refused)
}

/// Why the API server does not take an object of a row.
async fn refusal_of(cluster: &Cluster, number: usize, row: &Row) -> Result<Option<String>> {
    for object in objects_of(number, row, ABSENT) {
        if let Some(refusal) = refusal(cluster, &object).await? {
            return Ok(Some(refusal));
        }
    }
    Ok(None)
}

/// Why the API server does not take an object; nothing is made.
async fn refusal(cluster: &Cluster, object: &Value) -> Result<Option<String>> {
    let (resource, namespace, _) = objects::locate(object)?;
    let namespace = namespace.context("a namespace")?;
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), &namespace, &resource);
    let trial = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    match api.create(&trial, &serde_json::from_value(object.clone())?).await {
        Ok(_) => Ok(None),
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(Some(status.message.clone())),
        Err(error) => Err(error).with_context(|| object.to_string()),
    }
}

/// The answers of the agent, without admission.
async fn agent(cluster: &Cluster) -> Result<BTreeMap<usize, Result<String, String>>> {
    // An agent knows the pods of its node only; those of direct requests are not started by the fake kubelet.
    cluster.nodes[0].kubelet.hold();
    for (number, row) in ROWS.iter().enumerate() {
        let (mut pods, others): (Vec<Value>, Vec<Value>) = objects_of(number, row, "node1")
            .into_iter()
            .partition(|object| object["kind"] == "Pod");
        if is_direct(row.way) {
            for pod in &mut pods {
                objects::merge(&mut pod["metadata"], &json!({ "labels": { HELD: "yes" } }));
            }
        }
        cluster.apply(&others).await?;
        if row.way != Way::Crafted && row.way != Way::CraftedJson {
            cluster.create_pods(&pods).await?;
        }
    }
    let mut answers = BTreeMap::new();
    for (number, row) in ROWS.iter().enumerate() {
        let answer = match row.way {
            Way::HotAdd => hot_add(cluster, number, row).await,
            way if is_direct(way) => direct(cluster, number, row).await,
            _ => pod(cluster, number, row).await,
        };
        let what = || format!("row {number}: {row:?}: {}", cluster.refusals());
        answers.insert(number, answer.with_context(what)?);
    }
    Ok(answers)
}

const fn is_direct(way: Way) -> bool {
    matches!(way, Way::Cni | Way::CniBeside | Way::Crafted | Way::CraftedJson)
}

/// The answer for a pod of the fake kubelet.
async fn pod(cluster: &Cluster, number: usize, row: &Row) -> Result<Result<String, String>> {
    let (name, kubelet) = (name(number), &cluster.nodes[0].kubelet);
    let full = format!("{}/{name}", row.who);
    wait::until_some(&format!("an answer for {full}"), patience(), async || {
        if kubelet.pod(row.who, &name).is_some() {
            return Ok(Some(Ok(network_of(cluster, row, &name)
                .await?
                .context("no interface")?)));
        }
        let refusals = kubelet.refusals();
        // A restart of the call may come before the caches have the pod's objects.
        let mut ours = refusals
            .iter()
            .filter(|refusal| refusal.pod == full && refusal.code != tonic::Code::Unavailable);
        Ok(ours.next().map(|refusal| Err(refusal.message.clone())))
    })
    .await
}

/// The answer for an attachment whose pod runs already.
async fn hot_add(cluster: &Cluster, number: usize, row: &Row) -> Result<Result<String, String>> {
    let name = name(number);
    let pod = cluster.running(row.who, &name).await?;
    crate::cluster::scene::patch_metadata(cluster, &pod, &json!({ "labels": { "join": name } })).await?;
    wait::until_some(&format!("an answer for {}/{name}", row.who), patience(), async || {
        if let Some(network) = network_of(cluster, row, &name).await? {
            return Ok(Some(Ok(network)));
        }
        Ok(scene::event(cluster, row.who, &name).await?.map(Err))
    })
    .await
}

/// The answer for a request of a runtime, as it is.
async fn direct(cluster: &Cluster, number: usize, row: &Row) -> Result<Result<String, String>> {
    let (name, kni) = (name(number), cluster.nodes[0].kubelet.kni());
    let netns = kni.create_network(row.who, &name).await?;
    let mut sandbox = Sandbox::new(row.who, &name, &netns);
    let annotations = annotations(number, row);
    sandbox.annotations.extend(annotations);
    if matches!(row.way, Way::Cni | Way::CniBeside) {
        let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(cluster.client.clone(), row.who);
        sandbox.uid = pods.get(&name).await?.metadata.uid.context("uid")?;
        let ifname = if row.way == Way::Cni { "eth0" } else { "net1" };
        let mut entries = vec![
            (cni::NETWORK, "kni".to_owned()),
            (cni::IFNAME, ifname.to_owned()),
            (cni::CONTAINER, sandbox.id.clone()),
            (cni::INVOCATION, name.clone()),
            (cni::POD_NETWORK, row.network.to_owned()),
        ];
        match row.choice {
            Choice::Nothing => {}
            Choice::Ip(ip) => entries.push((cni::IPS, ip.to_owned())),
            Choice::Mac => entries.push((cni::MAC, mac(number))),
            Choice::Route => entries.push((cni::DEFAULT_ROUTE, "true".to_owned())),
        }
        sandbox.id = cni::sandbox_id(&sandbox.id, ifname);
        sandbox
            .extradata
            .extend(entries.into_iter().map(|(key, value)| (key.to_owned(), value)));
    }
    let answer = match kni.attach(&sandbox).await {
        Ok(()) => Ok(network_of(cluster, row, &name).await?.context("no interface")?),
        Err(status) => Err(status.message().to_owned()),
    };
    kni.detach(&sandbox.id).await?;
    kni.delete_network(&sandbox.id).await?;
    Ok(answer)
}

/// The network of the interface that the row is about.
async fn network_of(cluster: &Cluster, row: &Row, pod: &str) -> Result<Option<String>> {
    let interfaces = cluster.nodes[0].kubelet.kni().interfaces_of(row.who, pod).await?;
    let is_primary = matches!(
        row.way,
        Way::Network | Way::Default | Way::DefaultJson | Way::Nothing | Way::Cni | Way::Crafted
    );
    let mut found = interfaces.iter().filter(|found| (found.ifname == "eth0") == is_primary);
    Ok(found.next().map(|found| found.network.clone()))
}

fn name(number: usize) -> String {
    format!("row-{number}")
}

fn mac(number: usize) -> String {
    format!("{MAC_PREFIX}{number:02x}")
}

/// The objects by which a row names its network.
fn objects_of(number: usize, row: &Row, node: &str) -> Vec<Value> {
    let name = name(number);
    let mut metadata = json!({ "annotations": BTreeMap::from_iter(annotations(number, row)) });
    if row.way == Way::Attachment {
        metadata["labels"] = json!({ "join": name });
    }
    if is_direct(row.way) {
        metadata = json!({});
    }
    let pod = objects::pod_with(row.who, &name, node, &metadata);
    if !matches!(row.way, Way::Attachment | Way::HotAdd) {
        return vec![pod];
    }
    let mut attachment = objects::attachment(row.who, &name, row.network, "net1");
    match row.choice {
        Choice::Nothing => {}
        Choice::Ip(ip) => attachment["spec"]["addresses"] = json!([ip]),
        Choice::Mac => attachment["spec"]["mac"] = json!(mac(number)),
        Choice::Route => attachment["spec"]["defaultRoute"] = json!(true),
    }
    vec![attachment, pod]
}

/// The annotations by which a row names its network.
fn annotations(number: usize, row: &Row) -> Vec<(String, String)> {
    let mac = mac(number);
    let chosen = match row.choice {
        Choice::Nothing | Choice::Route => None,
        Choice::Ip(ip) => Some(("kni.dev/ips", ip.to_owned())),
        Choice::Mac => Some(("kni.dev/mac", mac.clone())),
    };
    let mut element = json!({ "name": row.network, "interface": "net1" });
    if let Some((namespace, name)) = row.network.split_once('/') {
        element["namespace"] = json!(namespace);
        element["name"] = json!(name);
    }
    match row.choice {
        Choice::Nothing => {}
        Choice::Ip(ip) => element["ips"] = json!([ip]),
        Choice::Mac => element["mac"] = json!(mac),
        Choice::Route => element["default-route"] = json!(["169.254.1.1"]),
    }
    if row.way == Way::DefaultJson {
        element["interface"] = json!("eth0");
    }
    let named = match row.way {
        Way::Network | Way::Crafted => Some(("kni.dev/network", row.network.to_owned())),
        Way::Default => Some(("v1.multus-cni.io/default-network", row.network.to_owned())),
        Way::DefaultJson => Some(("v1.multus-cni.io/default-network", json!([element]).to_string())),
        Way::Short => Some(("k8s.v1.cni.cncf.io/networks", row.network.to_owned())),
        Way::Json | Way::CraftedJson => Some(("k8s.v1.cni.cncf.io/networks", json!([element]).to_string())),
        Way::Multi => Some(("kni.io/multi-network", row.network.to_owned())),
        Way::Nothing | Way::Attachment | Way::HotAdd | Way::Cni | Way::CniBeside => None,
    };
    let primary = matches!(row.way, Way::Network | Way::Nothing | Way::Crafted);
    let all = named.into_iter().chain(chosen.filter(|_| primary));
    all.map(|(key, value)| (key.to_owned(), value)).collect()
}
