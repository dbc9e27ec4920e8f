//! Tests with a small simulation what one change costs, and that it does not grow with the cluster.

use std::time::Duration;

use anyhow::{Result, ensure};
use kni_integration::{
    require,
    simulation::{
        self, Options, Outcome,
        meters::{Cost, Request},
        report,
    },
};

/// The size.
const NODES: usize = 20;
const PODS: usize = 200;
const NETWORKS: usize = 8;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_change_concerns_only_the_nodes_that_have_pods_of_its_network() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let options = Options {
        nodes: NODES,
        pods: PODS,
        networks: NETWORKS,
        rate: 5.0,
        fill: 20.0,
        duration: Duration::from_secs(6),
    };
    let outcome = simulation::run(options, |what| println!("{what}")).await?;
    println!("{}", report::text(&outcome, 2.0));
    everything_becomes_known(&outcome)?;
    each_change_costs_little(&outcome)?;
    an_agent_asks_for_little(&outcome)
}

fn everything_becomes_known(outcome: &Outcome) -> Result<()> {
    ensure!(
        outcome.confirmed == PODS,
        "{} of {PODS} pods are confirmed",
        outcome.confirmed
    );
    for (what, latency) in [
        ("starts of agents", outcome.starts),
        ("claims", outcome.claims),
        ("attaches", outcome.attaches),
        ("pods", outcome.joins),
        ("labels", outcome.relabels),
    ] {
        ensure!(latency.count > 0 && latency.missing == 0, "{what}: {latency:?}");
    }
    Ok(())
}

fn each_change_costs_little(outcome: &Outcome) -> Result<()> {
    let background = outcome.change("nothing")?;
    // Writes on a timer, not caused by the change: figures of networks follow earlier changes, at most once in 30 s for
    // each network, and kni-controller renews its lease.
    let on_a_timer = |request: &Request| {
        request.resource == "podnetworks/status" || (request.who == "kni-controller" && request.resource == "leases")
    };
    let writes = |cost: &Cost| {
        let requests = cost.requests.iter();
        let requests = requests.filter(|(request, _)| request.is_ours() && request.is_write());
        let requests = requests.filter(|(request, _)| !on_a_timer(request));
        requests.map(|(_, count)| count).sum::<f64>()
    };
    for (what, most) in [
        ("a pod comes, its node has others of the network", 9.0),
        ("it goes", 7.0),
        ("a label changes", 2.0),
    ] {
        let cost = outcome.change(what)?;
        let writes = writes(cost) - writes(background);
        ensure!(
            writes <= most,
            "{what}: {writes} writes, at most {most}: {:?}",
            cost.requests
        );
    }
    // Every node follows the default network, so at most all of them, two more reports of the same object, and who
    // follows all objects.
    let followers = events(outcome.change("a label changes")?, "networkmembers");
    ensure!(
        (1.0..=2.0 * (f64::from(u32::try_from(NODES)?) + 4.0)).contains(&followers),
        "a change of labels reached {followers} watches"
    );
    let per_start = outcome.load.writes() / f64::from(u32::try_from(outcome.started.0)?);
    ensure!(
        per_start <= 20.0,
        "{per_start:.1} writes for a pod that starts and ends"
    );
    Ok(())
}

/// The agents follow pods of their own nodes only: a pod that starts is sent to few watches.
fn an_agent_asks_for_little(outcome: &Outcome) -> Result<()> {
    let pods = events(
        outcome.change("a pod comes, its node has others of the network")?,
        "pods",
    );
    ensure!(
        pods < f64::from(u32::try_from(NODES)?),
        "a pod that starts was sent {pods} times, to {NODES} nodes and others"
    );
    let receivers = outcome.change("a label changes")?.watchers();
    let of_pods = receivers.get("pods").copied().unwrap_or_default();
    ensure!(
        (1.0..f64::from(u32::try_from(NODES)?)).contains(&of_pods),
        "a change of a pod was sent to {of_pods} watches: {receivers:?}"
    );
    let watches: f64 = outcome.watches.values().sum();
    ensure!(watches > 0.0, "no watches");
    Ok(())
}

fn events(cost: &Cost, resource: &str) -> f64 {
    cost.events.get(resource).copied().unwrap_or_default()
}
