//! `kubectl kni doctor`: checks the cluster by its objects, and every node by its agent.

use std::{fmt::Debug, future::pending};

use k8s_openapi::{NamespaceResourceScope, jiff::Timestamp};
use kube::{
    Api, Client, Resource,
    api::{ApiResource, DynamicObject, ListParams},
    core::PartialObjectMeta,
};
use serde::de::DeserializeOwned;

use super::{agent, cli::DoctorArgs, find};
use crate::{
    commands::{self, Outcome},
    doctor::{
        Check, Finding, Report,
        cluster::{Snapshot, checks},
        controller,
        foreign::{self, ForeignObjects},
    },
    error::Error,
    terminal::Terminal,
};

/// Objects per request, so that a large cluster is not one answer.
const PAGE: u32 = 500;

/// Shows what is wrong in the cluster, and what to do; [`Outcome::NotReady`] when something does not work. With `node`
/// only that node's agent is asked.
pub(super) async fn run(
    client: &Client,
    kni_namespace: &str,
    node: Option<&str>,
    args: &DoctorArgs,
    terminal: &mut Terminal<'_>,
) -> Result<Outcome, Error> {
    let snapshot = snapshot(client, kni_namespace).await?;
    let mut report = Report {
        checks: checks(&snapshot),
    };
    for (pod, on) in find::agents(client, kni_namespace).await? {
        if node.is_none_or(|node| node == on) {
            report.checks.extend(of_agent(client, kni_namespace, &pod, &on).await);
        }
    }
    commands::doctor::show(&report, args.output.format, terminal)
}

/// The checks of a node, by knictl in its agent's pod. An agent that cannot be asked is a finding.
async fn of_agent(client: &Client, namespace: &str, pod: &str, node: &str) -> Vec<Check> {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let words = ["doctor", "-o", "json"].map(str::to_owned);
    let ran = {
        let mut terminal = Terminal::new(&mut out, &mut err);
        agent::run(client, namespace, pod, &words, &mut terminal, pending()).await
    };
    let scope = format!("node {node}");
    let problem = match (ran, serde_json::from_slice::<Report>(&out)) {
        (Ok(_), Ok(report)) => {
            let checks = report.checks.into_iter();
            return checks
                .map(|check| Check {
                    scope: scope.clone(),
                    ..check
                })
                .collect();
        }
        (Err(error), _) => error.to_string(),
        (Ok(_), Err(_)) => agent::remarks(&err),
    };
    let remedy = format!("kubectl -n {namespace} logs {pod}");
    let finding = Finding::failure(format!("pod {namespace}/{pod}"), problem, remedy);
    vec![Check::new(&scope, "agent-answers", "The agent answers", vec![finding])]
}

async fn snapshot(client: &Client, kni_namespace: &str) -> Result<Snapshot, Error> {
    let definitions = list(client).await?;
    let mut foreign = Vec::new();
    for resource in foreign::served(&definitions) {
        foreign.push(foreign_objects(client, resource).await?);
    }
    Ok(Snapshot {
        now: Timestamp::now(),
        definitions,
        admission_policies: list(client).await?,
        admission_bindings: list(client).await?,
        controller: get(client, kni_namespace, controller::NAME).await?,
        lease: get(client, kni_namespace, controller::NAME).await?,
        blocks: list(client).await?,
        nodes: list(client).await?,
        namespaces: list(client).await?,
        pods: list_metadata(client).await?,
        networks: list(client).await?,
        attachments: list(client).await?,
        egress_policies: list(client).await?,
        egress_pools: list(client).await?,
        egress_claims: list(client).await?,
        interfaces: list(client).await?,
        node_networks: list(client).await?,
        foreign,
    })
}

/// One page of the objects of a kind. Who may list ours may not be allowed to list these.
async fn foreign_objects(client: &Client, resource: ApiResource) -> Result<ForeignObjects, Error> {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let (objects, more, problem) = match api.list(&ListParams::default().limit(PAGE)).await {
        Ok(page) => (page.items, page.metadata.remaining_item_count.unwrap_or(0), None),
        Err(kube::Error::Api(status)) if status.is_not_found() => (Vec::new(), 0, None),
        Err(kube::Error::Api(status)) if status.is_forbidden() => (Vec::new(), 0, Some(status.message.clone())),
        Err(error) => return Err(Error::of_request(format!("listing {}", resource.plural))(error)),
    };
    Ok(ForeignObjects {
        resource,
        objects,
        more: usize::try_from(more).unwrap_or(0),
        problem,
    })
}

/// An object of a namespace, if it exists.
async fn get<K>(client: &Client, namespace: &str, name: &str) -> Result<Option<K>, Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    let found = api.get_opt(name).await;
    found.map_err(Error::of_request(format!(
        "reading {} {namespace}/{name}",
        K::plural(&())
    )))
}

/// All objects of a kind; none if the kind is not installed, which the check of definitions reports.
async fn list<K>(client: &Client) -> Result<Vec<K>, Error>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let api: Api<K> = Api::all(client.clone());
    let mut items = Vec::new();
    let mut params = ListParams::default().limit(PAGE);
    loop {
        let page = match api.list(&params).await {
            Ok(page) => page,
            Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(items),
            Err(error) => return Err(Error::of_request(format!("listing {}", K::plural(&())))(error)),
        };
        items.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(items),
        }
    }
}

async fn list_metadata<K>(client: &Client) -> Result<Vec<PartialObjectMeta<K>>, Error>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let api: Api<K> = Api::all(client.clone());
    let mut items = Vec::new();
    let mut params = ListParams::default().limit(PAGE);
    loop {
        let page = api.list_metadata(&params).await;
        let page = page.map_err(Error::of_request(format!("listing {}", K::plural(&()))))?;
        items.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(items),
        }
    }
}
