//! Connects, elects, and starts and stops the controllers with each term.

use std::{io::Write as _, time::Duration};

use anyhow::{Context as _, Result, bail};
use kni_reflectors::{RequestLimits, Sender, WatchState, connect};
use kube::Client;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use crate::{
    cli::Args,
    controllers,
    election::{Election, Leadership},
    endpoint::Endpoint,
    health::Health,
    metrics::Metrics,
    readiness::Readiness,
};

/// Worker threads of the runtime.
pub(crate) const THREADS: usize = 4;

/// Runs until SIGTERM or SIGINT. An error means that a task has ended that must not; another replica takes over.
pub(crate) async fn serve(args: &Args) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let limits = RequestLimits::default();
    let connection = connect(args.kubeconfig.as_deref(), limits, Sender::Controller).await?;
    let client = connection.client;
    let watches = WatchState::default();
    let readiness = Readiness::new(watches.clone());
    let election = Election::new(client.clone(), &args.namespace, &replica(args)?, readiness.clone());
    let leadership = election.leadership();
    let health = Health::default();
    let metrics = Metrics::new(connection.requests, watches, leadership.clone());
    let endpoint = Endpoint {
        health: health.clone(),
        readiness: readiness.clone(),
        metrics: metrics.clone(),
    };
    tokio::spawn(endpoint.serve(args.health_address));
    let of_term = {
        let metrics = metrics.clone();
        move || metrics.with_tables(|tables| (tables.refused_of_cluster(), tables.missing_of_cluster()))
    };
    tokio::spawn(readiness.follow(client.clone(), of_term, health.expect("readiness")));
    let (stop, stopping) = watch::channel(());
    let (stopped, all_stopped) = watch::channel(());
    let mut electing =
        tokio::spawn(election.run(health.expect("election"), closed(stopping.clone()), closed(all_stopped)));
    announce(args)?;
    let rest = Duration::from_secs(args.number_rest);
    let acting = act(&client, &leadership, (&health, &metrics), rest, closed(stopping));
    tokio::pin!(acting);
    let outcome = tokio::select! {
        outcome = &mut acting => outcome,
        ended = &mut electing => bail!("the election has ended: {ended:?}"),
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    drop(stop);
    if outcome.is_ok() {
        tracing::info!("stopping");
        acting.await?;
    }
    drop(stopped);
    electing.await.context("the election")?;
    outcome
}

/// Runs the controllers in each term until `stop` resolves.
async fn act(
    client: &Client,
    leadership: &Leadership,
    (health, metrics): (&Health, &Metrics),
    rest: Duration,
    stop: impl Future<Output = ()>,
) -> Result<()> {
    tokio::pin!(stop);
    loop {
        let term = tokio::select! {
            term = leadership.won() => term,
            () = &mut stop => return Ok(()),
        };
        let mut tasks = controllers::start(client, term.clone(), (health, metrics), rest);
        let stops = tokio::select! {
            () = term.lost() => false,
            () = &mut stop => true,
            // Each runs for as long as the term.
            ended = tasks.join_next() => bail!("a controller has ended: {ended:?}"),
        };
        tasks.shutdown().await;
        metrics.end_term();
        if stops {
            return Ok(());
        }
        tracing::warn!("this replica no longer holds the Lease, and writes nothing");
    }
}

/// Resolves when the sender is dropped.
async fn closed(mut receiver: watch::Receiver<()>) {
    while receiver.changed().await.is_ok() {}
}

fn replica(args: &Args) -> Result<String> {
    if let Some(name) = &args.name {
        return Ok(name.clone());
    }
    let read = std::fs::read_to_string("/proc/sys/kernel/hostname").context("reading the hostname")?;
    Ok(read.trim().to_owned())
}

/// Prints the line that a supervisor, or a person, waits for.
fn announce(args: &Args) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "kni-controller: candidate for Lease {}/{}",
        args.namespace,
        crate::election::LEASE
    )?;
    out.flush()?;
    Ok(())
}
