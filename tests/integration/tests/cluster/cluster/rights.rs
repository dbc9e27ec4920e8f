//! Tests what each account may write, with real tokens: a table of account, verb and object; and that a false
//! `NetworkMembers` gives no address an identity.

mod forged;
mod table;

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Cluster, Pod,
    cluster::{connect, objects, patience, token},
    require, wait,
};
use kube::Client;
use serde_json::{Value, json};

use self::table::{Expected, Names};
use super::{
    request::{Outcome, Request, Verb},
    scene::{tenants, wait_for_condition, wait_for_truth},
};

/// An object that does not change for so long is at rest: reports are written within half a second.
const REST: Duration = Duration::from_secs(1);

/// The accounts of the table.
struct Accounts {
    rows: Vec<(&'static str, Client)>,
}

impl Accounts {
    async fn new(cluster: &mut Cluster) -> Result<Self> {
        for (role, user) in [("edit", "editor"), ("view", "viewer")] {
            let binding = json!({
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "RoleBinding",
                "metadata": { "name": user, "namespace": "red-team" },
                "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role },
                "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user }],
            });
            cluster.apply(&[binding]).await?;
        }
        let mut rows = Vec::new();
        for (name, account, node) in [
            ("agent of node1", "kni-agent", Some("node1")),
            ("agent, token of no node", "kni-agent", None),
            ("kni-controller", "kni-controller", None),
        ] {
            let token = token(&cluster.client, account, node).await?;
            let kubeconfig = cluster.control.token_kubeconfig(&token);
            rows.push((name, connect(cluster.fabric.inside(), &kubeconfig).await?));
        }
        for user in ["editor", "viewer"] {
            let kubeconfig = cluster.control.kubeconfig(user, "tenants")?;
            rows.push((user, connect(cluster.fabric.inside(), &kubeconfig).await?));
        }
        Ok(Self { rows })
    }

    fn client(&self, name: &str) -> Result<&Client> {
        let found = self.rows.iter().find(|(known, _)| *known == name);
        found
            .map(|(_, client)| client)
            .with_context(|| format!("account {name}"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn accounts_write_what_is_theirs_and_false_reports_give_no_identity() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::start("cluster-rights", 2).await?;
    tenants(&cluster).await?;
    let pods = cluster
        .run(&[
            objects::pod("red-team", "a", "node1"),
            objects::pod("red-team", "b", "node2"),
            objects::pod("plain", "web", "node1"),
            objects::pod_with("plain", "admin", "node2", &json!({ "labels": { "role": "admin" } })),
            objects::pod("plain", "stranger", "node2"),
            objects::pod("plain", "local", "node1"),
        ])
        .await?;
    wait_for_truth(&cluster).await?;
    let accounts = Accounts::new(&mut cluster).await?;
    let names = Names::new(&cluster, &pods[0], &pods[1]).await?;
    wait_for_aggregation(&accounts).await?;

    foreign_writes(&accounts, &names).await?;
    rows(&accounts, &names).await?;
    // Nothing of what was refused has happened.
    let wrong = cluster.untrue().await?;
    ensure!(wrong.is_empty(), "{wrong:#?}");
    wait_for_condition(&cluster, "red", "Programmed", true).await?;

    let [_, _, web, admin, stranger, local] = &pods[..] else {
        unreachable!("as many as were asked for");
    };
    forged::no_identity(&cluster, [web, admin, stranger, local]).await
}

/// The API server adds the rules of the deployment's roles to its own a moment after they are created.
async fn wait_for_aggregation(accounts: &Accounts) -> Result<()> {
    for user in ["editor", "viewer"] {
        let client = accounts.client(user)?;
        wait::until(&format!("{user} has the aggregated role"), patience(), async || {
            let list = Request::new(
                Verb::Get,
                "/apis/kni.dev/v1alpha1/namespaces/red-team/podinterfaces",
                Value::Null,
            );
            Ok(list.send(client, false).await?.is_accepted())
        })
        .await?;
    }
    Ok(())
}

/// The token of a node's agent writes about another node: every request is refused, none is a dry run.
async fn foreign_writes(accounts: &Accounts, names: &Names) -> Result<()> {
    let client = accounts.client("agent of node1")?;
    let requests = table::foreign(names);
    ensure!(requests.len() >= 30, "{} requests", requests.len());
    println!("a token of node1 about node2:");
    let mut accepted = Vec::new();
    for request in &requests {
        let outcome = request.send(client, false).await?;
        println!("  {request}: {outcome}");
        if !outcome.is_refused() {
            accepted.push(format!("{request}: {outcome}"));
        }
    }
    println!("{} of {} refused", requests.len() - accepted.len(), requests.len());
    ensure!(accepted.is_empty(), "not refused: {accepted:#?}");
    Ok(())
}

/// The table of accounts. What may be written is tried without effect.
async fn rows(accounts: &Accounts, names: &Names) -> Result<()> {
    let mut wrong = Vec::new();
    let mut count = 0;
    for (account, expected, requests) in table::rows(names) {
        let client = accounts.client(account)?;
        for request in requests {
            let outcome = request.send(client, expected == Expected::Accepted).await?;
            let right = match expected {
                Expected::Accepted => outcome.is_accepted(),
                Expected::Refused => outcome.is_refused(),
            };
            println!("  {account}: {request}: {outcome}");
            count += 1;
            if !right {
                wrong.push(format!("{account}: {request}: {outcome}, expected: {expected:?}"));
            }
        }
    }
    println!("{count} rows");
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

impl Outcome {
    fn is_accepted(&self) -> bool {
        (200..300).contains(&self.code)
    }

    /// By RBAC, by admission, or by the kind's own rule about fields that never change; any other error would mean that
    /// the request was not evaluated.
    fn is_refused(&self) -> bool {
        self.code == 403 || (self.code == 422 && self.message.contains("cannot be changed"))
    }
}

impl Names {
    async fn new(cluster: &Cluster, own: &Pod, foreign: &Pod) -> Result<Self> {
        let red = objects::network("red", &[], &json!({}));
        // Its status follows the pods a moment later; an update must be of the latest version.
        let network = wait::until_some("network red is at rest", patience(), async || {
            let before = cluster.get(&red).await?.context("network red")?;
            tokio::time::sleep(REST).await;
            let network = cluster.get(&red).await?.context("network red")?;
            Ok((before.metadata.resource_version == network.metadata.resource_version).then_some(network))
        })
        .await?;
        let name = |pod: &Pod| kni_api::pod_interface::name(&pod.name, &pod.uid, "eth0");
        Ok(Self {
            own: name(own),
            foreign: name(foreign),
            own_uid: own.uid.clone(),
            foreign_uid: foreign.uid.clone(),
            network: serde_json::to_value(network)?,
        })
    }
}
