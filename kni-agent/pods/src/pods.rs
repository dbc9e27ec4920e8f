//! Serves attach, detach and delete of pod sandboxes, each on a task of its own.

use std::{collections::BTreeMap, future::Future, net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use kni_cluster::ClusterCache;
use kni_dataplane::Dataplane;
use kni_enforcement::Enforcer;
use kni_model::{
    AttachRequest, IfName, NetworkName, PodRef, Sandbox, SandboxId,
    policy::{ContainerPort, Labels},
    view::DesiredNetworks,
};
use kni_plugins::Plugins;
use kni_store::{Contents, Store};
use kni_tasks::Tasks;
use kni_uplink::Uplink;

use crate::{
    background,
    error::{AttachError, ErrorKind, Subject},
    interfaces::Interfaces,
    journal::DeleteJournal,
    kernel::Kernel,
    namespaces::{NamespacePool, PoolSize},
    networks::NetworkRegistry,
    prepare::{Preparation, Prepared},
    reaper::Reaper,
    recovery::Recovery,
    registry::Registry,
    repair::Repair,
    rests,
    sandboxes::{DeleteRequest, Garbage, GarbageRequest, Gate, JoiningNamespaces, KeyedLocks, LostRight, Sandboxes},
    takeover::Takeover,
};

/// How long a step of the removal of interfaces may take: each is bounded by the time limits of netlink requests.
const STEP_LIMIT: Duration = Duration::from_mins(5);

/// Settings of the service.
#[derive(Debug, Clone)]
pub struct PodsOptions {
    /// Where namespaces are mounted.
    pub netns_dir: PathBuf,
    /// How many namespaces are prewarmed for `CreateNetwork`.
    pub warm_sandboxes: PoolSize,
    /// CNI plugins, where they may be run.
    pub plugins: Option<Plugins>,
    /// Where CNI plugins write deletes while the agent is away.
    pub cni_state_dir: PathBuf,
    /// The cluster, where there is one: it completes requests.
    pub cluster: Option<ClusterCache>,
    /// UDP port of the tunnel between the nodes of the cluster.
    pub overlay_port: u16,
    /// Supervises the background work.
    pub tasks: Tasks,
    /// Whether objects without a record are removed at the start, however many they are. A lost state makes them so.
    pub force_sweep: bool,
    /// How long addresses rest, where tests demand another time than usual.
    pub address_rest: Option<Duration>,
}

/// The attach service. Clones share it.
///
/// # Guarantees
/// - Idempotent by sandbox: a repeated attach gives the same answer, detach and delete of unknown sandboxes succeed
///   (I6).
/// - All or nothing: a failed attach leaves nothing behind, even when the agent is killed during the attach.
/// - When attach returns, traffic flows as the policies allow; when detach returns, none does, and the addresses are
///   free.
/// - A call that has begun is finished even if the caller goes away, and is bounded in time.
///
/// # Assumptions
/// - One agent per node: the store's lock ensures it.
#[derive(Clone)]
pub struct Pods {
    pub(crate) service: Arc<Service>,
}

/// The owners.
pub(crate) struct Service {
    pub(crate) registry: Arc<Registry>,
    pub(crate) networks: Arc<NetworkRegistry>,
    pub(crate) namespaces: Arc<NamespacePool>,
    pub(crate) sandboxes: Arc<Sandboxes>,
    journal: Arc<DeleteJournal>,
    tasks: Tasks,
    pub(crate) recovery: Recovery,
    pub(crate) repair: Arc<Repair>,
    cluster: Option<ClusterCache>,
    access: Arc<JoiningNamespaces>,
    /// Attaches with additional interfaces, by the pod's own sandbox. Taken before the locks of the sandboxes.
    attaching: KeyedLocks,
}

impl Service {
    /// Pending deletes first, then the pod's own sandbox, then its additional interfaces. All or nothing.
    async fn attach(&self, mut request: AttachRequest) -> Result<Arc<Sandbox>, AttachError> {
        // A repeated call must not take a sandbox that the first call is about to undo.
        let _one_at_a_time = self.attaching.lock(request.sandbox.as_str()).await;
        if request.cni.is_some() {
            self.journal.complete(&request.sandbox).await?;
        }
        let Some(cluster) = &self.cluster else {
            let annotated = std::mem::take(&mut request.annotated_labels);
            request.labels.extend(annotated);
            return self.sandboxes.attach(&request).await;
        };
        let preparation = Preparation::new(cluster, &self.registry, &self.networks);
        let Prepared {
            request,
            additional,
            following,
        } = preparation.complete(request).await?;
        // The preparation may have waited for the cluster.
        if self.registry.is_stopping() {
            return Err(Subject::from(&request).error(ErrorKind::Stopping));
        }
        let known = self.query(&request.sandbox).is_some();
        let sandbox = self.attach_when_free(&preparation, &request).await?;
        for child in additional {
            let Err(error) = self.attach_when_free(&preparation, &child).await else {
                continue;
            };
            // The controllers correct running pods in the background.
            if known {
                tracing::warn!(%error, "an additional interface of an attached pod cannot be made");
                continue;
            }
            // Unfinished steps stay recorded.
            if let Err(undone) = self.sandboxes.detach(&sandbox.id).await {
                tracing::error!(%undone, "undo is not complete");
            }
            return Err(error);
        }
        preparation.wait_for_others(following).await;
        self.query(&sandbox.id)
            .ok_or_else(|| Subject::from(&request).not_ready("it was detached while it was attached"))
    }

    /// Attaches one sandbox. Where concurrent attaches have taken the last free addresses, waits for another block.
    async fn attach_when_free(
        &self,
        preparation: &Preparation<'_>,
        request: &AttachRequest,
    ) -> Result<Arc<Sandbox>, AttachError> {
        loop {
            let changes = self.registry.changes();
            let attached = self.sandboxes.attach(request).await;
            let Err(error) = &attached else { return attached };
            let is_short = matches!(error.kind(), ErrorKind::AddressesExhausted { .. });
            if !is_short || self.registry.is_stopping() || !preparation.waits_for_block(request, changes).await {
                return attached;
            }
        }
    }

    /// A completely attached sandbox, with its additional interfaces.
    pub(crate) fn query(&self, sandbox: &SandboxId) -> Option<Arc<Sandbox>> {
        self.registry.lock().with_children(sandbox)
    }
}

impl Pods {
    /// Takes over from an earlier agent and begins the background work. Call it inside a tokio runtime, in the node's
    /// network namespace. Attaching begins to work with the first [`Self::apply_networks`].
    pub async fn start(
        options: PodsOptions,
        dataplane: Arc<Dataplane>,
        policies: Arc<Enforcer>,
        uplink: Arc<Uplink>,
        store: Store,
        contents: Contents,
    ) -> Result<Self, AttachError> {
        let PodsOptions {
            netns_dir,
            warm_sandboxes,
            plugins,
            cni_state_dir,
            cluster,
            overlay_port,
            tasks,
            force_sweep,
            address_rest,
        } = options;
        let registry = Arc::new(Registry::new(store, dataplane.capacity(), cluster.is_some()));
        if let Some(rest) = address_rest {
            registry.lock().ipam.set_rest_time(rest);
        }
        let kernel = Arc::new(Kernel::open(dataplane)?);
        let interfaces = Arc::new(Interfaces::new(&kernel, plugins.clone()));
        let reaper = Arc::new(Reaper::new(&registry, &kernel));
        let namespaces = Arc::new(NamespacePool::new(&registry, &kernel, netns_dir, warm_sandboxes));
        let gate = Gate::new(policies, Arc::clone(&uplink));
        let access = Arc::new(JoiningNamespaces::new(cluster.clone()));
        let sandboxes = Sandboxes::new(&registry, &kernel, &interfaces, &namespaces, &reaper, gate, &access);
        let sandboxes = Arc::new(sandboxes.with_tunnel(cluster.is_some().then_some(overlay_port)));
        let takeover = Takeover {
            registry: &registry,
            kernel: &kernel,
            interfaces: &interfaces,
            namespaces: &namespaces,
            sandboxes: &sandboxes,
            force_sweep,
        };
        let recovery = takeover.run(contents).await?;
        let repair = Arc::new(Repair::new(&registry, &kernel, &sandboxes, uplink));
        start_tasks(&tasks, &registry, &sandboxes, &namespaces, &repair, reaper);
        tasks.spawn("address-rests", rests::run(Arc::clone(&registry)));
        let journal = Arc::new(DeleteJournal::new(&sandboxes, cni_state_dir));
        let networks = Arc::new(NetworkRegistry::new(&registry, &kernel, plugins));
        Ok(Self {
            service: Arc::new(Service {
                registry,
                networks,
                namespaces,
                sandboxes,
                journal,
                tasks,
                recovery,
                repair,
                cluster,
                access,
                attaching: KeyedLocks::default(),
            }),
        })
    }

    /// Makes a fresh network namespace and returns its path; from the pool where that has one, about 0.1 ms.
    pub async fn create_namespace(&self, pod: PodRef, path_prefix: &str) -> Result<PathBuf, AttachError> {
        let prefix = path_prefix.to_owned();
        self.run(|service| async move { service.namespaces.create(pod, &prefix).await })
            .await
    }

    /// Removes the namespace of a sandbox, after detaching it. Unknown ones succeed.
    pub async fn delete(&self, request: DeleteRequest) -> Result<(), AttachError> {
        self.run(|service| async move { service.sandboxes.delete(request).await })
            .await
    }

    /// Attaches a pod as a client requests it, with the additional interfaces that the cluster declares for it; see the
    /// type's guarantees.
    pub async fn attach(&self, request: AttachRequest) -> Result<Arc<Sandbox>, AttachError> {
        self.run(|service| async move { service.attach(request).await }).await
    }

    /// Attaches a sandbox by a complete request.
    pub async fn attach_complete(&self, request: AttachRequest) -> Result<Arc<Sandbox>, AttachError> {
        self.run(|service| async move { service.sandboxes.attach(&request).await })
            .await
    }

    /// Binds a namespace to a sandbox without attaching it, so that deleting the sandbox removes it. Namespaces of
    /// others stay as they are.
    pub async fn claim(&self, sandbox: SandboxId, netns: PathBuf) -> Result<(), AttachError> {
        self.run(|service| async move { service.sandboxes.claim(&sandbox, &netns).await })
            .await
    }

    /// Detaches a sandbox. Unknown ones succeed.
    pub async fn detach(&self, sandbox: SandboxId) -> Result<(), AttachError> {
        self.run(|service| async move { service.sandboxes.detach(&sandbox).await })
            .await
    }

    /// Undoes one CNI call. Unknown sandboxes, and those of another call, stay and succeed.
    pub async fn undo(&self, sandbox: SandboxId, invocation: String) -> Result<(), AttachError> {
        self.run(|service| async move { service.sandboxes.undo_invocation(&sandbox, &invocation).await })
            .await
    }

    /// Detaches the sandboxes that a CNI runtime no longer has. Continues after errors and reports them.
    pub async fn collect_garbage(&self, request: GarbageRequest) -> Result<Garbage, AttachError> {
        self.run(|service| async move { Ok(service.sandboxes.collect_for_runtime(request).await) })
            .await
    }

    /// Replaces the networks.
    pub async fn apply_networks(&self, networks: DesiredNetworks) -> Result<(), AttachError> {
        self.run(|service| async move { service.networks.apply(networks).await })
            .await
    }

    /// Replaces the namespaces of manifests, by which networks decide who may join. A cluster's are in its cache.
    pub fn set_namespaces(&self, namespaces: BTreeMap<String, Labels>) {
        self.service.access.set(namespaces);
    }

    /// The rights that running pods have no longer: why they would not get these interfaces again.
    pub fn lost_rights(&self) -> BTreeMap<(SandboxId, IfName), LostRight> {
        let rights = self.rights().into_iter();
        rights.filter_map(|(key, lost)| Some((key, lost?))).collect()
    }

    /// The rights of running pods: `None` where a pod has it. What is not known now is left out.
    pub fn rights(&self) -> BTreeMap<(SandboxId, IfName), Option<LostRight>> {
        self.service.sandboxes.rights()
    }

    /// Stops the traffic of interfaces (true), or lets it flow again (false); others stay as they are, also those whose
    /// packets do not pass the agent's programs. Returns the number of changes, and the problems.
    pub fn suspend(&self, interfaces: &BTreeMap<(SandboxId, IfName), bool>) -> (usize, Vec<String>) {
        self.service.sandboxes.suspend(interfaces)
    }

    /// Gives a sandbox other labels and named ports, and enforces the policies that select it then. Unknown sandboxes,
    /// and those that have them already, succeed.
    pub async fn relabel(
        &self,
        sandbox: SandboxId,
        labels: Labels,
        ports: Vec<ContainerPort>,
    ) -> Result<(), AttachError> {
        self.run(|service| async move { service.sandboxes.relabel(&sandbox, labels, ports).await })
            .await
    }

    /// Notes which of the resting addresses ([`Self::resting`]) no other node takes for their last owners any more.
    /// Rests that had begun to end begin anew where this is no longer so.
    pub fn note_withdrawals(&self, is_withdrawn: impl Fn(&NetworkName, IpAddr) -> bool) -> Result<(), AttachError> {
        rests::note_withdrawals(&self.service.registry, is_withdrawn)
    }

    /// Lets addresses rest that the cluster still lists for pods of this node, and that no pod here has: after a reboot
    /// nothing else is known of them. Returns how many these are. For the start, before the first attach.
    pub fn rest_reported(&self, reported: Vec<(NetworkName, IpAddr, PodRef)>) -> Result<usize, AttachError> {
        rests::rest_reported(&self.service.registry, reported)
    }

    /// Performs the deletes that CNI plugins wrote down while the agent was away, and follows new ones from then on.
    pub async fn replay_deletes(&self) {
        let Service {
            journal,
            registry,
            tasks,
            ..
        } = &*self.service;
        journal.replay().await;
        let follow = Arc::clone(journal).follow(Arc::clone(registry));
        tasks.spawn_finite_slow("delete-journal", STEP_LIMIT, follow);
    }

    /// Has the pool of prewarmed namespaces filled in the background if it is not full; returns whether it was full.
    pub fn refill_pool(&self) -> bool {
        let is_full = !self.service.namespaces.needs_prewarming();
        if !is_full {
            self.service.registry.background.notify_one();
        }
        is_full
    }

    /// Refuses new work from now on; attached sandboxes stay.
    pub fn stop(&self) {
        self.service.registry.stop();
    }

    /// Writes to the state's file what only its copy has. For the end of the agent. Blocks.
    pub fn save(&self) {
        self.service.registry.maintain_store();
    }

    /// Runs work to its end: a caller that goes away does not leave it half done.
    async fn run<T, F, W>(&self, work: W) -> Result<T, AttachError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, AttachError>> + Send + 'static,
        W: FnOnce(Arc<Service>) -> F,
    {
        if self.service.registry.is_stopping() {
            return Err(Subject::node().error(ErrorKind::Stopping));
        }
        let done = kni_tasks::to_completion(work(Arc::clone(&self.service))).await;
        done.unwrap_or_else(|panicked| Err(Subject::node().ended(&panicked)))
    }
}

/// Starts the work of the attach service that runs beside requests.
fn start_tasks(
    tasks: &Tasks,
    registry: &Arc<Registry>,
    sandboxes: &Arc<Sandboxes>,
    namespaces: &Arc<NamespacePool>,
    repair: &Arc<Repair>,
    reaper: Arc<Reaper>,
) {
    tasks.spawn_finite("repair", Arc::clone(repair).run());
    tasks.spawn_slow("removals", STEP_LIMIT, reaper.run());
    tasks.spawn("state-file", Arc::clone(registry).write_file_soon());
    let prepare = background::run(Arc::clone(registry), Arc::clone(sandboxes), Arc::clone(namespaces));
    tasks.spawn_finite("preparation", prepare);
    let unclaimed = Arc::clone(namespaces).collect_unclaimed();
    tasks.spawn_slow("unclaimed-namespaces", STEP_LIMIT, unclaimed);
    let gone = Arc::clone(sandboxes).watch_namespaces();
    tasks.spawn_finite_slow("gone-namespaces", STEP_LIMIT, gone);
}
