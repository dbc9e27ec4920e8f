//! The composition root: builds the agent bottom-up, supervises it, and takes everything down again.
//! Layer: root.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result, anyhow, bail};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    attach::{AttachOptions, Attacher, cleanup},
    cli::{PathArgs, ServeArgs},
    dataplane::{self, Dataplane, DataplaneOptions},
    footprint::Footprint,
    grpc::{self, BoundSocket, Health},
    manifests::{ManifestSet, ManifestSource},
    model::view::{RefusedManifest, WantedNetworks},
    store::Store,
};

/// Changes of the manifests are collected this long, so that a folder that is being written is read once.
const MANIFEST_DEBOUNCE: Duration = Duration::from_millis(100);

/// How often readiness is compared with the health service.
const HEALTH_INTERVAL: Duration = Duration::from_millis(200);

/// Serves until SIGTERM or SIGINT. Pods, pins and state stay; the next agent takes over.
pub async fn serve(args: ServeArgs) -> Result<()> {
    let (true, Some(manifests)) = (args.standalone, args.manifests.as_deref()) else {
        bail!("networks come from manifests: pass --standalone --manifests DIR");
    };
    if !nix::unistd::geteuid().is_root() {
        bail!("the agent manages the node's network and must run as root");
    }
    let source = ManifestSource::new(manifests);
    let mut wanted = source.watch(MANIFEST_DEBOUNCE).await.context("reading the manifests")?;
    let store = Store::open(&args.paths.state_dir).context("opening the state")?;
    Footprint::record(&args.paths).context("recording what was here before")?;
    // Before the node is touched: what lies in a socket's way must not leave half an agent behind. Clients that
    // connect from here on wait until it serves.
    let sockets = grpc::bind(&args.paths.sockets).context("making the sockets")?;
    let (dataplane, events) = Dataplane::open(&dataplane_options(&args)?).map_err(chained("opening the dataplane"))?;
    let options = AttachOptions {
        netns_dir: args.paths.netns_dir.clone(),
        warm_sandboxes: args.warm_sandboxes,
    };
    let attacher = Attacher::start(options, dataplane, events, store)
        .await
        .context("taking over the node's state")?;

    let current = wanted.borrow_and_update().clone();
    attacher
        .apply_networks(wanted_networks(&current))
        .await
        .context("putting the networks into force")?;
    let follower = attacher.clone();
    tokio::spawn(async move {
        while wanted.changed().await.is_ok() {
            let set = wanted.borrow_and_update().clone();
            if let Err(error) = follower.apply_networks(wanted_networks(&set)).await {
                tracing::error!(%error, "cannot put the changed networks into force");
            }
        }
    });
    serve_sockets(&args.paths, sockets, attacher).await
}

async fn serve_sockets(paths: &PathArgs, sockets: Vec<BoundSocket>, attacher: Attacher) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let health = Health::new().await;
    let follower = tokio::spawn(follow_health(attacher.clone(), health.clone()));
    let serving: Vec<String> = paths.sockets.iter().map(|path| path.display().to_string()).collect();
    announce(&serving.join(", "))?;
    let stop = attacher.clone();
    let served = grpc::serve(sockets, attacher, health, async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping; pods keep their interfaces");
        stop.stop();
    })
    .await;
    follower.abort();
    served.context("serving")
}

/// The one line that a supervisor, or a person, waits for.
fn announce(sockets: &str) -> Result<()> {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    writeln!(out, "kni-agent: serving on {sockets}")?;
    out.flush()?;
    Ok(())
}

async fn follow_health(attacher: Attacher, health: Health) {
    let mut ticks = tokio::time::interval(HEALTH_INTERVAL);
    loop {
        ticks.tick().await;
        health.set_ready(attacher.status().ready).await;
    }
}

fn dataplane_options(args: &ServeArgs) -> Result<DataplaneOptions> {
    let object = match &args.ebpf_object {
        Some(path) => std::fs::read(path).with_context(|| format!("reading {}", path.display()))?,
        None => dataplane::embedded()?,
    };
    Ok(DataplaneOptions {
        object,
        root: args.paths.bpf_root.clone(),
        max_endpoints: args.max_endpoints,
        max_flows: args.max_flows,
        hook: args.hook.into(),
    })
}

/// aya's errors say the least at the top.
fn chained<E: std::error::Error>(context: &'static str) -> impl FnOnce(E) -> anyhow::Error {
    move |error| {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        anyhow!("{context}: {text}")
    }
}

fn wanted_networks(set: &ManifestSet) -> WantedNetworks {
    let networks = set
        .networks
        .iter()
        .map(|(spec, origin)| (spec.clone(), origin.to_string()))
        .collect();
    let refused = set
        .refused
        .iter()
        .map(|refusal| {
            tracing::warn!(%refusal, "manifest refused");
            RefusedManifest {
                file: refusal.file.display().to_string(),
                line: refusal.line.unwrap_or(0),
                field: refusal.field.clone().unwrap_or_default(),
                reason: refusal.reason.clone(),
            }
        })
        .collect();
    WantedNetworks { networks, refused }
}

/// Removes everything of ours from the node.
pub async fn clean_up(paths: &PathArgs) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("cleaning up the node's network needs root");
    }
    let footprint = Footprint::load(&paths.state_dir);
    let store = if paths.state_dir.join("state.redb").exists() {
        Some(Store::open(&paths.state_dir).context("an agent still runs: stop it first")?)
    } else {
        None
    };
    cleanup(store.as_ref())
        .await
        .context("removing interfaces, namespaces, routes and rules")?;
    dataplane::remove_pins(&paths.bpf_root).map_err(chained("removing the pins"))?;
    drop(store);
    remove_files(paths)?;
    footprint.undo(paths);
    Ok(())
}

fn remove_files(paths: &PathArgs) -> Result<()> {
    for socket in &paths.sockets {
        if let Err(error) = grpc::socket::remove_dead(socket) {
            tracing::warn!(%error, "left in place");
        }
    }
    for file in ["state.redb", Footprint::FILE] {
        remove_if_there(&paths.state_dir.join(file))?;
    }
    match std::fs::remove_dir(&paths.state_dir) {
        Err(error) if error.kind() == std::io::ErrorKind::DirectoryNotEmpty => {
            tracing::warn!(path = %paths.state_dir.display(), "left in place: it holds files that are not ours");
            Ok(())
        }
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", paths.state_dir.display()))
        }
        _ => Ok(()),
    }
}

fn remove_if_there(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}
