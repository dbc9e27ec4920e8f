//! Tests replicas of kni-controller: one acts, another one takes over, and an object that cannot be written holds up no
//! other.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use kni_api::PodNetwork;
use kni_integration::{
    Cluster,
    cluster::{
        audit::{Audit, Request},
        objects, patience,
    },
    require, wait,
};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::scene::{network_object, wait_for_condition};

/// The network whose status cannot be written.
const STUCK: &str = "a-stuck";
const USER: &str = "system:serviceaccount:kni-system:kni-controller";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_replica_acts_and_one_object_holds_up_no_other() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::without_nodes("cluster-controllers").await?;
    wait_for_holder(&cluster, "controller1").await?;
    let network = |name: &str, subnet: &str| objects::network(name, &[subnet], &json!({}));
    refuse_status(&cluster, network(STUCK, "10.1.0.0/16")).await?;
    cluster.apply(&[network("b", "10.2.0.0/16")]).await?;
    wait_for_condition(&cluster, "b", "Accepted", true).await?;
    ensure!(network_object(&cluster, STUCK).await?.status.is_none(), "it is stuck");
    let first = writers(&cluster.audit()?);
    ensure!(first.len() == 1, "one replica has written: {first:?}");

    // A replica that hangs is replaced when its Lease expires.
    cluster.start_controller().await?;
    cluster.controllers[0].signal(Signal::SIGSTOP)?;
    let start = Instant::now();
    wait_for_holder(&cluster, "controller2").await?;
    println!("a replica that hangs is replaced after {:?}", start.elapsed());
    cluster.apply(&[network("c", "10.3.0.0/16")]).await?;
    wait_for_condition(&cluster, "c", "Accepted", true).await?;
    let before = cluster.audit()?;
    cluster.controllers[0].signal(Signal::SIGCONT)?;
    cluster.apply(&[network("d", "10.4.0.0/16")]).await?;
    wait_for_condition(&cluster, "d", "Accepted", true).await?;
    wait::until("the first replica knows", patience(), async || {
        Ok(cluster.controllers[0].log().contains("writes nothing"))
    })
    .await?;
    wait::until(
        "the second replica has written, the first one has not",
        patience(),
        async || {
            let since = writers(&cluster.audit()?.since(&before)?);
            ensure!(!since.contains(&first[0]), "{since:?} of which {first:?}");
            Ok(!since.is_empty())
        },
    )
    .await?;

    // An orderly stop hands over at once.
    cluster.controllers[1].signal(Signal::SIGTERM)?;
    let start = Instant::now();
    wait_for_holder(&cluster, "controller1").await?;
    let took = start.elapsed();
    println!("a replica that is stopped is replaced after {took:?}");
    ensure!(took < Duration::from_secs(8), "{took:?}");
    cluster.apply(&[network("e", "10.5.0.0/16")]).await?;
    wait_for_condition(&cluster, "e", "Accepted", true).await?;
    Ok(())
}

/// Makes a network whose status kni-controller has tried to write in vain. One with a status before it is deleted all
/// the same.
async fn refuse_status(cluster: &Cluster, stuck: Value) -> Result<()> {
    cluster.apply(std::slice::from_ref(&stuck)).await?;
    wait_for_condition(cluster, STUCK, "Accepted", true).await?;
    wait::until("the finalizer is added", patience(), async || {
        Ok(!network_object(cluster, STUCK).await?.finalizers().is_empty())
    })
    .await?;
    cluster.apply(&no_status_for(STUCK)).await?;
    let api: Api<PodNetwork> = Api::all(cluster.client.clone());
    let (dry_run, no_change) = (
        PatchParams {
            dry_run: true,
            ..PatchParams::default()
        },
        Patch::Merge(json!({ "status": {} })),
    );
    wait::until("the status of the network cannot be written", patience(), async || {
        let refused = api.patch_status(STUCK, &dry_run, &no_change).await.err();
        Ok(refused.is_some_and(|error| error.to_string().contains("ValidatingAdmissionPolicy")))
    })
    .await?;
    cluster.delete(&stuck).await?;
    wait::until("the network is gone", patience(), async || {
        Ok(cluster.get(&stuck).await?.is_none())
    })
    .await?;
    let before = cluster.audit()?;
    cluster.apply(&[stuck]).await?;
    wait::until("kni-controller has tried to write it", patience(), async || {
        let since = cluster.audit()?.since(&before)?;
        let is_refused =
            |request: &Request| request.code == 422 && request.what.contains(&format!("podnetworks/{STUCK}/status"));
        Ok(since.of(USER).into_iter().any(is_refused))
    })
    .await?;
    Ok(())
}

pub(super) async fn wait_for_holder(cluster: &Cluster, name: &str) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), "kni-system");
    wait::until(&format!("{name} holds the Lease"), patience(), async || {
        let lease = leases.get_opt("kni-controller").await?.context("no Lease yet")?;
        let holder = lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default();
        ensure!(holder.starts_with(&format!("{name}_")), "it is held by {holder:?}");
        Ok(true)
    })
    .await
    .map(drop)
}

/// The tokens with which objects but the Lease were written.
fn writers(audit: &Audit) -> Vec<String> {
    let requests = audit.of(USER).into_iter();
    let writes = requests.filter(|request| {
        let reads = ["get ", "list ", "watch "]
            .iter()
            .any(|verb| request.what.starts_with(verb));
        !reads && !request.what.contains("/leases")
    });
    let mut tokens: Vec<String> = writes.map(|request| request.credential.clone()).collect();
    tokens.sort();
    tokens.dedup();
    tokens
}

/// An admission policy that refuses every status of one network.
fn no_status_for(network: &str) -> [Value; 2] {
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": { "name": "stuck" },
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": { "resourceRules": [{
                "apiGroups": ["kni.dev"], "apiVersions": ["v1alpha1"], "operations": ["UPDATE"],
                "resources": ["podnetworks/status"],
            }]},
            "validations": [{ "expression": format!("object.metadata.name != '{network}'") }],
        },
    });
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": { "name": "stuck" },
        "spec": { "policyName": "stuck", "validationActions": ["Deny"] },
    });
    [policy, binding]
}
