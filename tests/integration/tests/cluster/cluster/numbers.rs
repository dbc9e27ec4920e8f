//! Tests the numbers of networks: one for each, kept over restarts, never one for two networks, and on a node the same
//! for as long as it has pods in the network.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kni_api::{ConditionStatus, NetworkNumber, NetworkNumberSpec, NodeNetwork, node_network::NodeNetworkEntry};
use kni_integration::{
    Cluster,
    cluster::{MemberOptions, connect, objects, patience, token},
    require, wait,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::scene::{entry, network_object, tenants, wait_for_condition};

/// How many networks are created at once.
const MANY: usize = 50;
/// A released number is still there after this time.
const WHILE: Duration = Duration::from_secs(8);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_network_has_a_number_of_its_own_and_keeps_it() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::without_nodes("cluster-numbers").await?;
    let names: Vec<String> = (0..MANY).map(|index| format!("n{index}")).collect();
    let all: Vec<Value> = names.iter().map(|name| network(name)).collect();
    let start = Instant::now();
    futures::future::try_join_all(all.iter().map(|object| cluster.apply_one(object))).await?;
    let first = wait::until_some("every network has a number", patience(), async || {
        let numbers = numbers(&cluster).await?;
        Ok((numbers.len() >= MANY).then_some(numbers))
    })
    .await?;
    println!("{MANY} networks have numbers after {:?}", start.elapsed());
    ensure!(first.keys().collect::<Vec<_>>() == sorted(&names), "{first:?}");
    let distinct: BTreeSet<u32> = first.values().flatten().copied().collect();
    ensure!(
        distinct.len() == MANY && first.values().all(|of_one| of_one.len() == 1),
        "{first:?}"
    );
    ensure!(
        distinct.iter().all(|number| *number >= 4096),
        "low ones are for operators: {distinct:?}"
    );
    wait_for_status(&cluster, "n0", first["n0"][0]).await?;

    // Another replica changes nothing, although it reads everything anew.
    cluster.controllers[0].signal(Signal::SIGTERM)?;
    cluster.start_controller().await?;
    cluster.apply(&[network("late")]).await?;
    wait::until("the second replica has given a number", patience(), async || {
        Ok(numbers(&cluster).await?.contains_key("late"))
    })
    .await?;
    let mut after = numbers(&cluster).await?;
    after.remove("late");
    ensure!(after == first, "{after:?} are not {first:?}");

    second_objects(&cluster, first["n0"][0], first["n1"][0]).await?;
    let old = made_again(&cluster, first["n1"][0]).await?;
    agents_read_only(&cluster, first["n0"][0]).await?;
    rested(&mut cluster, old).await
}

/// Objects that no controller made: the API server refuses a taken number; of two of one network the older one stays.
async fn second_objects(cluster: &Cluster, kept: u32, other: u32) -> Result<()> {
    let api: Api<NetworkNumber> = Api::all(cluster.client.clone());
    let uid = network_object(cluster, "n0").await?.uid().context("no uid")?;
    let refused = forge(cluster, other, "n0", &uid).await.err().context("it is taken")?;
    ensure!(format!("{refused:#}").contains("already exists"), "{refused:#}");
    // Times of creation have whole seconds, and of two objects of one second the lower number counts.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    forge(cluster, 4000, "n0", &uid).await?;
    wait_for_release(cluster, 4000, true).await?;
    wait_for_status(cluster, "n0", kept).await?;
    // A number of a network that exists, and has no other one, is not free.
    let released = json!({ "status": { "releasedAt": "2026-01-01T00:00:00Z" } });
    api.delete("4000", &DeleteParams::default()).await?;
    api.patch_status(&kept.to_string(), &PatchParams::default(), &Patch::Merge(&released))
        .await?;
    wait_for_release(cluster, kept, false).await?;
    wait_for_status(cluster, "n0", kept).await
}

/// A network that is deleted and made again has another number, and the old one rests. Returns the old one.
async fn made_again(cluster: &Cluster, old: u32) -> Result<u32> {
    cluster.delete(&network("n1")).await?;
    wait::until("the network is gone", patience(), async || {
        Ok(cluster.get(&network("n1")).await?.is_none())
    })
    .await?;
    cluster.apply(&[network("n1")]).await?;
    wait_for_release(cluster, old, true).await?;
    let new = wait::until_some("the new network has a number", patience(), async || {
        let numbers = numbers(cluster).await?;
        Ok(numbers.get("n1").and_then(|of_one| of_one.first()).copied())
    })
    .await?;
    ensure!(new != old, "it has {new} again");
    let start = Instant::now();
    while start.elapsed() < WHILE {
        let api: Api<NetworkNumber> = Api::all(cluster.client.clone());
        let object = api.get_opt(&old.to_string()).await?;
        ensure!(object.is_some(), "{old} is deleted after {:?}", start.elapsed());
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    Ok(old)
}

/// The tokens of agents change no number. kni-controller may not change one either, except for its status.
async fn agents_read_only(cluster: &Cluster, number: u32) -> Result<()> {
    let controller = of_account(cluster, "kni-controller").await?;
    let agent = of_account(cluster, "kni-agent").await?;
    let name = number.to_string();
    let object = agent.get(&name).await?;
    let params = PatchParams::default();
    let status = Patch::Merge(json!({ "status": { "releasedAt": "2026-01-01T00:00:00Z" } }));
    let spec = Patch::Merge(json!({ "spec": { "network": "other" } }));
    let new = NetworkNumber::new("4001", object.spec.clone());
    for (what, done) in [
        ("create", agent.create(&PostParams::default(), &new).await.map(drop)),
        ("patch", agent.patch(&name, &params, &spec).await.map(drop)),
        (
            "patch the status",
            agent.patch_status(&name, &params, &status).await.map(drop),
        ),
        ("delete", agent.delete(&name, &DeleteParams::default()).await.map(drop)),
        (
            "patch, as kni-controller",
            controller.patch(&name, &params, &spec).await.map(drop),
        ),
    ] {
        let code = match done {
            Err(kube::Error::Api(status)) => status.code,
            other => anyhow::bail!("{what}: {other:?}"),
        };
        ensure!(code == 403, "{what}: {code}");
    }
    let api: Api<NetworkNumber> = Api::all(cluster.client.clone());
    let changed = api.patch(&name, &params, &spec).await.err().context("it is changed")?;
    ensure!(changed.to_string().contains("cannot be changed"), "{changed}");
    Ok(())
}

/// A released number is deleted by a replica whose own time of rest has passed.
async fn rested(cluster: &mut Cluster, old: u32) -> Result<()> {
    let before = numbers(cluster).await?;
    for controller in &mut cluster.controllers {
        controller.signal(Signal::SIGTERM).ok();
    }
    cluster.start_controller_with(&["--number-rest", "2"]).await?;
    let api: Api<NetworkNumber> = Api::all(cluster.client.clone());
    wait::until("the number has rested", patience(), async || {
        Ok(api.get_opt(&old.to_string()).await?.is_none())
    })
    .await?;
    ensure!(numbers(cluster).await? == before, "no other number has changed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_node_keeps_the_number_of_its_pods_and_closes_shared_ones() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::start("cluster-numbers-node", 1).await?;
    tenants(&cluster).await?;
    cluster.run(&[objects::pod("red-team", "a", "node1")]).await?;
    let numbers = wait::until_some("both have a number", patience(), async || {
        let numbers = numbers(&cluster).await?;
        let of = |name: &str| numbers.get(name).and_then(|of_one| of_one.first()).copied();
        Ok(of("red").zip(of("blue")))
    });
    let (red, blue) = numbers.await?;
    for (name, number) in [("red", red), ("blue", blue)] {
        let entry = wait_for_entry(&cluster, name, |entry| entry.number == Some(number)).await?;
        ensure!(entry.number_problem.is_empty(), "{entry:?}");
    }
    ensure!(!conflict(&cluster).await?.0, "there is no conflict yet");

    // The administrator gives red another number; nothing repairs that meanwhile.
    for controller in &mut cluster.controllers {
        controller.kill()?;
    }
    replace(&cluster, red, 5001, "red").await?;
    changed_under_a_pod(&cluster, red).await?;
    let agent = &mut cluster.nodes[0].agent;
    agent.kill9()?;
    agent.restart()?;
    changed_under_a_pod(&cluster, red).await?;

    // As after a restore of the data: the number that this node remembers for red is that of blue.
    replace(&cluster, blue, red, "blue").await?;
    for name in ["red", "blue"] {
        let closed = |entry: &NodeNetworkEntry| entry.number.is_none();
        let entry = wait_for_entry(&cluster, name, closed).await?;
        let problem = &entry.number_problem;
        let names = [red.to_string(), "red".to_owned(), "blue".to_owned()];
        ensure!(names.iter().all(|name| problem.contains(name)), "{problem}");
        println!("{name}: {problem}");
    }
    wait::until("the condition names both", patience(), async || {
        let (holds, message) = conflict(&cluster).await?;
        Ok(holds && message.contains("network red:") && message.contains("network blue:"))
    })
    .await?;

    // The last pod leaves: red takes its new number, and the old one is blue's alone.
    cluster.remove("red-team", &["a"]).await?;
    for (name, number) in [("red", 5001), ("blue", red)] {
        let entry = wait_for_entry(&cluster, name, |entry| entry.number == Some(number)).await?;
        ensure!(entry.number_problem.is_empty(), "{entry:?}");
    }
    wait::until("the conflict is over", patience(), async || {
        Ok(!conflict(&cluster).await?.0)
    })
    .await?;
    let shown = shown(&cluster, "red")?;
    ensure!(shown["number"] == 5001, "{shown}");
    Ok(())
}

/// Red has number 5001 in the cluster, and keeps `red` on the node, which reports both.
async fn changed_under_a_pod(cluster: &Cluster, red: u32) -> Result<()> {
    let both = |text: &str| text.contains(&red.to_string()) && text.contains("5001");
    // Between the two objects the network has lost its number.
    let entry = wait_for_entry(cluster, "red", |entry| both(&entry.number_problem)).await?;
    ensure!(entry.number == Some(red), "{entry:?}");
    println!("red: {}", entry.number_problem);
    wait::until("the condition names both numbers", patience(), async || {
        let (holds, message) = conflict(cluster).await?;
        Ok(holds && both(&message))
    })
    .await?;
    // An agent that has just started shows its records first.
    wait::until("the node shows both numbers", patience(), async || {
        let shown = shown(cluster, "red")?;
        ensure!(shown["number"] == red, "{shown}");
        Ok(shown["numberProblem"].as_str().is_some_and(both))
    })
    .await?;
    let note = cluster.nodes[0].knictl(&["networks", "-o", "wide"])?;
    ensure!(note.contains("NUMBER") && note.contains(&red.to_string()), "{note}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn without_the_kind_everything_works_without_numbers() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::without_nodes("cluster-numbers-none").await?;
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    let kind = "networknumbers.kni.dev";
    let definition = definitions.get(kind).await?;
    definitions.delete(kind, &DeleteParams::default()).await?;
    wait::until("the kind is gone", patience(), async || {
        Ok(definitions.get_opt(kind).await?.is_none())
    })
    .await?;
    cluster.start_controller().await?;
    cluster.controllers[0].kill()?;
    cluster.add_node(MemberOptions::default()).await?;
    tenants(&cluster).await?;
    cluster.run(&[objects::pod("red-team", "a", "node1")]).await?;
    wait_for_condition(&cluster, "red", "InUse", true).await?;
    let entry = entry(&cluster, "node1", "red").await?.context("no entry")?;
    ensure!(entry.number.is_none() && entry.number_problem.is_empty(), "{entry:?}");
    ensure!(
        network_object(&cluster, "red")
            .await?
            .status
            .context("no status")?
            .number
            .is_none()
    );
    ensure!(!conflict(&cluster).await?.0);
    let log = cluster.controllers[1].log();
    ensure!(!log.contains("network-numbers"), "{log}");

    // The definitions are upgraded: the pod's network gets its first number.
    let mut definition = definition;
    definition.metadata = kube::core::ObjectMeta {
        name: definition.metadata.name,
        ..kube::core::ObjectMeta::default()
    };
    definition.status = None;
    definitions.create(&PostParams::default(), &definition).await?;
    let entry = wait_for_entry(&cluster, "red", |entry| entry.number.is_some()).await?;
    ensure!(entry.number_problem.is_empty(), "{entry:?}");
    Ok(())
}

fn network(name: &str) -> Value {
    objects::network(name, &["10.1.0.0/16"], &json!({}))
}

fn sorted(names: &[String]) -> Vec<&String> {
    let mut sorted: Vec<&String> = names.iter().collect();
    sorted.sort();
    sorted
}

/// The numbers that are not released, by network.
async fn numbers(cluster: &Cluster) -> Result<BTreeMap<String, Vec<u32>>> {
    let api: Api<NetworkNumber> = Api::all(cluster.client.clone());
    let mut numbers: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for object in api.list(&kube::api::ListParams::default()).await? {
        if object.released_at().is_none() {
            let number = object.number().with_context(|| object.name_any())?;
            numbers.entry(object.spec.network).or_default().push(number);
        }
    }
    Ok(numbers)
}

async fn forge(cluster: &Cluster, number: u32, network: &str, uid: &str) -> Result<()> {
    let api: Api<NetworkNumber> = Api::all(cluster.client.clone());
    let spec = NetworkNumberSpec {
        network: network.to_owned(),
        network_uid: uid.to_owned(),
    };
    let object = NetworkNumber::new(&number.to_string(), spec);
    api.create(&PostParams::default(), &object).await?;
    Ok(())
}

/// Gives a network another number.
async fn replace(cluster: &Cluster, old: u32, new: u32, network: &str) -> Result<()> {
    let api: Api<NetworkNumber> = Api::all(cluster.client.clone());
    api.delete(&old.to_string(), &DeleteParams::default()).await?;
    let uid = network_object(cluster, network).await?.uid().context("no uid")?;
    forge(cluster, new, network, &uid).await
}

async fn wait_for_release(cluster: &Cluster, number: u32, released: bool) -> Result<()> {
    let api: Api<NetworkNumber> = Api::all(cluster.client.clone());
    wait::until(&format!("{number} is released: {released}"), patience(), async || {
        let object = api.get(&number.to_string()).await?;
        Ok(object.released_at().is_some() == released)
    })
    .await
    .map(drop)
    .with_context(|| {
        let logs = cluster.controllers.iter();
        let logs: Vec<String> = logs.map(|one| format!("{}:\n{}", one.name, one.log())).collect();
        logs.join("\n")
    })
}

/// Waits until the status of a network shows its number.
async fn wait_for_status(cluster: &Cluster, network: &str, number: u32) -> Result<()> {
    wait::until(
        &format!("the status of {network} has {number}"),
        patience(),
        async || {
            let status = network_object(cluster, network).await?.status.context("no status")?;
            ensure!(status.number == Some(number), "it is {:?}", status.number);
            Ok(true)
        },
    )
    .await
    .map(drop)
}

async fn wait_for_entry(
    cluster: &Cluster,
    network: &str,
    is_right: impl Fn(&NodeNetworkEntry) -> bool,
) -> Result<NodeNetworkEntry> {
    wait::until_some(&format!("the report about {network}"), patience(), async || {
        let entry = entry(cluster, "node1", network).await?.context("no entry")?;
        ensure!(is_right(&entry), "it is {entry:?}");
        Ok(Some(entry))
    })
    .await
}

/// Whether condition `NumberConflict` of the node holds, and its message.
async fn conflict(cluster: &Cluster) -> Result<(bool, String)> {
    let api: Api<NodeNetwork> = Api::all(cluster.client.clone());
    let status = api.get("node1").await?.status.context("no status")?;
    let mut conditions = status.conditions.into_iter();
    let found = conditions.find(|condition| condition.type_ == "NumberConflict");
    let found = found.context("no such condition")?;
    Ok((found.status == ConditionStatus::True, found.message))
}

/// A network as `knictl networks` shows it on the node.
fn shown(cluster: &Cluster, network: &str) -> Result<Value> {
    let text = cluster.nodes[0].knictl(&["networks", "-o", "json"])?;
    let document: Value = serde_json::from_str(&text)?;
    let mut networks = document["networks"].as_array().into_iter().flatten();
    networks
        .find(|found| found["name"] == network)
        .cloned()
        .with_context(|| text.clone())
}

async fn of_account(cluster: &Cluster, account: &str) -> Result<Api<NetworkNumber>> {
    let token = token(&cluster.client, account, None).await?;
    let kubeconfig = cluster.control.token_kubeconfig(&token);
    let client: Client = connect(cluster.fabric.inside(), &kubeconfig).await?;
    Ok(Api::all(client))
}
