//! Composes the agent bottom-up, supervises it and stops it.
//! Layer: root.

mod clean_up;
mod cluster;
mod faults;
mod manifests;
mod metrics_page;
mod names;
mod record_copy;
mod settings;
mod setup;
mod source;
mod uninstall;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
pub use clean_up::clean_up;
use kni_cluster::ClusterCache;
use kni_controllers::Reflectors;
use kni_dataplane::{CountingRuns, Dataplane, EventStream};
use kni_enforcement::Enforcer;
use kni_fabric::Fabric;
use kni_flows::{Flows, RemotePods};
use kni_grpc::{self as grpc, Health, Services, Sockets, UnknownKeys};
use kni_inspect::Inspector;
use kni_manifests::{ManifestSet, ManifestSource};
use kni_model::{network::EgressMode, service::ServiceNetwork, view::DesiredNetworks};
use kni_netlink::Changes as UplinkChanges;
use kni_pods::{Pods, PodsOptions, PoolSize};
use kni_store::{Contents, Store};
use kni_tasks::Tasks;
use kni_uplink::Uplink;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{oneshot, watch},
};
pub use uninstall::{rest, uninstall};

use self::{names::Names, record_copy::KernelCopy};
use crate::{
    allocator,
    cli::{MetricsAddress, ServeArgs},
    footprint::Footprint,
};
use manifests::{MANIFEST_DEBOUNCE, desired_networks, follow_manifests, set_objects};

/// How often readiness is compared with the health service.
const HEALTH_INTERVAL: Duration = Duration::from_millis(200);

/// The running services, for the gRPC server, the metrics page and the controllers.
#[derive(Clone)]
struct Node {
    attacher: Pods,
    inspector: Inspector,
    dataplane: Arc<Dataplane>,
    sync: Arc<Enforcer>,
    uplink: Arc<Uplink>,
    fabric: Arc<Fabric>,
    flows: Arc<Flows>,
    tasks: Tasks,
    /// Keys of requests that the agent does not know.
    unknown_keys: UnknownKeys,
    /// The watches of the API server, where there is one.
    reflectors: Option<Reflectors>,
    /// While held, the kernel counts runs of programs.
    counting: Option<Arc<CountingRuns>>,
}

/// The source of networks, policies and services.
enum ObjectSource {
    /// A folder of manifests: its current contents and the stream of changes.
    Manifests(ManifestSet, watch::Receiver<ManifestSet>),
    /// A cluster; its objects arrive later.
    Cluster(Reflectors),
}

impl ObjectSource {
    fn reflectors(&self) -> Option<Reflectors> {
        match self {
            Self::Manifests(..) => None,
            Self::Cluster(watches) => Some(watches.clone()),
        }
    }

    fn cache(&self) -> Option<ClusterCache> {
        match self {
            Self::Manifests(..) => None,
            Self::Cluster(watches) => Some(watches.cache()),
        }
    }
}

/// Serves until SIGTERM or SIGINT. Pods, pins and state stay; the next agent takes over.
pub async fn serve(args: ServeArgs) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("the agent manages the node's network and must run as root");
    }
    let config = settings::node_config(&args);
    settings::uplink(&args)?;
    let tasks = Tasks::new(args.test.task_limit.map_or(kni_tasks::LIMIT, Duration::from_secs));
    if let Some(file) = &args.test.task_faults {
        tasks.spawn("task-faults", faults::follow(file.clone(), tasks.clone()));
    }
    let source = object_source(&args, &tasks).await?;
    let store = Store::open(&args.paths.state_dir).context("opening the state")?;
    Footprint::record(&args.paths).context("recording what was here before")?;
    // Before the node is changed: a file at a socket's path must not leave half an agent behind. Clients that connect
    // from here on wait until the agent serves.
    let mut refused = Vec::new();
    let mut bind = |paths: &[PathBuf]| grpc::bind(paths, &mut refused).context("making the sockets");
    let sockets = Sockets {
        kni: bind(&args.paths.sockets)?,
        pod_network: bind(&args.paths.pod_network_sockets)?,
        refused,
    };
    let options = settings::dataplane_options(&args)?;
    let (dataplane, events) = Dataplane::open(&options).context("opening the dataplane")?;
    dataplane.configure(&config).context("configuring the programs")?;
    if let ObjectSource::Cluster(_) = source {
        // Other nodes believe packets from this node's address, whether or not it can make its tunnel.
        let guarded = dataplane.guard_tunnel_port(args.fabric.overlay_port);
        guarded.context("closing the port of tunnels to pods")?;
    }
    let (node, uplink_changes) = start(&args, &tasks, (dataplane, events), store, &source).await?;
    // Before the first client is served: pending deletes must not conflict with new attaches.
    node.attacher.replay_deletes().await;
    match source {
        ObjectSource::Manifests(_, desired) => {
            tasks.spawn("uplink", Arc::clone(&node.uplink).keep(uplink_changes));
            tasks.spawn("sync-manifests", follow_manifests(node.clone(), desired));
        }
        ObjectSource::Cluster(watches) => {
            let cluster = cluster::join(&node, &watches);
            let begin = cluster::begin(node.clone(), watches, cluster, uplink_changes);
            tasks.spawn_finite("first-sync", begin);
        }
    }
    tasks.spawn("memory", allocator::keep_trimmed());
    serve_clients(args.metrics_address, sockets, node).await
}

/// Policies and namespaces are known before the attach service adopts pods, so that adopted pods never have fewer
/// policies than desired; services wait for the numbers of the networks (I3).
async fn start(
    args: &ServeArgs,
    tasks: &Tasks,
    (dataplane, events): (Dataplane, EventStream),
    store: Store,
    source: &ObjectSource,
) -> Result<(Node, UplinkChanges)> {
    let dataplane = Arc::new(dataplane);
    let copy = Box::new(KernelCopy(Arc::clone(dataplane.records())));
    let contents = store.load(Some(copy)).context("reading the state")?;
    let counting = args
        .measure_programs
        .then(|| dataplane.count_program_runs())
        .transpose();
    let counting = counting.context("counting the runs of programs")?.map(Arc::new);
    let sync = Enforcer::new(Arc::clone(&dataplane), settings::place(args), settings::quotas(args));
    let sync = Arc::new(sync.context("reading the tables of policies and services")?);
    if let ObjectSource::Manifests(manifests, _) = source {
        set_objects(&sync, manifests);
    }
    let (uplink, changes) = Uplink::start(
        settings::uplink(args)?,
        Arc::clone(&dataplane),
        store.clone(),
        Arc::clone(&sync),
    )
    .await
    .context("looking for the uplink")?;
    let attacher = start_pods(args, (source, tasks), (store, contents), &dataplane, &sync, &uplink).await?;
    let fabric = Arc::new(Fabric::new(Arc::clone(&dataplane)).context("connecting to rtnetlink")?);
    let flows = flows(args, &dataplane, &attacher, &sync, &fabric);
    let inspector = Inspector::new(
        attacher.clone(),
        Arc::clone(&dataplane),
        Arc::clone(&sync),
        (Arc::clone(&uplink), Arc::clone(&fabric)),
        Arc::clone(&flows),
        source.cache(),
    )
    .context("connecting to rtnetlink")?;
    let node = Node {
        attacher,
        inspector,
        fabric,
        dataplane,
        sync,
        uplink,
        flows,
        tasks: tasks.clone(),
        unknown_keys: UnknownKeys::default(),
        reflectors: source.reflectors(),
        counting,
    };
    // In a cluster this waits for the API server; until then attached pods stay as they are.
    if let ObjectSource::Manifests(manifests, _) = source {
        node.attacher.set_namespaces(manifests.namespaces.clone());
        apply_networks(&node, desired_networks(manifests))
            .await
            .context("applying the networks")?;
    }
    tasks.spawn("enforcement", Arc::clone(&node.sync).reconcile());
    tasks.spawn("flow-events", Arc::clone(&node.flows).follow(events));
    Ok((node, changes))
}

/// The flows, with the names of everything that the services know.
fn flows(
    args: &ServeArgs,
    dataplane: &Arc<Dataplane>,
    attacher: &Pods,
    sync: &Arc<Enforcer>,
    fabric: &Arc<Fabric>,
) -> Arc<Flows> {
    let remote_pods = Arc::new(RemotePods::default());
    let names = Names {
        attacher: attacher.clone(),
        sync: Arc::clone(sync),
        fabric: Arc::clone(fabric),
        remote_pods: Arc::clone(&remote_pods),
        node: settings::place(args).name,
    };
    Arc::new(Flows::new(Arc::clone(dataplane), Arc::new(names), remote_pods))
}

/// Takes over the attached pods of an earlier agent.
async fn start_pods(
    args: &ServeArgs,
    (source, tasks): (&ObjectSource, &Tasks),
    (store, contents): (Store, Contents),
    dataplane: &Arc<Dataplane>,
    sync: &Arc<Enforcer>,
    uplink: &Arc<Uplink>,
) -> Result<Pods> {
    if let ObjectSource::Manifests(manifests, _) = source {
        let _version = uplink.set_rights(manifests.egress.clone(), BTreeSet::new());
    }
    let options = PodsOptions {
        netns_dir: args.paths.netns_dir.clone(),
        warm_sandboxes: args.warm_sandboxes.map_or(PoolSize::ByDemand, PoolSize::Fixed),
        plugins: settings::plugins(args),
        cni_state_dir: args.paths.cni_state_dir.clone(),
        cluster: source.cache(),
        overlay_port: args.fabric.overlay_port,
        force_sweep: args.force_sweep,
        address_rest: args.test.address_rest.map(Duration::from_secs),
        tasks: tasks.clone(),
    };
    let (dataplane, sync, uplink) = (Arc::clone(dataplane), Arc::clone(sync), Arc::clone(uplink));
    let pods = Pods::start(options, dataplane, sync, uplink, store, contents).await;
    pods.context("taking over the node's state")
}

/// A folder that cannot be read stops the agent; an API server that cannot be reached does not.
async fn object_source(args: &ServeArgs, tasks: &Tasks) -> Result<ObjectSource> {
    if args.standalone {
        let folder = args
            .manifests
            .as_deref()
            .context("--standalone needs --manifests DIR")?;
        let source = ManifestSource::new(folder);
        let mut desired = source
            .watch(MANIFEST_DEBOUNCE, tasks)
            .await
            .context("reading the manifests")?;
        let current = desired.borrow_and_update().clone();
        return Ok(ObjectSource::Manifests(current, desired));
    }
    cluster::watches(args, tasks).await.map(ObjectSource::Cluster)
}

/// Applies networks first, then the objects that refer to them. Failed policies and services are retried in the
/// background; failed networks do not delay the others.
async fn apply_networks(node: &Node, desired: DesiredNetworks) -> Result<()> {
    let applied = node.attacher.apply_networks(desired).await;
    let networks = node.attacher.networks();
    let of_services = networks.iter().map(|view| {
        let (id, spec) = (view.network.id, &view.network.spec);
        let network = ServiceNetwork {
            id,
            subnets: spec.subnets.clone(),
            routed: spec.egress == EgressMode::Route,
        };
        (spec.name.clone(), network)
    });
    let of_services: BTreeMap<_, _> = of_services.collect();
    let default = networks.iter().find(|view| view.network.spec.default);
    let default = default.map(|view| view.network.spec.name.clone());
    let specs = networks.iter().map(|view| view.network.spec.clone());
    let specs: BTreeMap<_, _> = specs.map(|spec| (spec.name.clone(), spec)).collect();
    let (sync, uplink) = (Arc::clone(&node.sync), Arc::clone(&node.uplink));
    let synced = tokio::task::spawn_blocking(move || {
        sync.set_networks(of_services, default);
        uplink.set_networks(specs);
        let report = sync.sync();
        // After the policies, which may request addresses.
        if let Err(error) = uplink.sync() {
            tracing::debug!(%error, "egress of the node is not applied yet");
        }
        report
    });
    match synced.await? {
        Ok(report) => tracing::debug!(?report, "the desired state is applied"),
        // The service itself logs the cause.
        Err(error) => tracing::debug!(%error, "the desired state is not applied yet"),
    }
    Ok(applied?)
}

async fn serve_clients(metrics: MetricsAddress, sockets: Sockets, node: Node) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let health = Health::new().await;
    let tasks = node.tasks.clone();
    tasks.spawn("health", follow_health(node.inspector.clone(), health.clone()));
    if let Some(address) = metrics.0 {
        tasks.spawn("metrics", metrics_page::serve(address, node.clone()));
    }
    let paths = sockets.kni.iter().map(|socket| socket.path().display().to_string());
    let serving: Vec<String> = paths.collect();
    announce(&serving.join(", "))?;
    let (stop, attacher) = (node.attacher.clone(), node.attacher.clone());
    let (ended, mut first_ended) = oneshot::channel();
    let services = Services {
        backend: node.attacher.clone(),
        inspector: Arc::new(node.inspector.clone()),
        in_cluster: node.reflectors.is_some(),
        unknown_keys: node.unknown_keys.clone(),
        setup: Arc::new(node),
    };
    let served = grpc::serve(sockets, services, health, async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            task = tasks.ended() => {
                tracing::error!(task = task.task, how = %task.how, "a background task is gone");
                ended.send(task).ok();
            }
        }
        tracing::info!("stopping; pods keep their interfaces");
        stop.stop();
    })
    .await;
    attacher.save();
    served.context("serving")?;
    // A new process takes over without an interruption; this one would stay incomplete.
    match first_ended.try_recv() {
        Ok(task) => bail!("{task}; the agent must start again"),
        Err(_asked_to_stop) => Ok(()),
    }
}

/// Prints the line that a supervisor, or a person, waits for.
fn announce(sockets: &str) -> Result<()> {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    writeln!(out, "kni-agent: serving on {sockets}")?;
    out.flush()?;
    Ok(())
}

async fn follow_health(inspector: Inspector, health: Health) {
    let mut ticks = tokio::time::interval(HEALTH_INTERVAL);
    loop {
        kni_tasks::waiting(ticks.tick()).await;
        let inspector = inspector.clone();
        // May read files of plugins.
        let ready = tokio::task::spawn_blocking(move || inspector.obstacles().is_empty());
        match ready.await {
            Ok(ready) => health.set_ready(ready).await,
            Err(ended) => tracing::error!(%ended, "the readiness of the node cannot be read"),
        }
    }
}
