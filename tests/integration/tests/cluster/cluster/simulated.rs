//! Tests with a small simulation what one change costs, and that it does not grow with the cluster: with six nodes in
//! every run, and with twenty in a long test. Another long test measures how fast pods are confirmed while the CPUs are
//! used up.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    require,
    simulation::{self, FEW, Options, Outcome, backlog, meters::Cost, report},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_change_concerns_only_the_nodes_that_have_pods_of_its_network() -> Result<()> {
    require!(root, netns, bpf, machine);
    of_size(6, 24, 3, Some(2)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "long: twenty nodes, with the usual times of rest"]
async fn one_change_concerns_no_more_nodes_of_a_larger_cluster() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    of_size(20, 200, 8, None).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "long: uses up the CPUs with 100 and with 200 nodes"]
async fn an_api_server_that_is_used_up_confirms_pods_of_twice_the_nodes_half_as_fast_at_least() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut both = Vec::new();
    for nodes in [100, 200] {
        let options = Options {
            nodes,
            pods: nodes * 15,
            networks: 50,
            rate: 1.0,
            // More than two CPUs confirm.
            fill: 60.0,
            duration: Duration::ZERO,
            rest: None,
        };
        let backlog = backlog::run(options, |what| println!("{nodes} nodes: {what}")).await?;
        println!("{backlog}");
        ensure!(backlog.is_drained(), "the backlog does not drain: {backlog}");
        both.push(backlog);
    }
    let usual = both[0].rate();
    // More than is confirmed in 5 s.
    let slowest = both[1].saturated(5.0 * usual).map(|one| one.rate).reduce(f64::min);
    let slowest = slowest.context("with 200 nodes nothing had to wait for long: create the pods faster")?;
    println!("{usual:.1}/s with 100 nodes, at least {slowest:.1}/s with 200");
    ensure!(
        slowest >= usual / 2.0,
        "{slowest:.1}/s with 200 nodes, {usual:.1}/s with 100: {}",
        both[1]
    );
    Ok(())
}

async fn of_size(nodes: usize, pods: usize, networks: usize, rest: Option<u64>) -> Result<()> {
    let options = Options {
        nodes,
        pods,
        networks,
        rate: 5.0,
        fill: 20.0,
        duration: Duration::from_secs(6),
        rest,
    };
    let outcome = simulation::run(options, |what| println!("{what}")).await?;
    println!("{}", report::text(&outcome, 2.0));
    everything_becomes_known(&outcome)?;
    each_change_costs_little(&outcome)?;
    an_agent_asks_for_little(&outcome)
}

fn everything_becomes_known(outcome: &Outcome) -> Result<()> {
    ensure!(
        outcome.confirmed == outcome.options.pods,
        "{} of {} pods are confirmed",
        outcome.confirmed,
        outcome.options.pods
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
    let writes = |cost: &Cost| {
        let requests = cost.requests.iter();
        let requests = requests.filter(|(request, _)| request.is_ours() && request.is_write());
        let requests = requests.filter(|(request, _)| !request.is_on_a_timer());
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
        (1.0..=2.0 * (nodes(outcome) + 4.0)).contains(&followers),
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
    for what in ["a pod comes, its node has others of the network", "a label changes"] {
        let receivers = outcome.change(what)?.watchers();
        let of_pods = receivers.get("pods").copied().unwrap_or_default();
        ensure!(
            (1.0..FEW).contains(&of_pods),
            "{what}: each change of a pod was sent to {of_pods} watches: {receivers:?}"
        );
    }
    let watches: f64 = outcome.watches.values().sum();
    ensure!(watches > 0.0, "no watches");
    Ok(())
}

fn events(cost: &Cost, resource: &str) -> f64 {
    cost.events.get(resource).copied().unwrap_or_default()
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
fn nodes(outcome: &Outcome) -> f64 {
    outcome.options.nodes as f64
}
